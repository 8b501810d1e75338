"""The pictures of the report in docs/images: rendered from a stored run, light and dark.

    python -m tests.docs.report_images [NAME...]     # NAME: overview, pipeline, timeline; default: all

They are made and not pasted: after a change of a page, run it and look at what git shows.
"""

import sys
import tempfile
from pathlib import Path

from dtprof.cli.main import main
from tests.browser.conftest import Page, open_browser
from tests.golden.commands import unpack

FOLDER = Path(__file__).parents[2] / "docs" / "images"
RUN = "pipeline-tensor"
"""The stored run: four ranks, a pipeline of two stages by two ranks of tensor parallelism."""
VIEWS = {
    "overview": "#page-overview",
    "pipeline": "#page-pipeline",
    "timeline": "#page-timeline",
}
WIDTH, HEIGHT = 1280, 1000


def image_path(name: str, *, dark: bool) -> Path:
    """Return where the picture of a view lies."""
    return FOLDER / f"report-{name}{'-dark' if dark else ''}.png"


def render(names: list[str]) -> None:
    """Write the report of the stored run, and a picture of each of these views in both themes."""
    with tempfile.TemporaryDirectory(prefix="dtprof-images-") as folder:
        unpack(f"runs/{RUN}", Path(folder))
        html = Path(folder) / "report.html"
        if status := main(["report", str(Path(folder) / RUN), "-o", str(html)]):
            raise SystemExit(status)
        with open_browser(Path(folder) / "profile") as driver:
            driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            page = Page(driver, html)
            for dark in (False, True):
                page.emulate(dark=dark, width=WIDTH, height=HEIGHT)
                for name in names:
                    page.open(VIEWS[name])
                    page.driver.save_screenshot(str(image_path(name, dark=dark)))


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(VIEWS)
    if unknown:
        raise SystemExit(f"no view is called {', '.join(sorted(unknown))}; expected {', '.join(VIEWS)}")
    render(sys.argv[1:] or list(VIEWS))
