"""The live page in a real browser: it follows the job, and what the reader has set up stays."""

import json
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains

from dtprof.records import paths
from tests import builders
from tests.browser.conftest import Page, axe_findings
from tests.builders import START_NS
from tests.monitor.test_live_run import two_ranks
from tests.monitor.test_page_feed import grow
from tests.monitor.test_top_screen import running
from tests.monitor.test_web_server import served

pytestmark = pytest.mark.browser

STATUS = "return document.querySelector('#live .live-text').textContent"


class LivePage(Page):
    """A page that a server gives."""

    address = ""

    @property
    def url(self) -> str:
        """Where the server gives it."""
        return self.address


def opened(chromium: webdriver.Chrome, run: Path, port: int) -> LivePage:
    """Return the page of a run that is served."""
    page = LivePage(chromium, run)
    object.__setattr__(page, "address", f"http://localhost:{port}/run/run/")
    page.emulate()
    page.complaints()
    page.requests()
    page.open()
    return page


def zoomed(page: LivePage) -> str:
    """Zoom into the first figure of the page; return its id."""
    plot: str = page.run("return document.querySelector('.page:not([hidden]) .plot').id")
    page.run("Plotly.relayout(arguments[0], {'yaxis.range[0]': 0.25, 'yaxis.range[1]': 0.75})", plot)
    return plot


def end_by_a_signal(run: Path) -> None:
    """Let SIGKILL end a rank, and the job by that."""
    manifest = run / paths.MANIFEST
    document = json.loads(manifest.read_text())
    (rank, _) = two_ranks(1)
    node = run / paths.node_folder_name(rank.host)
    with (node / paths.EXITS).open("a") as file:
        file.write(json.dumps({"pid": rank.pid, "status": -9, "t_ns": START_NS + 10**12}) + "\n")
    manifest.write_text(json.dumps(document | {"ended_realtime_ns": 2, "exit_status": 1}))


def test_page_follows_the_job_and_keeps_zoom_and_selection(
    chromium: webdriver.Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtprof.monitor.web.page_feed.REFRESH_EVERY_S", 0.5)
    run = running(two_ranks(30), tmp_path / "run")
    with served(run) as connection:
        page = opened(chromium, run, connection.port)
        page.wait_for(f"{STATUS}.startsWith('running, step 30')")
        first = page.run("return document.getElementById('live').dataset.version")

        plot = zoomed(page)
        page.run("document.querySelectorAll('#page-overview .cells button')[1].click()")
        chosen = page.wait_for(
            "return !document.getElementById('selected').hidden && document.getElementById('selected').textContent"
        )

        grow(run, 40, tmp_path / "grown")
        page.wait_for(f"{STATUS}.startsWith('running, step 40')")
        page.wait_for("return document.getElementById('live').dataset.version !== arguments[0]", first)
        page.wait_for("return document.documentElement.dataset.drawn")
        assert page.run("return document.getElementById(arguments[0]).layout.yaxis.range", plot) == [0.25, 0.75]
        assert page.run("return document.getElementById('selected').textContent") == chosen
        asked = page.requests()
        assert all(url.startswith(page.url) for url in asked)
        assert page.complaints() == []

        heading = "return document.querySelector('#now > summary').textContent"
        assert page.run(heading) == "Now"
        run.rename(tmp_path / "elsewhere")
        page.wait_for(f"{STATUS}.startsWith('showing the last known state')")
        assert page.run(heading) == "As last seen"
        assert page.run("return document.querySelectorAll('#page-overview .cells button').length") == 2
    page.wait_for(f"{STATUS}.includes('does not answer')")
    page.driver.get("about:blank")
    page.complaints()


CHART = """
    const plot = document.getElementById('plot-step-times');
    const ink = plot.data.find((one) => one.meta === 'ink');
    return {last: ink.hovertext.at(-1).match(/step (\\d+)/)[1], range: plot.layout.xaxis.range.map(Math.round)};
"""


def test_chart_of_steps_goes_on_but_for_what_is_zoomed_and_not_under_the_pointer(
    chromium: webdriver.Chrome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtprof.monitor.web.page_feed.REFRESH_EVERY_S", 0.5)
    run = running(two_ranks(30), tmp_path / "run")
    reached = CHART.replace("return {", "const seen = {") + "return seen.last === arguments[0]"
    with served(run) as connection:
        page = opened(chromium, run, connection.port)
        page.wait_for("return document.documentElement.dataset.drawn")
        assert page.run(CHART)["last"] == "30"
        page.run("Plotly.relayout('plot-step-times', {'xaxis.range': [10, 20]})")
        grow(run, 37, tmp_path / "more")
        page.wait_for(reached, "37")
        assert page.run(CHART)["range"] == [10, 20]

        # Under the pointer it waits, so that what is told stays; then it has all of them.
        chart = chromium.find_element("css selector", "#plot-step-times .nsewdrag")
        ActionChains(chromium).move_to_element(chart).perform()
        grow(run, 40, tmp_path / "under")
        page.wait_for(f"{STATUS}.includes('figures as of step 40')")
        assert page.run(CHART)["last"] == "37"
        ActionChains(chromium).move_to_element(chromium.find_element("css selector", "h1")).perform()
        page.wait_for(reached, "40")
        assert page.complaints() == []
    page.driver.get("about:blank")
    page.complaints()


@pytest.mark.parametrize("width", [1280, 375])
def test_axe_finds_nothing_in_live_pages_nor_in_the_list(
    width: int, chromium: webdriver.Chrome, tmp_path: Path
) -> None:
    run = running(two_ranks(30), tmp_path / "run")
    damaged = builders.write_run(tmp_path / "damaged", two_ranks(4))
    (damaged / paths.MANIFEST).write_text("{not json")
    with served(tmp_path) as connection:
        page = opened(chromium, run, connection.port)
        page.emulate(width=width)
        page.wait_for("return document.querySelectorAll('#now .now-bar').length === 2")
        assert axe_findings(page, impacts=("moderate", "serious", "critical")) == []
        page.run(
            "document.querySelector('#now .scroll').focus(); document.querySelector('#now .scroll').scrollLeft = 40"
        )
        started = page.run("return document.querySelector('#now .scroll').scrollLeft")
        assert (started > 0) == (width < 500)
        page.run("document.querySelector('#now td').textContent = 'of the look before'")
        page.wait_for("return !document.querySelector('#now td').textContent.startsWith('of')")
        assert page.run("return document.querySelector('#now .scroll').scrollLeft") == started
        assert page.run("return document.activeElement.className") == "scroll"
        page.run("document.querySelector('.back a').click()")
        page.wait_for("return document.title.startsWith('Runs')")
        assert axe_findings(page, impacts=("moderate", "serious", "critical")) == []
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints() == []
    page.driver.get("about:blank")
    page.complaints()
    page.emulate()


def test_a_page_that_comes_up_while_another_is_open_leaves_that_as_it_is(
    chromium: webdriver.Chrome, tmp_path: Path
) -> None:
    run = running(two_ranks(30, late_ms=0), tmp_path / "run")
    with served(run) as connection:
        page = opened(chromium, run, connection.port)
        page.wait_for(f"{STATUS}.startsWith('running, step 30')")
        plot = zoomed(page)
        assert page.run("return document.querySelector(\".tabs a[href='#page-hang']\")") is None
        end_by_a_signal(run)
        page.wait_for(f"{STATUS}.startsWith('ended with exit status 1')")
        page.wait_for("return document.querySelector(\".tabs a[href='#page-hang']\")")
        page.wait_for("return document.documentElement.dataset.drawn")
        assert page.run("return document.getElementById(arguments[0]).layout.yaxis.range", plot) == [0.25, 0.75]
        assert page.run("return document.querySelector('.tabs a[aria-current]').hash") == "#page-overview"
        page.run("document.querySelector(\".tabs a[href='#page-hang']\").click()")
        page.wait_for("return document.documentElement.dataset.drawn === 'page-hang'")
        page.wait_for("return document.getElementById('page-hang').innerText.includes('killed by SIGKILL')")
        assert page.complaints() == []
    page.driver.get("about:blank")
    page.complaints()
