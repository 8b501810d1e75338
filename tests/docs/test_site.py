"""The documentation site: Sphinx builds it without a warning, and a browser finds its way in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site strictly; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


def test_its_first_page_leads_to_one_that_is_there(site: Path) -> None:
    (page,) = re.findall(r'url=([^"]+)"', (site / "index.html").read_text(encoding="utf-8"))
    assert "<h1>dtprof" in (site / page).read_text(encoding="utf-8")


def test_pictures_of_the_report_follow_the_theme(site: Path) -> None:
    for page in (site / "README.html", site / "docs/how-to/read-the-report.html"):
        shown = re.findall(r'<img [^>]*class="only-(light|dark)"[^>]*>', page.read_text(encoding="utf-8"))
        assert shown.count("light") == shown.count("dark") > 0
        sources = re.findall(r'<img [^>]*src="([^"]+)"', page.read_text(encoding="utf-8"))
        assert all((page.parent / source).is_file() for source in sources)


def test_options_in_sentences_keep_their_dashes(site: Path) -> None:
    text = (site / "docs/reference/python-api.html").read_text(encoding="utf-8")
    assert "summary --json" in text
