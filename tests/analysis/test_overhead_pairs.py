"""What recording adds, worked out by hand: steps from their marks, medians with exact intervals, the two verdicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.analysis.comparison import overhead_pairs
from dtprof.analysis.comparison.overhead_pairs import Trial, compare, median_interval, trial_of
from dtprof.records.step_times_file import StepTimes

MS = 1_000_000


def steps(
    ends: list[int], *, rank: int = 0, running: list[int] | None = None, queued: list[int] | None = None
) -> StepTimes:
    """Return the times of a process that started at 5 and ended its steps then."""
    return StepTimes(
        rank=rank,
        started_ns=5,
        uses_accelerator=False,
        ends_ns=tuple(ends),
        running_ns=tuple(running or [0] * len(ends)),
        queued_ns=tuple(queued or [0] * len(ends)),
    )


def test_steps_are_the_mean_after_the_warm_up_of_the_slowest_rank() -> None:
    # Marks at 20, 40, 60: the first two intervals are warm-up. Then rank 0 takes (120 - 60) / 2 = 30 a step, rank 1 32.
    trial = trial_of(
        begin_ns=0, end_ns=200, processes=[steps([20, 40, 60, 90, 120]), steps([21, 41, 61, 91, 125], rank=1)]
    )
    assert trial.step_ns == 32
    assert trial.num_steps == 5
    assert trial.startup_ns == 21
    assert trial.rank_startup_ns == round(((20 - 5) + (21 - 5)) / 2)
    assert trial.end_ns == 200 - 125
    assert trial.wall_ns == 200


def test_blocked_is_what_the_thread_neither_ran_nor_waited_to_run() -> None:
    # Two counted steps of 30: ran 2 x 12, queued 2 x 5, so blocked 13 each.
    times = steps([20, 40, 60, 90, 120], running=[9, 9, 10, 22, 34], queued=[0, 0, 1, 6, 11])
    assert trial_of(begin_ns=0, end_ns=200, processes=[times]).blocked_ns == 13
    blind = steps([20, 40, 60, 90, 120], running=[9, 9, 10, 22, 34], queued=[-1] * 5)
    unknown = trial_of(begin_ns=0, end_ns=200, processes=[blind])
    assert (unknown.blocked_ns, unknown.knows_queue) == (18, False)


@pytest.mark.parametrize("ends", [[], [20], [20, 40, 60]])
def test_too_few_steps_have_no_step_time(ends: list[int]) -> None:
    trial = trial_of(begin_ns=0, end_ns=100, processes=[steps(ends)])
    assert trial.step_ns is None
    assert trial.wall_ns == 100


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (2, 1, 2, 0.5),  # 1 - 2 / 4
        (5, 1, 5, 0.9375),  # 1 - 2 / 32
        (6, 1, 6, 0.96875),  # 1 - 2 / 64
        (9, 2, 8, 0.9609375),  # one cut off on each side: 1 - 2 (1 + 9) / 512
        (12, 3, 10, 0.96142578125),  # two: 1 - 2 (1 + 12 + 66) / 4096
    ],
)
def test_interval_is_that_of_the_sign_test(count: int, low: int, high: int, confidence: float) -> None:
    interval = median_interval([float(value) for value in range(count, 0, -1)])
    assert (interval.low, interval.high, interval.confidence) == (low, high, confidence)


def test_thousands_of_values_have_an_interval() -> None:
    interval = median_interval([float(value) for value in range(4001)])
    # 1.96 standard deviations of a fair coin thrown 4,001 times, sqrt(4001) / 2 each
    assert interval.median == 2000
    assert abs(interval.high - interval.low - 2 * 1.96 * 4001**0.5 / 2) < 3
    assert 0.95 <= interval.confidence < 0.96


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_interval_holds_its_median_and_is_sure_enough(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval.low <= interval.median <= interval.high
    assert interval.confidence >= overhead_pairs.CONFIDENCE or (interval.low, interval.high) == (
        min(values),
        max(values),
    )


def trials(step_ms: list[float], *, blocked_ms: float = 2.0, accelerator: bool = False) -> list[Trial]:
    return [
        Trial(
            wall_ns=round(100 * value * MS),
            startup_ns=3000 * MS,
            rank_startup_ns=2000 * MS,
            step_ns=value * MS,
            blocked_ns=blocked_ms * MS,
            end_ns=100 * MS,
            num_steps=100,
            num_ranks=4,
            uses_accelerator=accelerator,
        )
        for value in step_ms
    ]


BARE = [10.0, 10.2, 9.9, 10.1, 10.4, 10.0]
CONTROL = [10.1, 10.1, 10.0, 10.0, 10.3, 10.1]


def test_difference_that_every_pair_shows_is_reported() -> None:
    result = compare(trials(BARE), trials([1.05 * value for value in BARE]), trials(CONTROL))
    step = result.quantities[0]
    assert step.name == "step"
    assert step.differs
    assert step.ratio.median == pytest.approx(1.05)
    assert step.difference_ns.median == pytest.approx(0.05 * 10.05 * MS)
    assert not step.control.includes(1.05)
    assert [quantity.name for quantity in result.quantities if quantity.differs] == ["step", "wall"]


def test_difference_within_the_noise_is_none() -> None:
    result = compare(trials(BARE), trials([10.1, 10.1, 10.0, 10.0, 10.5, 9.9]), trials(CONTROL))
    assert not any(quantity.differs for quantity in result.quantities)


def test_ranks_that_are_blocked_longer_when_recorded_have_lost_overlap() -> None:
    changed = compare(trials(BARE), trials(BARE, blocked_ms=3.0), trials(CONTROL)).overlap
    assert changed is not None
    assert changed.changed
    assert changed.change.median == pytest.approx(1.0 / 10.05, rel=0.01)
    same = compare(trials(BARE), trials(BARE, blocked_ms=2.0), trials(CONTROL)).overlap
    assert same is not None
    assert not same.changed


def test_overlap_on_an_accelerator_is_unknown() -> None:
    result = compare(trials(BARE), trials(BARE, accelerator=True), trials(CONTROL))
    assert result.overlap is None
    assert result.cannot_tell == (
        "overlap: work runs on an accelerator, where the time of the host says nothing about overlap",
    )


def test_command_without_steps_is_compared_as_a_whole() -> None:
    whole = [Trial(wall_ns=round(value * MS)) for value in BARE]
    result = compare(whole, whole, whole)
    assert [quantity.name for quantity in result.quantities] == ["wall"]
    assert result.overlap is None
    assert result.cannot_tell == (
        "step time, start-up, end: no process stepped an optimizer of torch",
        "overlap: needs the times of steps",
    )
