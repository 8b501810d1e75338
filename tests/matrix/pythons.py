"""The interpreters of this machine: those on PATH, of pyenv, and this one."""

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as 3.12; a shim of pyenv that starts none does not count."""
    homes = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for candidate in (*map(str, homes), shutil.which(f"python{version}"), sys.executable):
        if candidate is not None:
            answer = subprocess.run([candidate, "-c", VERSION], capture_output=True, text=True, check=False)
            if answer.stdout.strip() == version:
                return candidate
    return None
