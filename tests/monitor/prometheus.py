"""A real Prometheus server and its promtool for the tests; where neither is at hand, those tests are skipped."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

UNPACKED = Path(__file__).parents[2] / ".make" / "prometheus" / "usr" / "bin"
PATIENCE_S = 60


def find(program: str) -> str:
    """Return the path of prometheus or promtool; skip the test where there is none."""
    found = shutil.which(program) or shutil.which(program, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{program} is not at hand: .ci/prometheus fetches it on Debian")
    return found


def check_metrics(text: str) -> str:
    """Return what promtool has to say about metrics: nothing where all is well."""
    result = subprocess.run(
        [find("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    return (result.stdout + result.stderr).strip()


def run_unit_tests(file: Path) -> None:
    """Run promtool's unit tests of a file."""
    result = subprocess.run(
        [find("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


@contextmanager
def scraping(folder: Path, target: str, *, rules: Path | None = None) -> Iterator["Server"]:
    """Run a server that scrapes HOST:PORT each 200 ms."""
    folder.mkdir()
    port = _free_port()
    config = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "scrape_configs": [{"job_name": "dtprof", "static_configs": [{"targets": [target]}]}],
        "rule_files": [str(rules)] if rules is not None else [],
    }
    (folder / "prometheus.json").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [
        find("prometheus"),
        f"--config.file={folder / 'prometheus.json'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, folder / "log")
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running Prometheus, asked by its query API."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._url, self._process, self._log = url, process, log

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression at this moment."""
        found: list[dict[str, Any]] = self._ask(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules as the server knows them."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str) -> dict[str, Any]:
        """Return what the API answers; the server may still be starting."""
        address = f"{self._url}/api/v1/{what}"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(address, timeout=10) as answer:
                    document = json.load(answer)
                    assert document["status"] == "success", document
                    data: dict[str, Any] = document["data"]
                    return data
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(self._log.read_text(encoding="utf-8")) from None
                time.sleep(0.1)

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression as soon as there are any."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"{expression} has no sample"
            time.sleep(0.1)
        return found
