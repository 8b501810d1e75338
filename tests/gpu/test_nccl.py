"""NCCL on a real GPU: operations are recorded once, with what their kernels did; the losses do not change."""

from pathlib import Path

import numpy as np
import pytest

from dtprof.records import codes, schema
from dtprof.records.reader import open_run
from dtprof.records.tables import UNKNOWN_NS, RankTables
from tests import jobs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Job]:
    """Record two ranks on one GPU."""
    run = tmp_path_factory.mktemp("nccl") / "run"
    return run, jobs.recorded(run, jobs.torchrun(2, jobs.PROGRAMS / "nccl_steps.py"))


@pytest.fixture(params=[0, 1])
def rank(request: pytest.FixtureRequest, steps: tuple[Path, jobs.Job]) -> RankTables:
    tables = open_run(steps[0]).load(request.param)
    assert (tables.errors, tables.problems) == (0, ())
    return tables


def on_device(tables: RankTables) -> np.ndarray:
    return tables.operations[(tables.operations["flags"] & codes.DEVICE) != 0]


def test_device_operations_are_recorded_alike_on_both_ranks(steps: tuple[Path, jobs.Job]) -> None:
    names = [[tables.ops[row["op"]] for row in on_device(tables)] for tables in open_run(steps[0]).load_all()]
    assert names[0].count("all_reduce") >= 10  # 5 of gradients and 5 of losses at least
    assert names[0] == names[1]


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
    bare = jobs.finished(jobs.torchrun(2, jobs.PROGRAMS / "nccl_steps.py"), tmp_path)
    assert bare.process.returncode == 0, bare.stderr
    assert sorted(bare.stdout.splitlines()) == sorted(steps[1].stdout.splitlines())
