"""Means of figures that change from step to step, how sure they are, and the difference of two of them.

Steps that follow one another are alike, so that many steps tell less than their number says. The variance of a mean is
taken in two ways, and the larger counts:
- the effective sample size of a first-order autoregression: n (1 - r) / (1 + r), with the correlation r of neighbours
  corrected for its bias in short series (Marriott and Pope 1954); a negative r counts as none;
- the spread of the means of NUM_BATCHES stretches of steps, which sees slow changes, too.

Differences are judged by Welch's t. Definitions and measured rates of false alarms: docs/reference/metrics.md.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

NUM_BATCHES = 8
MIN_STEPS = 8
"""Fewer steps than this say nothing about their own noise."""
MAX_CORRELATION = 0.98
POWER = 0.8
MAX_DEGREES = 1e4
"""As good as any more, and few enough for the terms of the series below."""

Series = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over steps and how sure it is."""

    mean: float
    variance: float  # of the mean
    degrees: float  # of freedom of that variance
    num_steps: int

    @property
    def can_be_judged(self) -> bool:
        """Say whether there are steps enough to know the noise."""
        return self.num_steps >= MIN_STEPS

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """Return the confidence interval of the mean; None where the noise is not known."""
        if not self.can_be_judged:
            return None
        half = student_quantile((1 - confidence) / 2, self.degrees) * math.sqrt(self.variance)
        return self.mean - half, self.mean + half

    def confidence_above(self, limit: float) -> float | None:
        """Return how sure it is that the true mean lies above a limit; None where the noise is not known."""
        if not self.can_be_judged:
            return None
        if self.variance <= 0:
            return float(self.mean > limit)
        return 1 - student_tail((self.mean - limit) / math.sqrt(self.variance), self.degrees)


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """The difference of two means and its confidence interval."""

    difference: float
    low: float
    high: float
    detectable: float  # the smallest true difference that 4 of 5 such comparisons would detect

    def judge(self, floor: float) -> Literal["larger", "smaller", "negligible", "none"]:
        """Say how B lies to A: none, within the noise; negligible, beyond it by less than `floor`."""
        if self.low <= 0 <= self.high:
            return "none"
        if abs(self.difference) < floor:
            return "negligible"
        return "larger" if self.difference > 0 else "smaller"


def estimate_mean(series: Series) -> Estimate:
    """Return the mean of a series of steps that follow one another."""
    count = len(series)
    mean = float(series.mean()) if count else 0.0
    if count < MIN_STEPS:
        return Estimate(mean=mean, variance=0.0, degrees=1.0, num_steps=count)
    deviations = series - mean
    squares = float(deviations @ deviations)
    if squares <= (1e-12 * mean) ** 2 * count:  # nothing but the rounding of sums
        return Estimate(mean=mean, variance=0.0, degrees=count - 1.0, num_steps=count)
    by_correlation, effective = _by_correlation(deviations, squares)
    by_batches, num_batches = _by_batches(deviations)
    if by_batches > by_correlation:
        return Estimate(mean=mean, variance=by_batches, degrees=num_batches - 1.0, num_steps=count)
    return Estimate(mean=mean, variance=by_correlation, degrees=effective - 1, num_steps=count)


def _by_correlation(deviations: Series, squares: float) -> tuple[float, float]:
    count = len(deviations)
    neighbours = float(deviations[1:] @ deviations[:-1]) / squares
    correlation = min(max(neighbours + (1 + 4 * neighbours) / count, 0.0), MAX_CORRELATION)
    effective = max(2.0, count * (1 - correlation) / (1 + correlation))
    return squares / (count - 1) / effective, effective


def _by_batches(deviations: Series) -> tuple[float, int]:
    count = len(deviations)
    num_batches = min(NUM_BATCHES, count // 2)
    bounds = np.arange(num_batches) * count // num_batches
    sizes = np.diff(bounds, append=count)
    means = np.add.reduceat(deviations, bounds) / sizes
    return float((sizes * means**2).sum()) / count / (num_batches - 1), num_batches


def estimate_ratio(numerator: Series, denominator: Series) -> Estimate | None:
    """Return the ratio of two means of the same steps, by linearisation; None where the denominator is 0."""
    if not len(denominator) or denominator.mean() <= 0:
        return None
    ratio = float(numerator.mean() / denominator.mean())
    residual = estimate_mean((numerator - ratio * denominator) / denominator.mean())
    return Estimate(mean=ratio, variance=residual.variance, degrees=residual.degrees, num_steps=residual.num_steps)


def subtract_means(a: Estimate, b: Estimate, *, error: float) -> MeanDifference | None:
    """Return b - a with an interval that misses the truth with probability `error`; None where noise is not known."""
    if not (a.can_be_judged and b.can_be_judged):
        return None
    difference, variance = b.mean - a.mean, a.variance + b.variance
    if variance <= 0:
        return MeanDifference(difference=difference, low=difference, high=difference, detectable=0.0)
    degrees = variance**2 / (a.variance**2 / a.degrees + b.variance**2 / b.degrees)
    deviation = math.sqrt(variance)
    half = student_quantile(error / 2, degrees) * deviation
    return MeanDifference(
        difference=difference,
        low=difference - half,
        high=difference + half,
        detectable=half + student_quantile(1 - POWER, degrees) * deviation,
    )


def student_quantile(tail: float, degrees: float) -> float:
    """Return the quantile that Student's t exceeds with probability `tail`, below one half.

    Degrees are rounded down to two digits: never too sure, and few different ones.
    """
    degrees = min(degrees, MAX_DEGREES)
    scale = 10.0 ** (math.floor(math.log10(degrees)) - 1)
    return _quantile(tail, math.floor(degrees / scale + 1e-9) * scale)


@lru_cache(maxsize=4096)
def _quantile(tail: float, degrees: float) -> float:
    low, high = -10.0, 40.0  # of the logarithm
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(math.exp(middle), degrees) > tail else (low, middle)
    return math.exp(high)


def student_tail(t: float, degrees: float) -> float:
    """Return how likely Student's t exceeds a value: half the regularised incomplete beta function."""
    if t < 0:
        return 1 - student_tail(-t, degrees)
    if t * t == 0:
        return 0.5
    x = degrees / (degrees + t * t)
    y = t * t / (degrees + t * t)
    a, b = degrees / 2, 0.5
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a / 2
    return (1 - front * _beta_fraction(b, a, y) / b) / 2


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function (DLMF 8.17.22), from its end."""
    value = 1.0
    for m in range(16 + int(3 * math.sqrt(max(a, b))), 0, -1):
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + odd / (1 + even / value)
    return 1 / value
