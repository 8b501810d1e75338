"""Metrics told while a job runs: served, kept in a file, or neither, and what happens to them at the end."""

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.communication.operation_timing import EXACT
from dtprof.analysis.map_reduce.placed_ranks import read_placed, time_batch
from dtprof.analysis.map_reduce.rank_facts import survey_batch
from dtprof.analysis.steps.step_boundaries import choose_steps, find_steps_of
from dtprof.intervals import NONE
from dtprof.job.clock_errors import ONE_CLOCK
from dtprof.job.collective_matching import OperationInstances
from dtprof.job.rank_batches import batch_ranks
from dtprof.launch.metrics_threads import Metrics, MetricsSettings
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.records import writer
from dtprof.records.codes import DONE
from dtprof.records.reader import open_run
from dtprof.records.shared_follower import SharedFollower
from dtprof.records.tables import RankTables
from tests import jobs
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
        started.append(
            Metrics.start(
                chosen,
                SharedFollower(run, boot_id=writer.boot_id()),
                lambda: NodeState(run="run", host="host"),
                say=said.append,
            )
        )
        return started[-1], said

    yield begin
    for one in started:
        one.stop()


def fetch(url: str) -> str:
    """Return what is served, as soon as it is."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
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
    assert 'dtprof_operations_total{group="default",op="all_reduce"} 2.0\n' in fetch(url)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.replace("/metrics", "/other"), timeout=PATIENCE_S)
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert (answer.read(), int(answer.headers["Content-Length"]) > 100) == (b"", True)
    metrics.stop()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=PATIENCE_S)


def test_a_port_that_is_taken_is_reported_and_nothing_else_happens(start: Start, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        _, said = start(MetricsSettings(port=port, file=tmp_path / "dtprof.prom"))
    assert len(said) == 1
    assert f"127.0.0.1, port {port} (Address already in use): the job goes on without them" in said[0]
    assert (tmp_path / "dtprof.prom").exists(), "the file does not suffer"


def test_an_address_of_another_host_is_reported(start: Start) -> None:
    _, said = start(MetricsSettings(port=0, address="192.0.2.1"))
    assert "metrics cannot be served on 192.0.2.1" in said[0]
    assert said[0].endswith("give as --metrics-address an address of this host, 0.0.0.0 for all it has")


def test_a_port_that_is_taken_is_not_put_down_to_the_address(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _, said = start(MetricsSettings(port=other.getsockname()[1]))
    assert said[0].endswith("give another --metrics-port, 0 for any that is free")


def test_a_file_is_whole_while_the_job_runs_and_gone_afterwards(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "text" / "dtprof.prom"
    _, said = start(MetricsSettings(file=file))
    assert "metrics cannot be kept in" in said[0]
    file.parent.mkdir()
    metrics, said = start(MetricsSettings(file=file))
    deadline = time.monotonic() + PATIENCE_S
    while "dtprof_ranks 2.0\n" not in file.read_text(encoding="utf-8"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    metrics.stop()
    assert (said, list(file.parent.iterdir())) == ([], [])


def test_an_error_of_dtprofs_own_ends_the_metrics_and_is_reported_once(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NodeState:
        raise ValueError("broken")

    said: list[str] = []
    metrics = Metrics.start(
        MetricsSettings(port=0), SharedFollower(run, boot_id=writer.boot_id()), fail, say=said.append
    )
    metrics._thread.join(PATIENCE_S)
    metrics.stop()
    assert "the metrics are no longer served: ValueError: broken" in capfd.readouterr().err
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(said[0].rpartition(" ")[2], timeout=PATIENCE_S)


def hold(job: jobs.Job, url: str, *wanted: str) -> str:
    """Return what is served as soon as it holds all of this."""
    text = ""

    def is_there() -> bool:
        nonlocal text
        text = fetch(url)
        return all(line in text for line in wanted)

    job.wait_until(is_there)
    return text


def waits(ranks: list[RankTables]) -> list[int]:
    """Return how long each rank waited for the other in collectives, as the summary reckons."""
    surveys, instances = survey_batch(batch_ranks(ranks)), OperationInstances()
    for seen in surveys:
        instances.add(seen.instances)
    found = []
    for tables, seen in zip(ranks, surveys, strict=True):
        (batch,) = read_placed(
            [tables],
            steps={tables.rank: seen.steps},
            measured=choose_steps([seen.steps]),
            instances=instances,
            pipeline_windows={tables.rank: NONE},
        )
        timing = time_batch(batch, instances, ONE_CLOCK)
        found.append(int(timing.wait[(timing.source == EXACT) & (timing.wait > 0)].sum()))
    return found


@pytest.mark.jobs
def test_a_running_job_tells_what_its_records_say(tmp_path: Path) -> None:
    steps, go = 6, tmp_path / "go"
    options = ("--metrics-port", "0", "--hang-after", "2")
    command = jobs.forked(2, jobs.PROGRAMS / "monitored.py", str(steps), str(go))
    with jobs.started([*jobs.DTPROF, "run", "-o", str(tmp_path / "run"), *options, "--", *command], tmp_path) as job:
        job.wait_until(lambda: "metrics of this node are at" in job.stderr)
        (line,) = [line for line in job.stderr.splitlines() if "metrics of this node" in line]
        url = line.rpartition(" ")[2]
        held = [f'dtprof_rank_steps_total{{rank="{rank}"}} {float(steps)}\n' for rank in range(2)]
        text = hold(job, url, *held, "dtprof_hang 1.0\n")
        told = {name: float(value) for name, value in re.findall(r"^(dtprof_\S+) (\S+)$", text, re.MULTILINE)}
        opened = open_run(tmp_path / "run")
        ranks = [(tables, find_steps_of(tables)) for tables in opened.load_all()]
        go.touch()
        assert job.wait() == 0
    total_ns = sum(int(np.diff(own.windows).sum()) for _, own in ranks)
    assert told["dtprof_step_duration_seconds_sum"] == pytest.approx(total_ns / 1e9, rel=1e-9)
    assert told["dtprof_step_duration_seconds_count"] == 2 * (steps - 1)
    assert told["dtprof_samples_total"] == 2 * steps * 4  # each rank's model is given 4 rows of floats, no tokens
    assert "dtprof_tokens_total" not in told
    for rank, waited_ns in enumerate(waits([tables for tables, _ in ranks])):
        assert told[f'dtprof_rank_wait_seconds_total{{rank="{rank}"}}'] == pytest.approx(waited_ns / 1e9, abs=1e-6)
        # Of two ranks each waits for the other alone.
        other = told[f'dtprof_rank_waited_for_seconds_total{{rank="{1 - rank}"}}']
        assert other == pytest.approx(waited_ns / 1e9, abs=1e-6)
    assert told['dtprof_rank_waited_for_seconds_total{rank="1"}'] > 0.02  # it is late by that in each step
    ended = sum(int((tables.operations["state"] == DONE).sum()) for tables, _ in ranks)
    counted = [value for name, value in told.items() if name.startswith("dtprof_operations_total")]
    assert sum(counted) == ended
    assert told['dtprof_open_operations{group="dp",op="barrier"}'] == 1  # DDP uses the default group
    assert told["dtprof_node_memory_used_bytes"] > 1e8
    capture_ns = sum(tables.capture_ns for tables, _ in ranks)
    assert told["dtprof_capture_seconds_total"] <= capture_ns / 1e9
    assert 0 < told["dtprof_metrics_cpu_seconds_total"] < 60
