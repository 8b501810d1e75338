"""NCCL on a real GPU: operations are recorded once, with what their kernels did; the losses do not change."""

import json
from pathlib import Path

import numpy as np
import pytest

from dtprof.records import codes, schema
from dtprof.records.reader import open_run
from dtprof.records.tables import UNKNOWN_NS, RankTables
from tests import jobs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Job]:
    """Record several ranks on one GPU."""
    run = tmp_path_factory.mktemp("nccl") / "run"
    return run, jobs.recorded(run, jobs.torchrun(request.param, jobs.PROGRAMS / "nccl_steps.py"))


@pytest.fixture(params=["first", "last"])
def rank(request: pytest.FixtureRequest, steps: tuple[Path, jobs.Job]) -> RankTables:
    run = open_run(steps[0])
    tables = run.load(run.ranks[0 if request.param == "first" else -1])
    assert (tables.errors, tables.problems) == (0, ())
    return tables


def on_device(tables: RankTables) -> np.ndarray:
    return tables.operations[(tables.operations["flags"] & codes.DEVICE) != 0]


def test_device_operations_are_recorded_alike_on_all_ranks(steps: tuple[Path, jobs.Job]) -> None:
    names = [[tables.ops[row["op"]] for row in on_device(tables)] for tables in open_run(steps[0]).load_all()]
    assert names[0].count("all_reduce") >= 10  # 5 of gradients and 5 of losses at least
    assert names == [names[0]] * len(names)


def test_the_host_claims_to_have_seen_no_completion(rank: RankTables) -> None:
    # Of NCCL it sees none; what devices did is in records of its own, which these operations say are to be had.
    rows = on_device(rank)
    assert (rows["flags"] & schema.FLAG["completion"] == 0).all()
    assert (rows["done_ns"] == UNKNOWN_NS).all()
    assert (rows["flags"] & codes.FOLLOWED != 0).mean() >= 0.99


def test_nearly_every_operation_has_its_begin_and_end_on_the_device(rank: RankTables) -> None:
    intervals = rank.device_intervals[rank.device_intervals["kind"] == codes.DEVICE_OPERATION]
    ended = intervals[intervals["end_ns"] != UNKNOWN_NS]
    assert len(ended) >= 0.99 * len(on_device(rank))
    assert (ended["row"] >= 0).all()
    assert (ended["begin_ns"] >= ended["host_begin_ns"] - ended["error_ns"]).all()  # after the host issued it
    assert (ended["end_ns"] >= ended["begin_ns"]).all()
    assert np.median(ended["error_ns"]) <= 50_000
    # Asynchronous ones, those of DDP, by NCCL's own events; the others ran on the caller's stream.
    known = schema.DEVICE_FLAG["exact"] | schema.DEVICE_FLAG["on_stream"]
    assert (ended["flags"] & known != 0).all()


def test_phases_follow_each_other_on_the_device(rank: RankTables) -> None:
    phases = rank.device_intervals[rank.device_intervals["kind"] == codes.DEVICE_PHASE]
    names = [rank.ops[row["op"]] for row in phases if row["end_ns"] != UNKNOWN_NS]
    assert {"forward", "backward", "optimizer"} <= set(names)
    assert {"cuda_allocated_bytes", "cuda_peak_allocated_bytes"} <= set(rank.ops)


def test_the_python_hook_records_operations_and_their_durations(tmp_path: Path) -> None:
    jobs.recorded(tmp_path / "run", jobs.torchrun(2, jobs.PROGRAMS / "nccl_steps.py"), "--no-native")
    for tables in open_run(tmp_path / "run").load_all():
        assert tables.errors == 0
        assert (on_device(tables)["device_ns"] != UNKNOWN_NS).any()
        assert len(tables.device_intervals) == 0


def test_losses_are_the_same_with_and_without_recording(steps: tuple[Path, jobs.Job], tmp_path: Path) -> None:
    num_ranks = len(open_run(steps[0]).ranks)
    bare = jobs.finished(jobs.torchrun(num_ranks, jobs.PROGRAMS / "nccl_steps.py"), tmp_path)
    assert bare.process.returncode == 0, bare.stderr
    assert sorted(bare.stdout.splitlines()) == sorted(steps[1].stdout.splitlines())


def test_times_on_the_device_are_those_of_the_events_of_the_program(tmp_path: Path) -> None:
    program = jobs.torchrun(2, jobs.PROGRAMS / "nccl_known_times.py", str(tmp_path))
    jobs.recorded(tmp_path / "run", program, env={"PYTHONPATH": str(jobs.REPOSITORY)})
    durations: list[float] = []
    for tables in open_run(tmp_path / "run").load_all():
        measured = json.loads((tmp_path / f"{tables.rank}.json").read_text())
        intervals = tables.device_intervals[tables.device_intervals["end_ns"] != UNKNOWN_NS]
        names = np.array(tables.ops)[intervals["op"]]
        (phase,) = intervals[names == "phase:of known length"]
        assert (phase["end_ns"] - phase["begin_ns"]) / 1e6 == pytest.approx(measured["phase_ms"], rel=0.01, abs=0.05)
        (*_, reduced) = intervals[(names == "all_reduce") & (intervals["kind"] == codes.DEVICE_OPERATION)]
        durations.append((reduced["end_ns"] - reduced["begin_ns"]) / 1e6)
    # The kernel of rank 0 runs until that of rank 1 has begun, whose stream was busy; both take turns with the device.
    late_ms = json.loads((tmp_path / "1.json").read_text())["late_ms"]
    assert durations[0] >= 0.8 * late_ms
    assert durations[1] <= 0.5 * late_ms


def test_graph_is_captured_and_replayed_as_without_recording_and_what_it_hides_is_counted(tmp_path: Path) -> None:
    program = jobs.torchrun(2, jobs.PROGRAMS / "nccl_graph.py")
    bare = jobs.finished(program, tmp_path)
    assert bare.process.returncode == 0, bare.stderr
    recorded = jobs.recorded(tmp_path / "run", program)
    assert sorted(recorded.stdout.splitlines()) == sorted(bare.stdout.splitlines())
    for tables in open_run(tmp_path / "run").load_all():
        assert (tables.errors, tables.problems) == (0, ())
        captured = tables.samples[tables.samples["op"] == tables.ops.index("device_marks_captured")]
        assert captured["value"][-1] >= 1
        # What ran outside the graph still has its times.
        assert (tables.device_intervals["end_ns"] != UNKNOWN_NS).sum() >= 5


def test_messages_and_coalesced_operations_have_their_times(tmp_path: Path) -> None:
    jobs.recorded(tmp_path / "run", jobs.torchrun(2, jobs.PROGRAMS / "nccl_messages.py"))
    for tables in open_run(tmp_path / "run").load_all():
        assert (tables.errors, tables.problems) == (0, ())
        rows = tables.device_intervals[tables.device_intervals["kind"] == codes.DEVICE_OPERATION]
        ended = rows[rows["end_ns"] != UNKNOWN_NS]
        names = [tables.ops[row["op"]] for row in ended]
        assert names.count("send") >= 5
        assert names.count("recv") >= 5
        assert names.count("all_reduce") >= 1 + 5  # one of each coalesced batch
        assert (ended["flags"] & schema.DEVICE_FLAG["several"] != 0).any()


def test_device_of_each_rank_is_one_of_those_that_were_sampled(steps: tuple[Path, jobs.Job]) -> None:
    run = open_run(steps[0])
    (node,) = run.node_samples().values()
    assert node.no_gpus_reason is None
    index_of = {gpu["uuid"]: gpu["index"] for gpu in node.description["gpus"]}
    for tables in run.load_all():
        rows = node.gpus[index_of[tables.device_uuid]]
        assert (rows["sm_clock_mhz"] > 100).all()
        assert (rows["temperature_c"] > 0).all()
        assert (rows["lost"] == 0).all()
        assert (rows["memory_used_bytes"] > 0).any()
