"""Ranks that are taken side by side give what each gives alone."""

from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.communication.blocked_time import Blocked
from dtprof.analysis.map_reduce import placed_ranks
from dtprof.analysis.map_reduce.placed_ranks import PlacedRank, SteppedRank, batches_in_turn
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.steps.phase_intervals import BUSY, ORDER
from dtprof.analysis.steps.step_boundaries import RankSteps
from dtprof.intervals import NONE, Intervals
from dtprof.job import rank_batches
from dtprof.job.collective_matching import MatchedOperations, OperationInstances
from dtprof.records import events
from dtprof.records.reader import open_run
from dtprof.records.tables import OPERATION, SPAN, RankTables
from tests.synthetic import HostClock, Job, Spell, generate

JOBS = {
    "a pipeline with a slow rank": Job(pp=2, tp=2, dp=2, microbatches=3, steps=6, jitter=0.2, slow={3: 1.5}),
    "gradients reduced beside the backward pass": Job(dp=4, steps=8, layers=3, overlapped=True, jitter=0.1),
    "one step, and so none with a begin": Job(dp=3, steps=1),
    "two hosts, a rank killed": Job(
        dp=4, tp=2, steps=6, ranks_per_host=4, clocks={1: HostClock(offset_ns=77_000_000, drift_ppm=5)}, killed={5: 40}
    ),
    "a rank lost, one cut, one that dropped": Job(
        pp=2, dp=3, microbatches=2, steps=9, lost=frozenset({4}), cut={1: 20_000}, dropped={2: (30, 70)}
    ),
    "slow for a while": Job(dp=6, steps=40, spells=(Spell(ranks=(2,), factor=1.7, first=9, last=20),)),
}


@pytest.mark.parametrize("name", JOBS)
def test_ranks_side_by_side_give_what_each_gives_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(tmp_path / "run", JOBS[name])

    def summarise_with(max_rows: int) -> Summary:
        monkeypatch.setattr(placed_ranks, "MAX_ROWS", max_rows)
        monkeypatch.setattr(rank_batches, "MAX_ROWS", max_rows)
        return summarise(open_run(tmp_path / "run"))

    alone = summarise_with(0)
    assert repr(summarise_with(1 << 20)) == repr(alone)
    assert repr(summarise_with(400)) == repr(alone)  # some of them


def placed(rank: int, call: Intervals, *, busy: Intervals = NONE) -> SteppedRank:
    operations = np.zeros(len(call), OPERATION)
    operations["issued_ns"] = call[:, 0]
    nowhere = np.zeros(len(call), np.bool_)
    return SteppedRank(
        placed=PlacedRank(
            tables=RankTables(rank=rank, attempt=0, world_size=3),
            steps=RankSteps(rank=rank, count=0, numbers=np.zeros(0, np.int64), windows=NONE, threads=()),
            operations=operations,
            spans=np.zeros(0, SPAN),
            phases=dict.fromkeys((*ORDER, *BUSY), NONE) | {events.DEVICE_BUSY: busy},
            matched=MatchedOperations(),
            blocked=Blocked(call=call, wait=call, known=nowhere, counts=nowhere, of_steps=nowhere),
        ),
        numbers=np.zeros(0, np.int64),
        windows=NONE,
        pipeline_windows=NONE,
        actions=NONE,
    )


def ranks_of_batches(*ranks: SteppedRank) -> list[list[int]]:
    return [[rank.placed.tables.rank for rank in batch.ranks] for batch in batches_in_turn(ranks, OperationInstances())]


def test_stretches_of_ranks_follow_one_another_without_touching() -> None:
    # Rank 0 spans 100 to 150, rank 1 120 to 160: 51 and 41 ns of the axis.
    ranks = [placed(0, np.array([[100, 110], [130, 150]])), placed(1, np.array([[120, 160]]))]
    (batch,) = batches_in_turn(ranks, OperationInstances())
    assert batch.begins.tolist() == [0, 51]
    assert batch.on_axis([rank.placed.blocked.call for rank in ranks]).tolist() == [[0, 10], [30, 50], [51, 91]]
    assert batch.place_times(batch.operations["issued_ns"]).tolist() == [0, 30, 51]
    assert [(own.start, own.stop) for own in batch.stretches(np.array([0, 10, 30, 50, 51, 91]))] == [(0, 4), (4, 6)]


def test_a_rank_whose_device_is_known_is_taken_alone() -> None:
    call = np.array([[100, 110]])
    batches = ranks_of_batches(placed(0, call), placed(1, call, busy=call), placed(2, call))
    assert batches == [[0], [1], [2]]


def test_a_rank_with_an_impossibly_late_time_is_taken_alone() -> None:
    call, late = np.array([[100, 110]]), np.array([[100, 1 << 59]])
    assert ranks_of_batches(placed(0, call), placed(1, call), placed(2, late)) == [[0, 1], [2]]


def test_no_more_operations_are_taken_together_than_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_ranks, "MAX_ROWS", 4)
    two = np.array([[100, 110], [120, 130]])
    assert ranks_of_batches(placed(0, two), placed(1, two), placed(2, two)) == [[0, 1], [2]]
