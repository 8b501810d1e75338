"""Differences between two runs beyond the noise of their steps.

Each figure has a series of steps in both runs; the difference of its means has an interval from Welch's t on what the
steps of each run really tell (comparison_statistics.py). Many figures are looked at, so that each interval is widened:
the step time of the job, which is asked for first, takes STEP_SHARE of ERROR; the other figures of the job, its
collectives, and its ranks share the rest evenly, and each divides its part among its figures (Bonferroni). All
intervals together hold with 95 % then. What the steps of two runs cannot show is how much a run differs from the
next of the same job; differences below `at_least` are therefore listed separately, and not called differences.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from dtprof.analysis.comparison.comparison_series import (
    BUBBLE,
    COLLECTIVES,
    EXPOSED,
    JOB,
    RANKS,
    STEP,
    TABLES,
    Figure,
    RunFigures,
)
from dtprof.analysis.comparison.comparison_statistics import MIN_STEPS, Estimate, subtract_means
from dtprof.analysis.metric_registry import COMPARED
from dtprof.analysis.steps.throughput import RATES
from dtprof.formatting import list_ranks, plural

ERROR = 0.05
STEP_SHARE = 0.4
AT_LEAST = 0.01
PEAK = "peak_bytes"

ChangeVerdict = Literal["larger", "smaller", "negligible", "none", "unknown"]
VERDICTS: tuple[ChangeVerdict, ...] = ("larger", "smaller", "negligible", "none", "unknown")
"""Of B beside A: beyond the noise and at least `at_least`; beyond the noise but less than that; within the noise; not
judged, for a reason."""
_INSTEAD_OF_BUBBLE = (EXPOSED, "exposed_transfer_ns", "exposed_wait_ns", "host_ns", "idle_ns")
"""Where the time of a bubble is that is not known."""
_NEVER = Estimate(mean=0.0, variance=0.0, degrees=1.0, num_steps=MIN_STEPS)
"""Of a collective that a run with steps did not make."""


@dataclass(frozen=True, kw_only=True)
class FigureChange:
    """One figure in both runs; `low` and `high` bound the true difference B - A."""

    figure: Figure
    a: float | None
    b: float | None
    difference: float | None
    low: float | None
    high: float | None
    detectable: float | None  # the least difference that would have been seen four times of five
    verdict: ChangeVerdict
    reason: str = ""  # why it is not judged

    @property
    def differs(self) -> bool:
        """Say whether the runs differ in it."""
        return self.verdict in ("larger", "smaller")

    @property
    def share(self) -> float | None:
        """Return the difference as a share of A; None where A is 0."""
        return self.difference / self.a if self.difference is not None and self.a else None


@dataclass(frozen=True, kw_only=True)
class RunSide:
    """One of the two runs."""

    run: str
    world_size: int
    num_steps: int
    used: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs beside each other."""

    a: RunSide
    b: RunSide
    confidence: float  # that all intervals hold
    at_least: float
    changes: tuple[FigureChange, ...]  # job, collectives, ranks
    cannot_compare: tuple[str, ...]

    def of_table(self, table: str) -> tuple[FigureChange, ...]:
        """Return the figures of the job, of its collectives, or of its ranks."""
        return tuple(change for change in self.changes if change.figure.table == table)

    @property
    def step(self) -> FigureChange | None:
        """Return the change of the step time; None where no steps can be compared."""
        return next((c for c in self.of_table(JOB) if c.figure.name == STEP), None)

    @property
    def differs(self) -> bool:
        """Say whether any figure differs."""
        return any(change.differs for change in self.changes)


def compare_runs(a: RunFigures, b: RunFigures, *, at_least: float = AT_LEAST) -> Comparison:
    """Compare two runs, figure by figure."""
    comparable, reasons = _find_comparable(a, b)
    step = _mean_step(a, b)
    changes: list[FigureChange] = []
    for table in TABLES:
        if table in comparable:
            changes += _compare_table(table, a, b, at_least=at_least, step=step)
    changes += _compare_peaks(a, b, by_rank=RANKS in comparable)
    return Comparison(
        a=_side(a),
        b=_side(b),
        confidence=1 - ERROR,
        at_least=at_least,
        changes=tuple(changes),
        cannot_compare=tuple(reasons),
    )


def _side(run: RunFigures) -> RunSide:
    return RunSide(run=run.run, world_size=run.world_size, num_steps=run.num_steps, used=run.used)


def _find_comparable(a: RunFigures, b: RunFigures) -> tuple[set[str], list[str]]:
    """Return the tables that can be compared, and why others cannot."""
    without = [name for name, run in (("A", a), ("B", b)) if run.used is None]
    reasons = [
        f"steps: {name} has no step whose begin and end every rank knows; only peaks of memory stand beside each other"
        for name in without
    ]
    few = [
        f"{name} {_num_used(run)}" for name, run in (("A", a), ("B", b)) if run.used is not None and not _has_noise(run)
    ]
    if few and not without:
        reasons.append(
            f"noise: too few measured steps ({', '.join(few)}; both runs need {MIN_STEPS}, better 20): means are "
            "shown, nothing is judged"
        )
    comparable = set() if without else {JOB, COLLECTIVES, RANKS}
    missing = [
        f"{name} lacks {list_ranks(run.missing_ranks)}" for name, run in (("A", a), ("B", b)) if run.missing_ranks
    ]
    if missing:
        reasons.append(f"ranks: {'; '.join(missing)}; figures of the job are means of the ranks that are there")
    if bool(a.timed_on_device) != bool(b.timed_on_device):
        device, host = ("A", "B") if a.timed_on_device else ("B", "A")
        reasons.append(
            f"clock: times of {device} are those of its devices, of {host} those of its hosts, which may run ahead of "
            "theirs: only steps and what hosts wait for mean the same in both"
        )
    if a.world_size != b.world_size:
        reasons.append(
            f"world size: A has {plural(a.world_size, 'rank')}, B {b.world_size}; ranks are not "
            "compared one by one, and figures of the job are means of a rank in each"
        )
        comparable.discard(RANKS)
    elif not _same_parts(a, b):
        reasons.append(
            f"layout: A has {_describe_layout(a)}, B {_describe_layout(b)}; ranks have other places and are not "
            "compared one by one"
        )
        comparable.discard(RANKS)
    if RANKS not in comparable and COLLECTIVES in comparable and (apart := _keys(a) ^ _keys(b)):
        reasons.append(f"collectives: {plural(len(apart), 'collective')} (group, size, operation, api) of one run only")
    return comparable, reasons


def _keys(run: RunFigures) -> set[Figure]:
    return {f._replace(name="") for f in (*run.estimates, *run.unknown) if f.table == COLLECTIVES}


def _num_used(run: RunFigures) -> int:
    return max((estimate.num_steps for estimate in run.estimates.values()), default=0)


def _has_noise(run: RunFigures) -> bool:
    return any(estimate.can_be_judged for estimate in run.estimates.values())


def _describe_layout(run: RunFigures) -> str:
    """Return the groups of several ranks by axis and size: `dp groups of 2 (4)`."""
    counts = Counter((f"{axis or ''} group".lstrip(), len(ranks)) for axis, ranks in run.layout)
    return ", ".join(f"{plural(number, name)} of {size}" for (name, size), number in sorted(counts.items()))


def _mean_step(a: RunFigures, b: RunFigures) -> float:
    steps = [run.estimates[Figure(JOB, STEP)].mean for run in (a, b) if Figure(JOB, STEP) in run.estimates]
    return sum(steps) / len(steps) if steps else 0.0


def _compare_table(table: str, a: RunFigures, b: RunFigures, *, at_least: float, step: float) -> list[FigureChange]:
    chosen = {f for run in (a, b) for f in (*run.estimates, *run.unknown) if f.table == table}
    chosen -= {Figure(JOB, name) for name in RATES} - a.estimates.keys() - b.estimates.keys()  # images are no tokens
    if table == COLLECTIVES and not _same_parts(a, b):
        both = _keys(a) & _keys(b)
        chosen = {figure for figure in chosen if figure._replace(name="") in both}
    figures = sorted((f for f in chosen if not _is_nothing(f, a, b)), key=lambda figure: _position(figure, a, b))
    step_time = Figure(JOB, STEP)
    judged = [f for f in figures if f not in a.unknown and f not in b.unknown and f != step_time]
    error = (1 - STEP_SHARE) * ERROR / len(TABLES) / max(1, len(judged))
    errors = {step_time: STEP_SHARE * ERROR}
    return [_compare_figure(f, a, b, error=errors.get(f, error), at_least=at_least, step=step) for f in figures]


def _same_parts(a: RunFigures, b: RunFigures) -> bool:
    """Say whether a rank of A plays the part that it plays in B."""
    return a.world_size == b.world_size and (a.layout == b.layout or not (a.layout and b.layout))


def _position(figure: Figure, a: RunFigures, b: RunFigures) -> tuple[float, int, str, str, str, int, int]:
    """Order figures for display: ranks by number, collectives by cost, then by name."""
    cost = 0.0
    if figure.table == COLLECTIVES:
        costly = figure._replace(name=EXPOSED)
        cost = sum(run.estimates[costly].mean for run in (a, b) if costly in run.estimates)
    name = COMPARED.index(figure.name)
    return -cost, figure.rank, figure.group, figure.op, figure.api, figure.members, name


def _is_nothing(figure: Figure, a: RunFigures, b: RunFigures) -> bool:
    """Say whether a figure is 0 at every step of both runs."""
    known = [run.estimates[figure] for run in (a, b) if figure in run.estimates]
    is_known = not any(figure in run.unknown for run in (a, b))
    return is_known and all(estimate.mean == 0 and estimate.variance == 0 for estimate in known)


def _compare_figure(
    figure: Figure, a: RunFigures, b: RunFigures, *, error: float, at_least: float, step: float
) -> FigureChange:
    of_a, of_b = _find(figure, a), _find(figure, b)
    if of_a is None or of_b is None:
        name, run = ("A", a) if of_a is None else ("B", b)
        return _unjudged(figure, _mean(of_a), _mean(of_b), f"{name}: {run.unknown.get(figure, 'not measured')}")
    bubble = Figure(figure.table, BUBBLE, rank=figure.rank)
    if figure.name in _INSTEAD_OF_BUBBLE and (bubble in a.unknown) != (bubble in b.unknown):
        name = "A" if bubble in a.unknown else "B"
        return _unjudged(figure, of_a.mean, of_b.mean, f"{name}: the bubble, which is not known, is in it")
    subtracted = subtract_means(of_a, of_b, error=error)
    if subtracted is None:
        return _unjudged(figure, of_a.mean, of_b.mean, f"fewer than {MIN_STEPS} steps")
    floor = at_least * _scale(figure, of_a, of_b, step)
    return FigureChange(
        figure=figure,
        a=of_a.mean,
        b=of_b.mean,
        difference=subtracted.difference,
        low=subtracted.low,
        high=subtracted.high,
        detectable=max(subtracted.detectable, floor),
        verdict=subtracted.judge(floor),
    )


def _find(figure: Figure, run: RunFigures) -> Estimate | None:
    known = run.estimates.get(figure)
    return _NEVER if known is None and figure.table == COLLECTIVES and figure not in run.unknown else known


def _scale(figure: Figure, a: Estimate, b: Estimate, step: float) -> float:
    """Return the denominator of `at_least`: the step for times, 1 for fractions, else the mean of both runs."""
    if figure.unit == "ns":
        return step
    return 1.0 if figure.unit == "fraction" else (a.mean + b.mean) / 2


def _mean(known: Estimate | None) -> float | None:
    return known.mean if known is not None else None


def _unjudged(figure: Figure, a: float | None, b: float | None, reason: str) -> FigureChange:
    return FigureChange(
        figure=figure,
        a=a,
        b=b,
        difference=b - a if a is not None and b is not None else None,
        low=None,
        high=None,
        detectable=None,
        verdict="unknown",
        reason=reason,
    )


def _compare_peaks(a: RunFigures, b: RunFigures, *, by_rank: bool) -> list[FigureChange]:
    """Return the peaks of memory side by side: the highest of all ranks, and of each where ranks are comparable."""
    if not (a.peak_bytes or b.peak_bytes):
        return []
    pairs: list[tuple[Figure, int | None, int | None]] = [
        (Figure(JOB, PEAK), max(a.peak_bytes.values(), default=None), max(b.peak_bytes.values(), default=None))
    ]
    if by_rank:
        ranks = sorted(a.peak_bytes.keys() | b.peak_bytes.keys())
        pairs += [(Figure(RANKS, PEAK, rank=rank), a.peak_bytes.get(rank), b.peak_bytes.get(rank)) for rank in ranks]
    reason = "one number a run, not one a step: shown, not judged"
    return [_unjudged(figure, of_a, of_b, reason) for figure, of_a, of_b in pairs]
