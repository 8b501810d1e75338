"""What devices did is recorded as it was: on the simulated accelerator, whose tasks are known to the ns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtprof.records import codes, events, schema
from dtprof.records.reader import open_run
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables
from tests import jobs
from tests.accelerator.compiled_device import ensure_library

pytestmark = pytest.mark.jobs

MS = 1_000_000
ROUNDING_NS = 2
"""Of durations below 16 ms, which are float32 in a record."""
MOST_INTERVALS, TOO_MANY = 8_192, 9_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ensure_library()
    folder = tmp_path_factory.mktemp("device")
    program = jobs.forked(2, jobs.PROGRAMS / "device_times.py", str(folder))
    jobs.recorded(folder / "run", program, env={"PYTHONPATH": str(jobs.REPOSITORY)})
    return folder


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, folder: Path) -> tuple[RankTables, list[dict[str, Any]]]:
    """Return what one rank recorded, and what its device did."""
    tables = open_run(folder / "run").load(request.param)
    assert (tables.errors, tables.problems, tables.notes) == (0, (), ())
    return tables, json.loads((folder / f"{request.param}.json").read_text())


def intervals(tables: RankTables, kind: int, name: str) -> Array:
    chosen = tables.device_intervals["kind"] == kind
    named = np.array([op == name for op in tables.ops])[tables.device_intervals["op"]]
    return tables.device_intervals[chosen & named]


def durations(rows: Array) -> list[int]:
    assert (rows["end_ns"] != UNKNOWN_NS).all()
    return (rows["end_ns"] - rows["begin_ns"]).tolist()


def collectives(truth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [task for task in truth if task["name"] == "simccl::ALLREDUCE"]


def test_operation_that_the_program_waits_for_at_once_takes_what_its_kernel_took(rank: Any) -> None:
    tables, truth = rank
    waited_at_once = intervals(tables, codes.DEVICE_OPERATION, "all_reduce")[2::2]
    expected = [task["end_ns"] - task["start_ns"] for task in collectives(truth)[1::2]]
    assert len(expected) == 4
    assert durations(waited_at_once) == pytest.approx(expected, abs=ROUNDING_NS)
    assert (waited_at_once["flags"] & schema.DEVICE_FLAG["on_stream"] != 0).all()


def test_stream_stands_in_a_wait_for_what_its_own_work_did_not_cover(rank: Any) -> None:
    # An all_reduce runs from its start to its end, 4 ms of which the stream computes; the rest of it is exposed.
    tables, truth = rank
    waits = intervals(tables, codes.DEVICE_WAIT, "all_reduce")
    expected = [task["end_ns"] - task["start_ns"] - 4 * MS for task in collectives(truth)[::2]]
    assert durations(waits) == pytest.approx(expected, abs=ROUNDING_NS)
    # The end of the operation is found by polling; the wait for it, which is exact, bounds it.
    operations = intervals(tables, codes.DEVICE_OPERATION, "all_reduce")[1::2]
    assert (operations["flags"] & schema.DEVICE_FLAG["polled"] != 0).all()
    assert (operations["end_ns"] <= waits["end_ns"]).all()
    assert (operations["end_ns"] > waits["begin_ns"]).all()


def test_times_are_on_the_clock_of_the_host_within_the_error_that_is_recorded(rank: Any) -> None:
    tables, truth = rank
    rows = intervals(tables, codes.DEVICE_OPERATION, "all_reduce")[1:]
    begins = np.array([task["start_ns"] for task in collectives(truth)])
    assert (np.abs(rows["begin_ns"] - begins) <= rows["error_ns"]).all()
    # The host issued each pair 40 ms and more before its device came to it.
    assert (rows["begin_ns"][::2] - rows["host_begin_ns"][::2] > 20 * MS).all()
    assert tables.streams[int(rows["stream"][0])].startswith("sim:")


def test_messages_of_a_batch_are_reported_as_one(rank: Any) -> None:
    tables, truth = rank
    (batch,) = [task for task in truth if task["name"].startswith("simccl::") and task["name"] != "simccl::ALLREDUCE"]
    sent, received = (intervals(tables, codes.DEVICE_OPERATION, name) for name in events.POINT_TO_POINT)
    for rows in (sent, received):
        assert len(rows) == 1
        assert rows["flags"][0] & schema.DEVICE_FLAG["several"]
        assert rows["end_ns"][0] >= batch["end_ns"] - rows["error_ns"][0]
        assert tables.operations["kind"][rows["row"][0]] == codes.POINT_TO_POINT


def test_phase_lasts_on_the_device_as_long_as_its_kernels(rank: Any) -> None:
    tables, _ = rank
    rows = intervals(tables, codes.DEVICE_PHASE, "phase:of 3 ms")
    assert durations(rows) == pytest.approx([3 * MS], abs=ROUNDING_NS)
    assert rows["host_begin_ns"][0] < rows["host_end_ns"][0]


def test_replay_of_a_graph_is_a_phase_of_its_own(rank: Any) -> None:
    tables, _ = rank
    rows = intervals(tables, codes.DEVICE_PHASE, events.GRAPH_REPLAY)
    assert durations(rows) == pytest.approx([2 * MS] * 3, abs=ROUNDING_NS)


def test_nothing_is_marked_in_a_graph_or_in_a_forked_process_and_that_is_counted(rank: Any) -> None:
    tables, _ = rank
    assert len(intervals(tables, codes.DEVICE_PHASE, "phase:in a graph")) == 0
    assert len(intervals(tables, codes.DEVICE_PHASE, "phase:in a child")) == 0
    assert newest_sample(tables, "device_marks_captured") == 1  # the begin; without one there is no end


def test_what_finds_no_place_is_skipped_and_counted(rank: Any) -> None:
    tables, _ = rank
    marked = len(intervals(tables, codes.DEVICE_PHASE, "phase:one of many"))
    assert marked <= MOST_INTERVALS
    assert marked + newest_sample(tables, "device_marks_skipped") == TOO_MANY


def newest_sample(tables: RankTables, name: str) -> int:
    return int(tables.samples[tables.samples["op"] == tables.ops.index(name)]["value"][-1])
