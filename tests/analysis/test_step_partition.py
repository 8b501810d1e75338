"""The partition of steps into parts, worked out by hand and as a property."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtprof import intervals
from dtprof.analysis.results import PARTS, PHASES
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.steps.phase_intervals import BUSY, ORDER
from dtprof.analysis.steps.step_partition import partition_phases, partition_steps, round_means, sum_steps
from dtprof.records import events
from tests.builders import MemoryRun, RankBuilder

INTERVALS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=8).map(
    lambda rows: intervals.union(np.array(rows, np.int64).reshape(-1, 2))
)


def test_a_step_is_partitioned_as_worked_out_by_hand() -> None:
    # Rank 0, step from 100 to 200 (the optimizer of the step before ended at 100):
    #   105..110 data | 110..150 forward (inferred) | 150..185 backward | 190..200 optimizer
    #   all_reduce issued in backward at 160, returned at once, done at 180; rank 1 arrived at 172
    # host 100..105 and 185..190 = 10, data 5, optimizer 10, exposed wait 160..172 = 12, exposed transfer 172..180 = 8,
    # compute = forward 40 + backward 35 - blocked 20 = 55. Sum: 100.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        rank.span("backward", 50, 90)
        rank.span("optimizer", 90, 100)
        rank.span("data", 105, 110)
        rank.span("backward", 150, 185)
        rank.span("optimizer", 190, 200)
        rank.op("all_reduce", 160 if rank.rank == 0 else 172, 180, is_async=True)
    result = summarise(MemoryRun(ranks)).ranks[0]
    assert result.step_ns == 100
    assert result.partition_ns == {
        "compute": 55,
        "exposed_transfer": 8,
        "exposed_wait": 12,
        "bubble": 0,
        "data": 5,
        "checkpoint": 0,
        "optimizer": 10,
        "host": 10,
        "idle": 0,
    }
    assert result.phases_ns == {
        "data": 5,
        "forward": 40,
        "backward": 35,
        "optimizer": 10,
        "recompute": 0,
        "checkpoint": 0,
        "evaluation": 0,
        "compile": 0,
        "garbage_collection": 0,
        "other": 10,
    }


def test_pauses_are_host_work_wherever_they_happen() -> None:
    # Step 100 to 200: forward 100..150 with a compilation 110..130, backward 150..185 with a collection 160..170 and a
    # recomputation 175..180, optimizer 190..200. Host: 20 + 10 + 5 between backward and optimizer.
    rank = RankBuilder(0, world_size=1)
    rank.span("backward", 50, 90)
    rank.span("optimizer", 90, 100)
    rank.span("forward", 100, 150)
    rank.span("compile", 110, 130)
    rank.span("backward", 150, 185)
    rank.span("garbage_collection", 160, 170)
    rank.span("recompute", 175, 180)
    rank.span("optimizer", 190, 200)
    result = summarise(MemoryRun([rank])).ranks[0]
    assert result.partition_ns is not None
    assert {part: length for part, length in result.partition_ns.items() if length} == {
        "compute": 55,
        "optimizer": 10,
        "host": 35,
    }
    assert result.phases_ns is not None
    assert {phase: length for phase, length in result.phases_ns.items() if length} == {
        "forward": 30,
        "compile": 20,
        "backward": 20,
        "garbage_collection": 10,
        "recompute": 5,
        "optimizer": 10,
        "other": 5,
    }


KNOWN = (*ORDER, *BUSY, events.HOST_BOUND, events.GRAPH_REPLAY)


@given(st.lists(INTERVALS, min_size=len(KNOWN), max_size=len(KNOWN)), INTERVALS, INTERVALS, INTERVALS)
def test_parts_and_phases_sum_to_every_step(
    phase_times: list[intervals.Intervals],
    waits: intervals.Intervals,
    transfers: intervals.Intervals,
    windows: intervals.Intervals,
) -> None:
    phases = dict(zip(KNOWN, phase_times, strict=True))
    lengths = (windows[:, 1] - windows[:, 0]).tolist()
    parts = partition_steps(windows, phases, waits, transfers)
    assert tuple(parts) == PARTS
    assert sum(parts.values()).tolist() == lengths
    by_phase = partition_phases(windows, phases)
    assert tuple(by_phase) == PHASES
    assert sum(by_phase.values()).tolist() == lengths
    for result in (parts, by_phase):
        (totals,) = sum_steps(result, [0, len(lengths)])
        means = round_means(totals, len(lengths))
        assert sum(means.values()) == (sum(lengths) // len(lengths) if lengths else 0)


def test_rounding_goes_to_the_parts_that_lost_most() -> None:
    # Over 3 steps a = 5 (mean 1.67), b = 4 (1.33), c = 3 (1): 12 / 3 = 4 = 2 + 1 + 1.
    # The steps of two ranks follow one another; those of the second, 7 = 3 + 4, are one.
    parts = {"a": np.array([5, 0, 0, 3]), "b": np.array([4, 0, 0, 0]), "c": np.array([1, 1, 1, 4])}
    assert [round_means(t, n) for t, n in zip(sum_steps(parts, [0, 3, 3, 4]), (3, 0, 1), strict=True)] == [
        {"a": 2, "b": 1, "c": 1},
        {"a": 0, "b": 0, "c": 0},
        {"a": 3, "b": 0, "c": 4},
    ]
