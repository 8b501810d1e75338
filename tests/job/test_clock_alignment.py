"""Clocks of several hosts, aligned by round trips and by the records themselves, against known offsets."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.comparison.comparison_series import RANKS, Figure, measure_run
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.nodes.host_clocks import ClockPoint, HostClock
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import synthetic
from tests.builders import START_NS, MemoryRun, RankBuilder

MS = 1_000_000
US = 1_000
STEP = 100 * MS


def train_on_two_hosts(late_ns: Callable[[int], int], num_ranks: int = 4, num_steps: int = 8) -> list[RankTables]:
    """Run steps with an all_reduce that takes 1 ms after the last came; the upper half of the ranks is on host-b."""
    ranks = []
    for number in range(num_ranks):
        on_b = number >= num_ranks // 2
        rank = RankBuilder(number, world_size=num_ranks)
        if on_b:
            rank.host, rank.boot_id = "host-b", "boot-b"
        for step in range(num_steps):
            begin, last = step * STEP, max(map(late_ns, range(num_ranks)))
            rank.span("backward", begin + 10 * MS, begin + 50 * MS + late_ns(number))
            rank.op("all_reduce", begin + 50 * MS + late_ns(number), begin + 51 * MS + last)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
        ranks.append(rank.tables())
    return ranks


def shift(tables: RankTables, offset_ns: int) -> RankTables:
    """Return the tables as a clock shows them that is ahead by this much."""
    moved = {}
    for name in ("operations", "spans"):
        rows = getattr(tables, name).copy()
        for column in rows.dtype.names or ():
            if column.endswith("_ns") and column not in ("wait_ns", "device_ns"):
                rows[column] += np.where(rows[column] >= 0, offset_ns, 0)
        moved[name] = rows
    return replace(tables, **moved, first_ns=tables.first_ns + offset_ns, last_ns=tables.last_ns + offset_ns)


def measured(offset_ns: int, error_ns: int) -> dict[str, HostClock]:
    """Return the clocks as launchers would have measured them twice."""
    points = tuple(
        ClockPoint(t_ns=START_NS + offset_ns + at, offset_ns=-offset_ns, error_ns=error_ns) for at in (0, 8 * STEP)
    )
    return {
        "host-a": HostClock(host="host-a", boot_id="boot-a", reference="host-a", points=()),
        "host-b": HostClock(host="host-b", boot_id="boot-b", reference="host-a", points=points),
    }


def summarise_skewed(tables: list[RankTables], offset_ns: int, clocks: dict[str, HostClock]) -> Summary:
    skewed = [shift(table, offset_ns) if table.boot_id == "boot-b" else table for table in tables]
    return summarise(MemoryRun(skewed, clocks=clocks))


def late(rank: int) -> int:
    return 20 * MS if rank == 3 else 0


@pytest.mark.parametrize("offset_ns", [0, 7 * MS, -500 * MS])
def test_measured_clocks_show_what_one_clock_would(offset_ns: int) -> None:
    tables = train_on_two_hosts(late)
    true = summarise(MemoryRun([replace(table, boot_id="boot-a") for table in tables]))
    found = summarise_skewed(tables, offset_ns, measured(offset_ns, 20 * US))
    assert found.clock_error_ns is not None
    assert found.clock_error_ns <= 21 * US  # and 1 ns for each ms to the nearest measurement
    assert [(s.rank, s.blame_ns_per_step, s.waiters) for s in (found.stragglers or ())] == [
        (s.rank, s.blame_ns_per_step, s.waiters) for s in (true.stragglers or ())
    ]
    assert [rank.partition_ns for rank in found.ranks] == [rank.partition_ns for rank in true.ranks]
    assert found.timeline is not None
    host_a, host_b = found.clocks
    assert (host_a.offset_ns, host_a.by, host_b.by) == (0, None, "round trips")
    assert host_b.offset_ns == -offset_ns


def test_records_alone_align_clocks_that_nobody_measured() -> None:
    # Whoever comes 20 ms late is in for 1 ms, the others for 21: the offset is known to 1 ms, less the drift.
    found = summarise_skewed(train_on_two_hosts(late), 7 * MS, {})
    assert found.clock_error_ns is not None
    assert MS <= found.clock_error_ns < 25 * MS
    host_b = found.clocks[1]
    assert host_b.by == "records"
    assert host_b.offset_ns is not None
    assert abs(host_b.offset_ns + 7 * MS) <= found.clock_error_ns


def test_records_tighten_what_was_measured() -> None:
    # Everybody comes and goes within 1 ms: an error of 10 ms is cut down to that, and a bias of 8 ms is found.
    found = summarise_skewed(train_on_two_hosts(lambda _: 0), 8 * MS, measured(0, 10 * MS))
    assert found.clock_error_ns is not None
    assert found.clock_error_ns < 1.2 * MS
    host_b = found.clocks[1]
    assert host_b.by == "round trips and records"
    assert host_b.offset_ns == pytest.approx(-8 * MS, abs=found.clock_error_ns)


def test_records_that_contradict_the_measurement_are_believed_and_it_is_said() -> None:
    found = summarise_skewed(train_on_two_hosts(lambda _: 0), 8 * MS, measured(0, MS))
    assert any("contradict" in caveat for caveat in found.cannot_tell)
    assert found.clocks[1].offset_ns == pytest.approx(-8 * MS, abs=1.2 * MS)


def late_by_less_than_the_error(offset_ns: int = 0) -> MemoryRun:
    """Return a run with 8 ms of delay and clocks known to 10 ms; a transfer of 20 ms lets records know no better."""
    tables = []
    for table in train_on_two_hosts(lambda rank: 8 * MS if rank == 3 else 0):
        operations = table.operations.copy()
        for column in ("done_ns", "wait_ns"):
            operations[column] += 20 * MS
        table = replace(table, operations=operations)
        tables.append(shift(table, offset_ns) if table.boot_id == "boot-b" else table)
    return MemoryRun(tables, clocks=measured(0, 10 * MS))


def test_what_is_smaller_than_the_error_blames_nobody_and_is_said() -> None:
    found = summarise(late_by_less_than_the_error())
    assert {waiter.rank for s in (found.stragglers or ()) for waiter in s.waiters} <= {2}  # it shares the clock
    assert any("below the error of the clocks" in caveat for caveat in found.cannot_tell)


def test_comparison_has_the_caveats_of_the_summary() -> None:
    run = late_by_less_than_the_error(offset_ns=-4 * MS)  # which nobody can know
    figures = measure_run(run).estimates
    for rank in summarise(run).ranks:
        assert rank.partition_ns is not None
        for part in ("exposed_wait", "exposed_transfer"):
            assert figures[Figure(RANKS, f"{part}_ns", rank=rank.rank)].mean == pytest.approx(
                rank.partition_ns[part], abs=1
            )


def test_hosts_that_share_no_operation_are_not_aligned() -> None:
    ranks = [RankBuilder(i, world_size=2, boot_id=f"boot-{i}") for i in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 10, 20, group=rank.group(f"own-{rank.rank}", (rank.rank,)))
    found = summarise(MemoryRun(ranks))
    assert found.clock_error_ns is None
    assert any("rank 1 are not aligned" in caveat for caveat in found.cannot_tell)


@pytest.mark.parametrize("is_measured", [True, False])
def test_generated_offsets_and_drifts_are_found_within_the_stated_error(is_measured: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    for number, shape in enumerate(({"dp": 8}, {"pp": 4, "dp": 2, "microbatches": 4}, {"tp": 2, "dp": 4})):
        clocks = {
            host: synthetic.HostClock(
                offset_ns=int(random.integers(10**9)) if host else 0,
                drift_ppm=float(random.uniform(-50, 50)) if host else 0.0,
                error_ns=int(random.integers(500, 50_000)),
                measured=is_measured,
            )
            for host in range(4)
        }
        job = synthetic.Job(**shape, steps=12, jitter=0.05, ranks_per_host=2, clocks=clocks, seed=number)
        folder = tmp_path / f"{number}-{is_measured}"
        truth = synthetic.generate(folder, job)
        found = summarise(open_run(folder))
        assert found.clock_error_ns is not None
        moment = int(np.median(truth.end))
        for host, clock in enumerate(found.clocks):
            assert clock.host == f"host-{host}"
            assert clock.offset_ns is not None
            assert clock.error_ns is not None
            true = job.show(moment, 0) - job.show(moment, host)
            assert abs(clock.offset_ns - true) <= clock.error_ns + 200, (host, clock, true)  # 50 ppm of some ms apart
