"""A job that torch.profiler, DistributedDataParallel and dtprof watched at once: what they measured agrees."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtprof.analysis.communication.bus_bandwidth import bus_factor
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_run import write_imported
from dtprof.records.reader import Run, open_run
from dtprof.records.tables import Array, RankTables
from tests import jobs

pytestmark = [pytest.mark.jobs, pytest.mark.alone]

STEPS = 14
CLOSE_NS = 1_000_000
"""How far two instruments may see one event apart, on a busy machine; in the median MEDIAN_NS."""
MEDIAN_NS = 200_000
DELAY_NS = 50_000_000
"""By which rank 1 is late in every step: DDP and dtprof may measure half of that apart."""
FORWARD_NS = 20_000_000
"""What the forward pass sleeps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    jobs.recorded(folder / "own", jobs.forked(2, jobs.PROGRAMS / "profiled.py", str(folder)))
    run, _ = import_files([folder / "trace0.json.gz", folder / "trace1.json.gz"])
    write_imported(run, folder / "imported")
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> Run:
    return open_run(folder / "own")


@pytest.fixture(scope="module")
def imported(folder: Path) -> Run:
    return open_run(folder / "imported")


def rows_of(rank: RankTables, table: Array, name: str) -> Array:
    return table[[rank.ops[op] == name for op in table["op"]]]


def realtime(rank: RankTables, column: Any) -> Any:
    return column + rank.monotonic_to_realtime_ns


@pytest.mark.parametrize("rank", [0, 1])
def test_every_operation_of_the_trace_is_where_dtprof_saw_it(own: Run, imported: Run, rank: int) -> None:
    a, b = imported.load(rank), own.load(rank)
    assert len(a.operations) == (STEPS - 3) * 4
    for name in ("all_reduce", "all_gather", "broadcast"):
        theirs = rows_of(a, a.operations, name)
        ours = rows_of(b, b.operations, name)[-len(theirs) :]
        for field in ("nbytes", "peer", "dtype"):
            assert theirs[field].tolist() == ours[field].tolist(), field
        for field in ("issued_ns", "done_ns"):
            apart = np.abs(realtime(a, theirs[field]) - realtime(b, ours[field]))
            assert np.median(apart) < MEDIAN_NS, (name, field)
            assert np.percentile(apart, 80) < CLOSE_NS, (name, field)


def totals(summary: Summary, op: str) -> tuple[float, float]:
    """Return duration and exposed time of an operation, of those that are issued in every step."""
    row = max((row for row in summary.collectives if row.op == op), key=lambda row: row.count)
    assert row.duration_ns is not None
    assert row.exposed_ns is not None
    return row.duration_ns, row.exposed_ns


def test_exposed_time_is_near_what_blocked_the_program(own: Run, imported: Run) -> None:
    """Rank 1 is late in every step, so that the sums are far above what a busy machine adds."""
    ours, theirs = summarise(own), summarise(imported)
    assert theirs.world_size == 2
    (took, blocked), (their_took, exposed) = totals(ours, "all_reduce"), totals(theirs, "all_reduce")
    assert took > DELAY_NS / 2  # the mean of both ranks
    assert their_took == pytest.approx(took, rel=0.3)
    assert exposed == pytest.approx(blocked, rel=0.3)
    blamed = [straggler.rank for straggler in theirs.stragglers]
    assert blamed == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_phases_of_the_trace_begin_where_dtprof_saw_them(own: Run, imported: Run, rank: int) -> None:
    a, b = imported.load(rank), own.load(rank)
    for name in ("forward", "backward", "optimizer"):
        theirs = rows_of(a, a.spans, name)
        ours = rows_of(b, b.spans, name)[-len(theirs) :]
        assert len(theirs) == STEPS - 3
        apart = np.abs(realtime(a, theirs["begin_ns"]) - realtime(b, ours["begin_ns"]))
        assert np.median(apart) < 2 * CLOSE_NS, name


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_measured_the_same_communication_itself(folder: Path, own: Run, rank: int) -> None:
    """DDP's own timers: from the first bucket to the last, and the forward pass; of its last but one iteration."""
    told = json.loads((folder / f"ddp{rank}.json").read_text())
    tables = own.load(rank)
    reduced = rows_of(tables, tables.operations, "all_reduce")
    spans = rows_of(tables, tables.spans, "backward")
    communicated = []
    for span in spans:
        inside = (reduced["issued_ns"] >= span["begin_ns"]) & (reduced["issued_ns"] < span["end_ns"])
        assert inside.any()
        communicated.append(int(reduced["done_ns"][inside].max() - reduced["issued_ns"][inside].min()))
    last = int(told["backward_comm_time"])
    assert min(abs(last - took) for took in communicated[-2:]) < DELAY_NS / 2
    mean = np.mean(communicated[1:-1])
    assert bool(mean > DELAY_NS) is (rank == 0)
    assert int(told["avg_backward_comm_time"]) == pytest.approx(mean, abs=DELAY_NS / 2)
    forward = rows_of(tables, tables.spans, "forward")
    took = np.mean(forward["end_ns"] - forward["begin_ns"])
    assert took > FORWARD_NS
    assert int(told["avg_forward_compute_time"]) == pytest.approx(took, rel=0.3)
    buckets = [int(size) for size in told["rebuilt_bucket_sizes"].split(",")]
    assert sorted(set(reduced["nbytes"][-2:].tolist())) == sorted(set(buckets))


def test_bandwidths_follow_nccl_tests_on_a_real_job(own: Run) -> None:
    """algbw = S / t and busbw = algbw * 2 (n - 1) / n, with S and t summed from the records."""
    summary = summarise(own)
    (row,) = [row for row in summary.collectives if row.op == "all_reduce"]
    assert row.transfer_ns is not None
    assert row.busbw_gb_per_s == pytest.approx(row.bytes / row.transfer_ns * 2 * (2 - 1) / 2, rel=0.02)
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert bus_factor("all_gather", 8) == bus_factor("reduce_scatter", 8) == bus_factor("all_to_all", 8) == 7 / 8
    assert bus_factor("broadcast", 8) == bus_factor("reduce", 8) == 1
