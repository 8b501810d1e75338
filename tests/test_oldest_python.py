"""All that dtprof uses of the standard library is there in the oldest Python that it supports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import REPOSITORY


@pytest.mark.thorough
def test_nothing_of_the_standard_library_is_newer_than_the_oldest_python(tmp_path: Path) -> None:
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    # Without what it imports: stubs of numpy need a newer Python. So only complaints about modules count.
    options = ["--python-version", oldest, "--follow-imports=skip", "--ignore-missing-imports", "--config-file="]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path), "dtprof"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout
    assert found.splitlines()[-1].startswith("Found "), found[-2000:]
    assert [line for line in found.splitlines() if "Module has no attribute" in line or "Cannot find" in line] == []
