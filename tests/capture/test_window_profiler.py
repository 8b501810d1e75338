"""Windows of torch.profiler in a real job: planned and asked for, matched with the records, losses as without them."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtprof
from tests import jobs

pytestmark = pytest.mark.jobs

CLOSE_NS = 1_000_000


def trace(run: Path, *options: str, status: int = 0) -> dict[str, Any]:
    """Return what `dtprof trace --json` prints, and what it says beside that."""
    command = [*jobs.DTPROF, "trace", str(run), *options, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == status, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout) if ended.stdout else {}
    return document | {"said": ended.stderr}


def test_windows_and_snapshots_of_a_job(tmp_path: Path) -> None:
    run, stop = tmp_path / "run", tmp_path / "stop"
    # Steps 11 to 20 are the second training.
    options = ["--trace-steps", "14:16", "--trace-ranks", "1,5"]
    command = [*jobs.DTPROF, "run", "-o", str(run), *options, "--"]
    with jobs.started([*command, *jobs.forked(2, jobs.PROGRAMS / "windowed.py", str(stop))], tmp_path) as job:
        job.wait_until(lambda: job.stdout.count("same losses") == 2)
        asked = trace(run, "--now", "--steps", "2", "--memory", status=1)
        unknown = trace(run, "--now", "--ranks", "7", status=2)
        stop.touch()
        assert job.wait() == 0, job.stderr
    assert job.stdout.count("same losses True") == 2
    assert job.stdout.count("own profiler saw True") == 2
    assert "rank 5 takes no window: the job has ranks 0 to 1" in job.stderr

    # Rank 0 runs a profiler of its own, if only waiting; rank 1 has answered.
    assert "rank 0: the program runs a torch.profiler of its own" in asked["said"]
    assert [(row["rank"], row["state"]) for row in asked["windows"]] == [(0, "failed"), (1, "written")]
    assert {row["rank"] for row in asked["snapshots"]} == {0, 1}
    # Two layers of 64 x 64 weights and 64 biases, float32; AdamW holds two of each, and a step count apiece.
    held = asked["snapshots"][0]["held_bytes"]
    assert held["parameters"] == held["gradients"] == 2 * (64 * 64 + 64) * 4
    assert held["optimizer_state"] == 2 * held["parameters"] + 4 * 4
    with gzip.open(asked["snapshots"][0]["file"]) as file:
        tensors = json.load(file)
    assert {row["name"] for row in tensors["largest"]} >= {"module.0.weight", "module.2.bias"}
    assert tensors["by_category"]["parameters"] == held["parameters"]
    assert "rank 7 left no log" in unknown["said"]

    document = trace(run)
    planned = document["windows"][0 if document["windows"][0]["rank"] == 1 else 1]
    assert (planned["rank"], planned["first"], planned["last"], planned["state"]) == (1, 14, 16, "written")
    for row in (planned, asked["windows"][1]):
        assert row["traced"] >= 3
        assert row["matched_fraction"] == 1.0  # at least 99 % is asked for
        assert row["recorded"] == row["traced"]
        assert row["clock_error_ns"] < CLOSE_NS
    with gzip.open(planned["file"]) as file:
        events = json.load(file)["traceEvents"]
    assert [row["name"] for row in events if row["name"].startswith("ProfilerStep#")] == [
        f"ProfilerStep#{step}" for step in (14, 15, 16)
    ]
    assert not list(run.glob("rank-*/.window*"))

    opened = dtprof.open_run(run)
    rows = opened.table("traced_operations")
    first = rows["window"] == 1
    assert set(np.asarray(rows["step"][first]).tolist()) == {13, 14, 15}  # steps ended before
    apart = np.abs(rows["traced_begin_ns"] - rows["issued_ns"])
    took = np.abs((rows["traced_end_ns"] - rows["traced_begin_ns"]) - rows["recorded_ns"])
    assert np.median(apart) < CLOSE_NS
    assert np.median(took) < CLOSE_NS
    assert any("profiler windows" in reason for reason in opened.summary().cannot_tell)


def test_ranks_take_windows_in_turn_and_stop_at_their_share_of_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = jobs.recorded(run, jobs.forked(2, jobs.PROGRAMS / "windows_in_turn.py"), "--trace-every", "1s").stderr
    rows = trace(run)["windows"]
    for rank in (0, 1):
        written, passed = [row for row in rows if row["rank"] == rank]
        assert (written["state"], passed["state"]) == ("written", "failed")
        assert written["last"] == written["first"] + 1
        # Two steps, each of one all_reduce of DDP's and one of the program's.
        assert (written["traced"], written["matched_fraction"]) == (4, 1.0)
        assert "may take 1 % of the time" in passed["reason"]
    assert said.count("no profiler window is taken in turn") == 1
    first, second = sorted((row for row in rows if row["state"] == "written"), key=lambda row: row["begin_ns"])
    assert second["begin_ns"] >= first["ready_ns"]
