"""TensorBoard itself with a run of ours: every view of torch-tb-profiler draws, and nothing is asked of the network."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.synthetic import Job, generate

pytestmark = pytest.mark.browser
WITHIN_S = 120
PLUGIN = "/data/plugin/torch_profiler_offline"
OPEN_VIEWS = """
    const select = [...document.querySelectorAll("[role=button][aria-haspopup=listbox]")]
        .find((one) => arguments[0].includes(one.textContent));
    if (select) select.dispatchEvent(new MouseEvent("mousedown", { bubbles: true, button: 0 }));
    return Boolean(select);
"""
CHOOSE = """
    const option = [...document.querySelectorAll("[role=option]")].find((one) => one.textContent === arguments[0]);
    if (option) option.click();
    return Boolean(option);
"""
VIEWS = ("Overview", "Operator", "Trace", "Distributed", "Memory")


def wait_for(ask: Any) -> Any:
    """Ask again and again until the answer is true."""
    end = time.monotonic() + WITHIN_S
    while True:
        try:
            if answer := ask():
                return answer
        except OSError:
            pass
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start `dtprof tensorboard` on a run of a pipeline with tensor parallelism."""
    folder = tmp_path_factory.mktemp("tensorboard")
    generate(folder / "run", Job(pp=2, tp=2, microbatches=3, steps=6))
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dtprof", "tensorboard", str(folder / "run"), "--port", str(port)]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        base = f"http://localhost:{port}"
        try:
            wait_for(lambda: process.poll() is not None or ask(f"{base}/data/plugins_listing"))
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            wait_for(lambda: ask(f"{base}{PLUGIN}/runs")["runs"])
            wait_for(lambda: not ask(f"{base}{PLUGIN}/runs")["loading"])
            yield base
        finally:
            process.terminate()
            assert process.wait(120) == 0


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def test_the_tab_of_ours_stands_for_that_of_the_package(server: str) -> None:
    plugins = ask(f"{server}/data/plugins_listing")
    assert plugins["torch_profiler_offline"]["tab_name"] == "Torch Profiler"
    assert plugins["torch_profiler_offline"]["enabled"]
    assert not plugins["pytorch_profiler"]["enabled"]
    expected = {"scalars", "histograms", "images", "text", "hparams"}
    assert {name for name in expected if plugins[name]["enabled"]} == expected


@pytest.mark.timeout(280)
def test_every_view_draws_without_the_network(server: str, chromium: webdriver.Chrome) -> None:
    chromium.get_log("browser")
    chromium.get_log("performance")
    chromium.get(f"{server}{PLUGIN}/index.html")

    def count(selector: str) -> int:
        return len(chromium.find_elements(By.CSS_SELECTOR, selector))

    def text() -> str:
        return str(chromium.execute_script("return document.body.innerText"))

    def choose(view: str) -> None:
        wait_for(lambda: chromium.execute_script(OPEN_VIEWS, VIEWS))
        wait_for(lambda: chromium.execute_script(CHOOSE, view))

    def trace_slices() -> bool:
        frames = chromium.find_elements(By.TAG_NAME, "iframe")
        if not frames:
            return False
        chromium.switch_to.frame(frames[0])
        try:
            return int(chromium.execute_script("return document.documentElement.dataset.slices || 0")) > 100
        finally:
            chromium.switch_to.default_content()

    drawn = {
        "Overview": lambda: count(".js-plotly-plot .bars path") >= 5 and count(".js-plotly-plot .slice") >= 3,
        "Operator": lambda: count(".js-plotly-plot .slice") >= 3,
        "Distributed": lambda: count(".js-plotly-plot .bars .point") >= 4 * 6 and "gloo:broadcast" in text(),
        "Memory": lambda: count(".js-plotly-plot .scatterlayer path") >= 1,
        "Trace": trace_slices,
    }

    for view in VIEWS:
        choose(view)
        wait_for(drawn[view])
    sent = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in sent if one["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if url.startswith(("http", "ws", "//")) and not url.startswith(server)] == []
    loud = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in loud if "favicon" not in message] == []
