"""Running jobs in which nothing happens, and no operation is open: ranks wait for what dtprof does not see."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dtprof.records import paths, writer
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import START_NS, write_run
from tests.diagnosis.judging import loss, ranks_in_step

QUIET_S = 60


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[int]]:
    """Two processes that belong to the run and wait."""
    command = [sys.executable, "-c", "input()"]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, env={"DTPROF_RUN_DIR": str(tmp_path / "run")})
            )
            for _ in range(2)
        ]
        yield [process.pid for process in started]
        for process in started:
            process.kill()


def write(tmp_path: Path, pids: list[int], *, holds: bool = False, hang_after_s: str = "", **facts: Any) -> Path:
    """Write the run of two ranks that took two steps, with stacks taken a minute later."""
    ranks = ranks_in_step(2, 2)
    for rank, pid in zip(ranks, pids, strict=True):
        rank.pid, rank.boot_id = pid, writer.boot_id()
    if holds:
        loss(ranks[1], 2000, done=False)
    run = write_run(tmp_path / "run", ranks)
    document = json.loads((run / paths.MANIFEST).read_text()) | {"boot_id": writer.boot_id()}
    document |= {"ended_realtime_ns": 0, "exit_status": None, "settings": {"hang_after_s": hang_after_s}}
    (run / paths.MANIFEST).write_text(json.dumps(document))
    frame = {"name": "load", "filename": "/home/me/train.py", "line": 8}
    threads = [{"thread_id": 1, "thread_name": "MainThread", "active": False, "frames": [frame]}]
    told = {"state": "sleeping", "cpu_share": 0.0, "threads": threads} | facts
    stacks = {"t_ns": START_NS + QUIET_S * 10**9, "processes": {str(pid): told for pid in pids}}
    (run / paths.node_folder_name(ranks[0].host) / paths.STACKS).write_text(json.dumps(stacks))
    return run


@pytest.mark.parametrize(
    ("facts", "words"), [({}, "at /home/me/train.py:8"), ({"state": "stopped"}, "process state stopped")]
)
def test_ranks_that_all_sleep_outside_any_operation_are_reported_with_their_lines(
    tmp_path: Path, processes: list[int], facts: dict[str, Any], words: str
) -> None:
    verdict = diagnose_run(write(tmp_path, processes, **facts))
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    (reason,) = verdict.cannot_tell
    assert "every rank sleeps outside any collective: rank 0 at /home/me/train.py:8" in reason
    assert words in reason


@pytest.mark.parametrize("facts", [{"cpu_share": 0.9}, {"state": "running"}, {"cpu_share": None}])
def test_ranks_that_compute_are_healthy_however_long_they_do(
    tmp_path: Path, processes: list[int], facts: dict[str, Any]
) -> None:
    verdict = diagnose_run(write(tmp_path, processes, **facts))
    assert (verdict.outcome, verdict.cannot_tell) == ("healthy", ())


def test_where_a_rank_waits_for_the_others_these_are_stuck(tmp_path: Path, processes: list[int]) -> None:
    verdict = diagnose_run(write(tmp_path, processes, holds=True))
    assert (verdict.outcome, verdict.findings[0].kind, verdict.cannot_tell) == ("hang", "rank-stuck", ())


def test_before_the_stall_threshold_a_rank_that_keeps_the_others_waiting_makes_the_job_slow(
    tmp_path: Path, processes: list[int]
) -> None:
    verdict = diagnose_run(write(tmp_path, processes, holds=True, hang_after_s="10000000"))
    assert (verdict.outcome, verdict.findings[0].kind) == ("slow", "rank-stuck")
    (reason,) = verdict.cannot_tell
    assert reason.startswith("slow: no rank has made progress for")
    assert reason.endswith("(stall threshold 10000000 s: --hang-after 1e+07)")
