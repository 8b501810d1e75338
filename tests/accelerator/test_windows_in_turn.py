"""Profiler windows are taken in turn on a device, too, and change nothing of what is known of its time."""

from pathlib import Path

import pytest

import dtprof
from tests import jobs

pytestmark = [pytest.mark.jobs, pytest.mark.thorough]


def test_ranks_of_a_device_take_windows_in_turn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs.recorded(run, jobs.forked(2, jobs.PROGRAMS / "windows_in_turn.py", "sim"), "--trace-every", "1s")
    opened = dtprof.open_run(run)
    rows = opened.table("windows")
    assert sorted(row["rank"] for row in rows if row["state"] == "written") == [0, 1]
    assert all(row["last"] == row["first"] + 1 for row in rows)
    traced = opened.table("traced_operations")
    # Two steps of each rank, each of one all_reduce of DDP's on the device and one of the program's on the CPU.
    assert [row["op"] for row in traced] == ["all_reduce"] * 8
    assert all(row["seq"] is not None for row in traced)
    summary = opened.summary()
    assert all(rank.partition_ns is not None for rank in summary.ranks), summary.cannot_tell
