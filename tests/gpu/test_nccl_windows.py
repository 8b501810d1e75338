"""Profiler windows on a real GPU: kernels of NCCL are matched with the records; torch's own snapshot of memory."""

import pickle
from pathlib import Path

import pytest

import dtprof
from dtprof.records.reader import open_run
from tests import jobs

pytestmark = pytest.mark.gpu


def test_kernels_of_a_window_are_those_of_the_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs.recorded(run, jobs.torchrun(2, jobs.PROGRAMS / "nccl_steps.py"), "--trace-steps", "3:5")
    rows = dtprof.open_run(run).table("traced_operations")
    assert len(rows) >= 2 * 3
    assert rows["on_device"].all()
    matched = [row["seq"] is not None for row in rows]
    assert sum(matched) >= 0.99 * len(matched)
    # A kernel runs after the call that launched it.
    assert all(row["traced_begin_ns"] >= row["issued_ns"] for row in rows if row["seq"] is not None)


def test_ranks_take_windows_of_kernels_in_turn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs.recorded(run, jobs.torchrun(2, jobs.PROGRAMS / "windows_in_turn.py", "cuda"), "--trace-every", "1s")
    opened = dtprof.open_run(run)
    rows = opened.table("windows")
    assert sorted(row["rank"] for row in rows if row["state"] == "written") == [0, 1]
    assert all(row["last"] == row["first"] + 1 for row in rows)
    assert ["1 % of the time" in row["reason"] for row in rows if row["state"] == "failed"] == [True, True]
    traced = opened.table("traced_operations")
    # Of DDP's all_reduce of each of two steps the kernel, besides the program's on the CPU.
    assert sum(bool(row["on_device"]) for row in traced) >= 2 * 2
    assert all(row["seq"] is not None for row in traced if row["on_device"])


def test_rank_that_runs_out_of_memory_leaves_the_snapshot_of_its_device(tmp_path: Path) -> None:
    program = tmp_path / "exhausting.py"
    program.write_text(
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(1 << 20, device='cuda'))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "weight.sum().backward()\n"
        "optimizer.step()\n"
        "torch.empty(1 << 50, device='cuda')\n"
    )
    jobs.recorded(tmp_path / "run", jobs.torchrun(1, program), status=1)
    (tables,) = open_run(tmp_path / "run").load_all()
    (snapshot,) = tables.snapshots
    assert (snapshot.state, snapshot.why, snapshot.device) == ("written", "out of memory", "cuda:0")
    with (tmp_path / "run" / "rank-00000.0" / snapshot.file).open("rb") as stream:
        segments = pickle.load(stream)["segments"]
    assert sum(segment["allocated_size"] for segment in segments) >= 4 << 20
