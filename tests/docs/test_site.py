"""The documentation site: Sphinx builds it without a warning."""

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import REPOSITORY


def test_the_site_builds_strictly_with_every_page_in_its_navigation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "dummy", "-c", "docs"]
    built = subprocess.run([*command, ".", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
