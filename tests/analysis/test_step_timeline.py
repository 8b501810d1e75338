"""A few steps of all ranks as bars."""

from itertools import pairwise

from dtprof.analysis.results import Timeline
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.timeline import step_timeline
from tests.builders import MemoryRun, RankBuilder


def run(num_steps: int, num_ops: int = 1) -> Timeline:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        for step in range(num_steps):
            begin = step * 100_000
            rank.span("data", begin, begin + 10_000)
            rank.span("backward", begin + 50_000, begin + 80_000)
            for op in range(num_ops):
                issued = begin + 50_000 + 10 * op
                rank.op("all_reduce", issued, issued + 5 + op, api="all_reduce", nbytes=2048)
            rank.span("optimizer", begin + 80_000, begin + 90_000)
    drawn = summarise(MemoryRun(ranks)).timeline
    assert drawn is not None
    return drawn


def test_the_last_three_steps_are_drawn() -> None:
    # Per rank and step: data, forward (inferred), backward, optimizer, and one operation: 5 bars.
    drawn = run(num_steps=6)
    assert (drawn.first_step, drawn.last_step) == (4, 6)
    assert len(drawn.intervals) == 2 * 3 * 5
    assert drawn.left_out == 0
    # Step 4 begins where the optimizer of step 3 ends; step 6 ends 300,000 ns later.
    assert drawn.end_ns == 300_000
    first = drawn.intervals[0]
    assert (first.rank, first.lane, first.name, first.kind) == (0, "communication", "all_reduce", "exposed")
    assert (first.begin_ns, first.end_ns) == (60_000, 60_005)
    assert "2.00 KiB" in first.label
    assert "train.py:1" in first.label


def test_fewer_steps_are_drawn_where_three_do_not_fit() -> None:
    # 2 * (4 + 900) = 1808 bars a step: two steps fit into 4,000.
    drawn = run(num_steps=4, num_ops=900)
    assert (drawn.first_step, drawn.last_step, drawn.left_out) == (3, 4, 0)


def test_of_a_step_too_large_the_longest_bars_are_kept() -> None:
    drawn = run(num_steps=2, num_ops=2500)
    assert len(drawn.intervals) == step_timeline.MAX_INTERVALS
    assert drawn.left_out == 2 * (4 + 2500) - step_timeline.MAX_INTERVALS
    kept = {bar.name for bar in drawn.intervals}
    assert kept == {"data", "forward", "backward", "optimizer", "all_reduce"}


def test_bars_of_one_rank_and_lane_of_phases_do_not_overlap() -> None:
    drawn = run(num_steps=4)
    bars = [bar for bar in drawn.intervals if (bar.rank, bar.lane) == (1, "phases")]
    assert all(a.end_ns <= b.begin_ns for a, b in pairwise(bars))
