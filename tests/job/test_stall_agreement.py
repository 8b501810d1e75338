"""The watcher, `top`, live pages, metrics and `diagnose` agree on whether one and the same job has stalled."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dtprof.launch import hang_watcher, stack_sampler
from dtprof.monitor.prometheus.metrics_collector import Collector
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.monitor.run_monitor import Monitor
from dtprof.records import paths, writer
from dtprof.records.shared_follower import SharedFollower
from dtprof.session.job_recording import diagnose_stalled
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import START_NS, RankBuilder, write_run
from tests.monitor.growing import grow
from tests.monitor.test_page_feed import feed_of

S = 1_000_000_000
STEPS = 12


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[list[int]]:
    """Two processes that belong to the run and wait."""
    command = [sys.executable, "-c", "input()"]
    environment = {"DTPROF_RUN_DIR": str(tmp_path / "run")}
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)) for _ in range(2)
        ]
        yield [process.pid for process in started]
        for process in started:
            process.kill()


def write(run: Path, pids: list[int], *, period_s: float, quiet_s: float, phase: str, hang_after_s: float) -> Path:
    """Write a job of two ranks; at last rank 0 waits in an all_reduce and rank 1 is in a phase, or in none."""
    last_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - START_NS - int(quiet_s * S)
    ranks = [RankBuilder(rank, 2, boot_id=writer.boot_id(), host=writer.host_name(), closed=False) for rank in (0, 1)]
    for rank, pid in zip(ranks, pids, strict=True):
        rank.pid = pid
        for number in range(STEPS):
            begin = last_ns - int((STEPS - number) * period_s * S)
            rank.op("all_reduce", begin, begin + 10, nbytes=8, step=0 if phase == "forward" else number)
    ranks[0].op("all_reduce", last_ns, nbytes=8, step=0 if phase == "forward" else STEPS)
    if phase:
        ranks[1].span(phase, last_ns, step=0 if phase == "forward" else STEPS)
    write_run(run, ranks)
    manifest = json.loads((run / paths.MANIFEST).read_text()) | {"boot_id": writer.boot_id(), "exit_status": None}
    manifest |= {"ended_realtime_ns": 0, "settings": {"hang_after_s": f"{hang_after_s:g}"}}
    (run / paths.MANIFEST).write_text(json.dumps(manifest))
    return run


def stacks(pids: list[int], *, is_busy: bool) -> str:
    """Return stacks as the watcher has them taken."""
    threads = [{"thread_id": 1, "thread_name": "MainThread", "active": is_busy, "frames": []}]
    process = {"state": "running" if is_busy else "sleeping", "cpu_share": 0.9 * is_busy, "threads": threads}
    document = {"t_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC), "processes": {str(pid): process for pid in pids}}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("hang_after_s", "period_s", "phase", "quiet_s", "is_stalled"),
    [
        (60, 1, "", 20, False),
        (60, 1, "", 90, True),
        # Steps of 4.5 s leave 8 intervals of half a second empty, 4 s; ten such pauses are 40 s.
        (10, 4.5, "", 18, False),
        (10, 4.5, "", 70, True),
        (20, 1, "forward", 60, False),  # the first step: five times 20 s
        (20, 1, "forward", 140, True),
        # Not longer: a machine that has just started is asked too, and no record is older than it.
        (20, 1, "checkpoint", 150, False),
        (20, 1, "evaluation", 150, False),
        (20, 1, "compile", 150, False),
    ],
)
def test_all_views_say_the_same_of_a_job(
    hang_after_s: float,
    period_s: float,
    phase: str,
    quiet_s: float,
    is_stalled: bool,
    tmp_path: Path,
    pids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = write(tmp_path / "run", pids, period_s=period_s, quiet_s=quiet_s, phase=phase, hang_after_s=hang_after_s)

    def sample(pids: list[int], folder: Path, **_: object) -> None:
        (folder / paths.STACKS).write_text(stacks(pids, is_busy=phase in ("forward", "evaluation")))

    monkeypatch.setattr(stack_sampler, "sample", sample)
    now_s, said = [1000.0], list[str]()
    watcher = hang_watcher.Watcher(
        run=run, hang_after_s=hang_after_s, diagnose=diagnose_stalled, say=said.append, clock=lambda: now_s[0]
    )
    monitor = Monitor(run)
    for _ in grow(run, STEPS + 1):
        now_s[0] += period_s
        watcher.tick()
        monitor.poll()
    for _ in range(round(2 * quiet_s)):
        now_s[0] += 0.5
        watcher.tick()
    metrics = Collector(
        SharedFollower(run, boot_id=None).subscribe(),
        state=lambda: NodeState(run="", host="", is_hung=watcher.hang is not None),
    )
    alarms = feed_of(run, time.monotonic).since(0)["status"]["alarms"]
    assert {
        "watcher": watcher.hang is not None,
        "top": monitor.poll().is_stalled,
        "pages": any(alarm.startswith("stalled: ") for alarm in alarms),
        "metrics": b"dtprof_hang 1.0\n" in metrics.collect(),
        "diagnose": diagnose_run(run).outcome == "hang",
    } == dict.fromkeys(("watcher", "top", "pages", "metrics", "diagnose"), is_stalled)
    assert bool(said) == is_stalled
