"""Means that know their noise: quantiles against tables, variances against numbers by hand, coverage by trial."""

import math

import numpy as np
import pytest

from dtprof.analysis.comparison.comparison_statistics import (
    MIN_STEPS,
    estimate_mean,
    estimate_ratio,
    student_quantile,
    student_tail,
    subtract_means,
)


@pytest.mark.parametrize(
    ("tail", "degrees", "value"),
    [  # printed tables of Student's t
        (0.025, 10, 2.2281),
        (0.0005, 5, 6.8688),
        (0.005, 30, 2.7500),
        (0.025, 1, 12.7062),
        (0.001, 2, 22.3271),
        (0.0005, 120, 3.3735),
        (0.025, 1e9, 1.9602),  # of 10,000, which nobody can tell from infinity
    ],
)
def test_quantiles_are_those_of_the_tables(tail: float, degrees: float, value: float) -> None:
    assert student_quantile(tail, degrees) == pytest.approx(value, abs=6e-4)
    assert student_tail(value, degrees) == pytest.approx(tail, rel=2e-3)


def test_degrees_between_are_rounded_to_what_is_less_sure() -> None:
    assert student_quantile(0.025, 10.99) == student_quantile(0.025, 10)
    assert student_tail(-1.0, 3) == pytest.approx(1 - 0.19550, abs=1e-5)
    assert student_tail(0.0, 3) == 0.5
    assert student_tail(1e-200, 3) == 0.5


def test_variance_of_a_mean_of_unrelated_steps_is_the_textbooks() -> None:
    # 1, 2, 1, 2, ...: neighbours are opposed, which counts as unrelated. s2 = 16 * 0.25 / 15; over n = 16.
    estimate = estimate_mean(np.array([1.0, 2.0] * 8))
    assert estimate.mean == 1.5
    assert estimate.variance == pytest.approx(4 / 15 / 16)
    assert estimate.degrees == 15


def test_steps_that_follow_one_another_count_for_less() -> None:
    # Eight steps of 1, then eight of 2. Neighbours: 14 of .25 and one of -.25 over 16 of .25: r = .8125;
    # corrected by (1 + 4 r) / 16 = .265625 it is above the most of .98: two steps are left, variance 4 / 15 / 2.
    # Batches of two: each .5 from the mean, 8 * .25 / 8 / 7 = .0357, is less.
    estimate = estimate_mean(np.repeat([1.0, 2.0], 8))
    assert estimate.variance == pytest.approx(4 / 15 / 2)
    assert estimate.degrees == pytest.approx(1)


def test_slow_changes_are_seen_by_batches() -> None:
    # Noise of which half lasts 400 steps: neighbours are hardly alike, batches are.
    slow = np.tile(np.repeat([0.0, 1.0], 400), 1)
    quick = np.tile([0.0, 6.0, -6.0, 3.0, -3.0], 160)
    estimate = estimate_mean(slow + quick)
    assert estimate.degrees == 7
    assert estimate.variance == pytest.approx(8 * 0.25 / 8 / 7, rel=1e-6)


def test_few_steps_make_fewer_batches_which_are_less_sure() -> None:
    # Batches of two steps: 0, 6, 0, 6, 0 around 2.4, so 2 (3 2.4^2 + 2 3.6^2) / 10 / 4.
    estimate = estimate_mean(np.array([0.0, 0, 6, 6, 0, 0, 6, 6, 0, 0]))
    assert estimate.variance == pytest.approx(2.16)
    assert estimate.degrees == 4


def test_few_steps_give_a_mean_and_no_noise() -> None:
    few, enough = estimate_mean(np.arange(MIN_STEPS - 1.0)), estimate_mean(np.arange(float(MIN_STEPS)))
    assert few.mean == 3.0
    assert few.interval(0.95) is None
    assert few.confidence_above(1.0) is None
    assert subtract_means(few, enough, error=0.05) is None
    assert estimate_mean(np.zeros(0)).num_steps == 0


def test_what_never_changes_is_certain() -> None:
    a, b = estimate_mean(np.full(10, 0.1)), estimate_mean(np.full(12, 0.3))
    found = subtract_means(a, b, error=0.05)
    assert found is not None
    assert found.low == found.high == found.difference == pytest.approx(0.2)
    assert found.detectable == 0
    assert (a.confidence_above(0.0), a.confidence_above(0.2)) == (1.0, 0.0)


def test_turning_a_difference_around_turns_its_sign() -> None:
    random = np.random.default_rng(7)
    a, b = estimate_mean(random.normal(size=40)), estimate_mean(random.normal(size=25) + 1)
    there, back = subtract_means(a, b, error=0.01), subtract_means(b, a, error=0.01)
    assert there is not None
    assert back is not None
    assert (there.difference, there.low, there.high) == (-back.difference, -back.high, -back.low)
    assert there.detectable == back.detectable


def test_ratio_of_a_constant_share_has_no_noise() -> None:
    whole = np.linspace(100, 200, 20)
    ratio = estimate_ratio(0.25 * whole, whole)
    assert ratio is not None
    assert ratio.mean == pytest.approx(0.25)
    assert ratio.variance == pytest.approx(0, abs=1e-20)
    assert estimate_ratio(whole, np.zeros(20)) is None


@pytest.mark.parametrize(("memory", "count", "least"), [(0.0, 20, 0.94), (0.6, 50, 0.93), (0.8, 200, 0.93)])
def test_intervals_hold_the_true_mean_as_often_as_they_say(memory: float, count: int, least: float) -> None:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(1000):
        steps = np.empty(count)
        value = random.normal()
        for i in range(count):
            steps[i] = value
            value = memory * value + math.sqrt(1 - memory**2) * random.normal()
        interval = estimate_mean(steps).interval(0.95)
        assert interval is not None
        held += interval[0] <= 0 <= interval[1]
    assert held / 1000 >= least
