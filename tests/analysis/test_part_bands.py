"""Bands of the parts of the step over ranks and steps, worked out by hand."""

import numpy as np

from dtprof.analysis.results import PARTS, Spread
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.steps.part_bands import add_parts, sum_parts
from dtprof.interchange.public_tables.result_tables import tabulate_results
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000


def test_a_part_that_differs_by_rank_is_uneven_over_ranks_and_even_over_steps() -> None:
    # Of steps of 100 ms rank 0 computes 40, rank 1 60: percentiles of two values lie a tenth of 20 inside them.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for number, rank in enumerate(ranks):
        for step in range(7):
            t = 100 * MS * step
            rank.span("forward", t, t + 20 * MS)
            rank.span("backward", t + 20 * MS, t + (40 + 20 * number) * MS)
            rank.span("optimizer", t + 95 * MS, t + 100 * MS)
    summary = summarise(MemoryRun(ranks))
    compute = next(band for band in summary.part_bands if band.part == "compute")
    assert compute.over_ranks == Spread(p10=42 * MS, median=50 * MS, p90=58 * MS)
    assert compute.over_steps == Spread(p10=50 * MS, median=50 * MS, p90=50 * MS)
    table = tabulate_results("part_bands", summary)
    assert table["ranks_p90_ns"][table["part"].tolist().index("compute")] == 58 * MS


def test_sums_of_steps_that_only_some_ranks_have_are_told_apart() -> None:
    parts = {part: np.array([10, 20, 30]) for part in PARTS}
    known = sum_parts(parts, np.array([3, 4, 4]), np.array([True, True, True]))
    more = sum_parts(parts, np.array([5, 5, 6]), np.array([True, False, True]))
    joined = add_parts(add_parts(None, known), more)
    assert joined is not None
    assert joined.first == 3
    assert joined.sums[:, 0].tolist() == [1, 2, 1, 1]
    assert joined.sums[:, 1].tolist() == [10, 50, 10, 30]


def test_without_a_chosen_step_there_is_no_sum() -> None:
    assert sum_parts({part: np.array([1]) for part in PARTS}, np.array([1]), np.array([False])) is None
