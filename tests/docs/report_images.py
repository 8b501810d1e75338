"""The pictures of the report in docs/images: every page, rendered from stored runs, light and dark.

    python -m tests.docs.report_images [NAME...]     # NAME: overview, hang, timeline ...; default: all

They are made and not pasted: after a change of a page, run it and look at what git shows.
"""

import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dtprof.cli.main import main
from tests.browser.conftest import Page, open_browser
from tests.golden.commands import unpack

FOLDER = Path(__file__).parents[2] / "docs" / "images"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The stored run that a page is shown of, and the one that it is compared with."""

    run: str = "pipeline-tensor"
    """By default of four ranks: a pipeline of two stages by two ranks of tensor parallelism."""
    against: str | None = None
    page: str | None = None
    """By default the one that the view is called after."""
    height: int = 1000


VIEWS = {
    "overview": Shown(),
    "top": Shown(page="overview", height=690),
    "hang": Shown(run="hung"),
    "changes": Shown(),
    "timeline": Shown(),
    "pipeline": Shown(),
    "collectives": Shown(),
    "memory": Shown(),
    "stragglers": Shown(run="slow"),
    "comparison": Shown(run="ddp", against="slow"),
    "measurement": Shown(),
}
WIDTH = 1280


def image_path(name: str, *, dark: bool) -> Path:
    """Return where the picture of a view lies."""
    return FOLDER / f"report-{name}{'-dark' if dark else ''}.png"


def write_report(shown: Shown, folder: Path) -> Path:
    """Write the report of a stored run, unless it is there; return its file.

    Raises:
        SystemExit: the report could not be written.
    """
    html = folder / f"{shown.run}-{shown.against}.html"
    if not html.exists():
        runs = [run for run in (shown.run, shown.against) if run is not None]
        for run in runs:
            if not (folder / run).exists():
                unpack(f"runs/{run}", folder)
        against = ["--against", shown.against] if shown.against else []
        with contextlib.chdir(folder):  # a page of a comparison shows where both runs lie
            if status := main(["report", shown.run, *against, "-o", html.name]):
                raise SystemExit(status)
    return html


def take(page: Page, name: str, path: Path, *, dark: bool = False) -> None:
    """Write a picture of a view of a report."""
    page.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    page.emulate(dark=dark, width=WIDTH, height=VIEWS[name].height)
    page.open(f"#page-{VIEWS[name].page or name}")
    page.driver.save_screenshot(str(path))


def render(names: list[str]) -> None:
    """Write the reports of the stored runs, and a picture of each of these pages in both themes."""
    with tempfile.TemporaryDirectory(prefix="dtprof-images-") as name_of_folder:
        folder = Path(name_of_folder)
        with open_browser(folder / "profile") as driver:
            for name in names:
                page = Page(driver, write_report(VIEWS[name], folder))
                for dark in (False, True):
                    take(page, name, image_path(name, dark=dark), dark=dark)


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(VIEWS)
    if unknown:
        raise SystemExit(f"no view is called {', '.join(sorted(unknown))}; expected {', '.join(VIEWS)}")
    render(sys.argv[1:] or list(VIEWS))
