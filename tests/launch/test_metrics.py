"""Metrics told while a job runs: served, kept in a file, or neither, and what happens to them at the end."""

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtprof.launch.metrics import Metrics, MetricsSettings
from dtprof.metrics.node import NodeState
from dtprof.run_format import writer
from tests.builders import RankBuilder, write_run

PATIENCE_S = 60


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ranks = [RankBuilder(rank, world_size=2, boot_id=writer.boot_id()) for rank in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 100, 200, nbytes=64)
    return write_run(tmp_path / "run", ranks)


@pytest.fixture
def start(run: Path) -> Iterator[Callable[[MetricsSettings], tuple[Metrics, list[str]]]]:
    started: list[Metrics] = []

    def begin(chosen: MetricsSettings) -> tuple[Metrics, list[str]]:
        said: list[str] = []
        started.append(Metrics.start(chosen, run, lambda: NodeState(run="run", host="host"), say=said.append))
        return started[-1], said

    yield begin
    for one in started:
        one.stop()


def fetch(url: str) -> str:
    """Return what is served, as soon as it is."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:  # as long as nothing was collected
                raise
            time.sleep(0.05)


Start = Callable[[MetricsSettings], tuple[Metrics, list[str]]]


def test_metrics_are_served_until_the_job_has_ended(start: Start) -> None:
    metrics, said = start(MetricsSettings(port=0))
    url = said[0].removeprefix("metrics of this node are at ")
    assert url.startswith("http://127.0.0.1:")
    assert 'dtprof_operations_total{group="default",op="all_reduce"} 2\n' in fetch(url)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.replace("/metrics", "/other"), timeout=10)
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert (answer.read(), int(answer.headers["Content-Length"]) > 100) == (b"", True)
    metrics.stop()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_port_that_is_taken_is_told_and_nothing_else_happens(start: Start, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        _, said = start(MetricsSettings(port=port, file=tmp_path / "dtprof.prom"))
    assert len(said) == 1
    assert f"127.0.0.1, port {port} (Address already in use): the job goes on without them" in said[0]
    assert (tmp_path / "dtprof.prom").exists(), "the file does not suffer"


def test_an_address_of_another_host_is_told(start: Start) -> None:
    _, said = start(MetricsSettings(port=0, address="192.0.2.1"))
    assert "metrics cannot be served on 192.0.2.1" in said[0]


def test_a_file_is_whole_while_the_job_runs_and_gone_afterwards(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "text" / "dtprof.prom"
    _, said = start(MetricsSettings(file=file))
    assert "metrics cannot be kept in" in said[0]
    file.parent.mkdir()
    metrics, said = start(MetricsSettings(file=file))
    deadline = time.monotonic() + PATIENCE_S
    while "dtprof_ranks 2\n" not in file.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    metrics.stop()
    assert (said, list(file.parent.iterdir())) == ([], [])


def test_an_error_of_dtprofs_own_ends_the_metrics_and_is_told_once(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NodeState:
        raise ValueError("broken")

    said: list[str] = []
    metrics = Metrics.start(MetricsSettings(port=0), run, fail, say=said.append)
    metrics._thread.join(PATIENCE_S)
    metrics.stop()
    assert "the metrics are not told any longer: ValueError: broken" in capfd.readouterr().err
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(said[0].rpartition(" ")[2], timeout=10)
