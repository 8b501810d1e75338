"""A headless Chromium that opens pages from disk and keeps a log of what it asks for."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from dtprof.analysis.results import Summary
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.html_file import write_html
from dtprof.report.pages.page_dashboard import load_report
from dtprof.report.pages.page_panels import panel_names

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)
AXE = files("axe_core_python") / "axe.min.js"
DRAWN_WITHIN_S = 60


@dataclass(frozen=True)
class Page:
    """A page in the browser."""

    driver: webdriver.Chrome
    path: Path

    @property
    def url(self) -> str:
        """Where it lies on disk."""
        return self.path.as_uri()

    def open(self, fragment: str = "") -> None:
        """Open it anew and wait until every figure is drawn, or the page says why not."""
        self.driver.get("about:blank")
        self.driver.get(self.url + fragment)
        end = time.monotonic() + DRAWN_WITHIN_S
        while not self.run(
            "return document.documentElement.dataset.drawn || !document.getElementById('notice').hidden"
        ):
            assert time.monotonic() < end, f"the page was not drawn: {self.driver.get_log('browser')}"
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript until it returns something true."""
        end = time.monotonic() + DRAWN_WITHIN_S
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)
        return value

    def emulate(self, *, dark: bool = False, media: str = "", width: int = 1280, height: int = 900) -> None:
        """Set what the page learns of its surroundings."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme, still]})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def complaints(self) -> list[str]:
        """Return what the browser wrote on its console since last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for since last asked, without what is in the file or the browser."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith(("data:", "blob:", "about:", "chrome:"))]


def axe_findings(
    page: Page, within: str = "html", *, impacts: Sequence[str] = ("serious", "critical")
) -> list[list[str]]:
    """Return what axe finds: the rule, the element and why."""
    page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    found: list[list[str]] = page.driver.execute_async_script(
        "const done = arguments[2]; axe.run(arguments[0]).then((r) => done(r.violations.filter("
        "(v) => arguments[1].includes(v.impact))"
        ".map((v) => [v.id, v.nodes[0].html, v.nodes[0].failureSummary])))",
        within,
        list(impacts),
    )
    return found


@contextmanager
def open_browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser with a profile of its own, and quit it at the end.

    Raises:
        FileNotFoundError: Chromium or its driver is not on PATH.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if browser is None or driver_path is None:
        missing = "no chromium" if browser is None else "no chromedriver"
        raise FileNotFoundError(f"{missing} on PATH: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Start the browser once."""
    with ExitStack() as stack:
        try:
            driver = stack.enter_context(open_browser(tmp_path_factory.mktemp("chromium")))
        except FileNotFoundError as missing:
            if os.environ.get("CI"):
                pytest.fail(f"{missing}; it is not optional where CI is set")
            pytest.skip(str(missing))
        yield driver


@pytest.fixture
def show(chromium: webdriver.Chrome, tmp_path: Path) -> Callable[..., Page]:
    """Return a function that writes a report and opens it, light and 1280 wide."""

    def write_and_open(results: Summary | Source, fragment: str = "") -> Page:
        path = tmp_path / "report of a run.html"
        source = results if isinstance(results, Source) else Source(summary=results)
        write_html(source, load_report(panel_names(), available=source.available), path, force=True)
        page = Page(chromium, path)
        page.emulate()
        page.complaints()
        page.requests()
        page.open(fragment)
        page.run("try { localStorage.clear() } catch {}")
        return page

    return write_and_open
