"""How long the newest steps took: what analysis of the whole run says, from their ends alone."""

from pathlib import Path

import pytest

from dtprof.analysis.steps.step_boundaries import find_steps_of
from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.step_time_series import ENDS, STEPS_BEFORE, find_ends, follow_course
from dtprof.records.reader import open_run
from tests import builders
from tests.builders import RankBuilder
from tests.monitor.test_live_run import MS, STEP, two_ranks


def course(run: Path, first: int) -> dict[int, dict[int, int]]:
    """Return by rank how long each step from one on took."""
    live = LiveWindow(run)
    live.poll()
    found = follow_course(find_ends(live.spans_since(first - STEPS_BEFORE, ENDS)), first=first)
    return {one.rank: dict(zip(one.steps, one.duration_ns, strict=True)) for one in found}


def uneven(*, marked: bool) -> list[RankBuilder]:
    """Return two ranks whose steps last differently long, the second of which has ended one step more."""
    ranks = [RankBuilder(number, 2) for number in range(2)]
    for rank in ranks:
        t = 0
        for step in range(1, 42 + rank.rank):
            end = t + (90 + 7 * (step % 5) + 3 * rank.rank) * MS
            rank.span("backward", t, end - 10 * MS, step=step - 1)
            rank.op("all_reduce", end - 30 * MS, end - 20 * MS, step=step - 1)
            rank.span("optimizer", end - 8 * MS, end - 5 * MS, step=step - 1)
            if not marked:  # of several optimizers: a burst
                rank.span("optimizer", end - 4 * MS, end - MS, step=step - 1)
            if marked and step > 3:
                rank.span("step", end, end, step=step, microbatch=step - 3)
            t = end
    return ranks


@pytest.mark.parametrize("first", [0, 30, 38])
@pytest.mark.parametrize("marked", [False, True])
def test_steps_last_as_long_as_in_the_whole_run(marked: bool, first: int, tmp_path: Path) -> None:
    run = builders.write_run(tmp_path / "run", uneven(marked=marked))
    expected = {}
    for tables in open_run(run).load_each([0, 1]):
        whole = find_steps_of(tables)
        lasted = (whole.windows[:, 1] - whole.windows[:, 0]).tolist()
        expected[tables.rank] = dict(zip(whole.numbers.tolist(), lasted, strict=True))
    last = max(expected[0])
    assert last == (38 if marked else 41)  # rank 1 has ended one more
    assert course(run, first) == {
        rank: {step: ns for step, ns in steps.items() if first <= step <= last} for rank, steps in expected.items()
    }


def test_steps_that_are_only_guessed_are_not_gone_on_with(tmp_path: Path) -> None:
    rank = RankBuilder(0, 1)
    for step in range(20):
        rank.span("data", step * STEP, step * STEP + 5 * MS)
        rank.span("forward", step * STEP + 5 * MS, step * STEP + 50 * MS)
    assert course(builders.write_run(tmp_path / "run", [rank]), 0) == {}


def test_rank_that_takes_no_steps_holds_none_of_the_others_up(tmp_path: Path) -> None:
    ranks = [*two_ranks(8), RankBuilder(2, 3)]
    ranks[2].op("all_reduce", MS, 2 * MS)
    assert course(builders.write_run(tmp_path / "run", ranks), 7) == {0: {7: STEP, 8: STEP}, 1: {7: STEP, 8: STEP}}


def test_run_without_records_has_none(tmp_path: Path) -> None:
    assert course(builders.write_run(tmp_path / "run", [RankBuilder(0, 1)]), 0) == {}
    assert follow_course(find_ends([]), first=0) == []
