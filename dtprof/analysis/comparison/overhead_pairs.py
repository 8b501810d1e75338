"""Overhead of recording a command: pairs of bare and recorded runs, median ratio and its interval.

A median and an exact interval from the sign test: no assumption about the noise, and one disturbed run moves neither.
Definitions: docs/reference/metrics.md, Overhead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dtprof.formatting import plural
from dtprof.records.step_times_file import StepTimes

CONFIDENCE = 0.95
WARM_UP_SHARE = 0.1
LEAST_WARM_UP = 2
"""Step intervals at the start that are not counted: allocation, first communication, first use of each line."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of the command, as measured from outside and by the clock of steps; None: not known."""

    wall_ns: int  # from its start to its exit
    startup_ns: int | None = None  # from its start to the end of the first step, of the slowest rank
    rank_startup_ns: int | None = None  # the same from the start of the rank's interpreter, mean of the ranks
    step_ns: float | None = None  # mean step after the warm-up, of the slowest rank
    blocked_ns: float | None = None  # of such a step: the stepping thread neither ran nor waited to run, mean of ranks
    end_ns: int | None = None  # from the end of the last step to its exit
    num_steps: int = 0
    num_ranks: int = 0
    uses_accelerator: bool = False
    knows_queue: bool = True


@dataclass(frozen=True, kw_only=True)
class ConfidenceInterval:
    """A median and its confidence interval, with at least the given confidence."""

    median: float
    low: float
    high: float
    confidence: float

    def includes(self, value: float) -> bool:
        """Say whether the value cannot be excluded."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One time, bare and recorded."""

    name: str  # wall, startup, rank_startup, step, end
    bare_ns: float  # medians
    recorded_ns: float
    difference_ns: ConfidenceInterval
    ratio: ConfidenceInterval  # recorded over bare, pair by pair
    control: ConfidenceInterval  # bare again over bare: what the noise alone gives

    @property
    def differs(self) -> bool:
        """Say whether the pairs show a difference that the noise does not explain."""
        return not self.ratio.includes(1.0)


@dataclass(frozen=True, kw_only=True)
class OverlapCheck:
    """Whether ranks are blocked longer when recorded: an instrument can destroy the overlap that it measures."""

    change: ConfidenceInterval  # blocked time a step, recorded minus bare, as a share of the bare step
    control: ConfidenceInterval
    blocked_share: float  # of the bare step

    @property
    def changed(self) -> bool:
        """Say whether the pairs show a change."""
        return not self.change.includes(0.0)


@dataclass(frozen=True, kw_only=True)
class OverheadResult:
    """The result of all pairs."""

    num_pairs: int
    num_ranks: int
    num_steps: int
    quantities: tuple[Quantity, ...]
    overlap: OverlapCheck | None
    cannot_tell: tuple[str, ...]


def trial_of(*, begin_ns: int, end_ns: int, processes: Sequence[StepTimes]) -> Trial:
    """Return the times of one run, from its begin and end on the host clock and the steps of its processes."""
    wall_ns = end_ns - begin_ns
    ranks = [times for times in processes if times.ends_ns]
    if not ranks:
        return Trial(wall_ns=wall_ns)
    num_steps = min(len(times.ends_ns) for times in ranks)
    first = max(LEAST_WARM_UP, math.ceil(WARM_UP_SHARE * num_steps))
    known = num_steps - 1 > first
    return Trial(
        wall_ns=wall_ns,
        startup_ns=max(times.ends_ns[0] for times in ranks) - begin_ns,
        rank_startup_ns=round(fmean(times.ends_ns[0] - times.started_ns for times in ranks)),
        step_ns=max(_mean_step_ns(times.ends_ns, first) for times in ranks) if known else None,
        blocked_ns=fmean(_blocked_ns(times, first) for times in ranks) if known else None,
        end_ns=end_ns - max(times.ends_ns[-1] for times in ranks),
        num_steps=num_steps,
        num_ranks=len(ranks),
        uses_accelerator=any(times.uses_accelerator for times in ranks),
        knows_queue=all(times.knows_queue for times in ranks),
    )


def _mean_step_ns(marks: Sequence[int], first: int) -> float:
    return (marks[-1] - marks[first]) / (len(marks) - 1 - first)


def _blocked_ns(times: StepTimes, first: int) -> float:
    busy = _mean_step_ns(times.running_ns, first)
    if times.knows_queue:
        busy += _mean_step_ns(times.queued_ns, first)
    return max(0.0, _mean_step_ns(times.ends_ns, first) - busy)


def median_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Return the median and the narrowest pair of order statistics that holds it with 95 %, by the sign test.

    Fewer than six values cannot give 95 %: then the lowest and the highest, with the confidence that they do give.
    """
    ordered, count = sorted(values), len(values)
    outside = 0  # values left out on each side
    chances = 1  # of 2**count: that no more than so many lie on one side of the median
    times = 1  # ways to choose which they are
    while outside + 1 <= (count - 1) // 2:
        times = times * (count - outside) // (outside + 1)
        if _coverage(count, chances + times) < CONFIDENCE:
            break
        outside, chances = outside + 1, chances + times
    return ConfidenceInterval(
        median=median(ordered),
        low=ordered[outside],
        high=ordered[count - 1 - outside],
        confidence=_coverage(count, chances),
    )


def _coverage(count: int, chances: int) -> float:
    """Return how likely the median lies between the values that are left when some are cut off on each side."""
    return 1.0 - 2 * chances / (1 << count)  # of integers, which have no largest


_TIMES: tuple[tuple[str, Callable[[Trial], float | None]], ...] = (
    ("step", lambda trial: trial.step_ns),
    ("rank_startup", lambda trial: trial.rank_startup_ns),
    ("startup", lambda trial: trial.startup_ns),
    ("end", lambda trial: trial.end_ns),
    ("wall", lambda trial: trial.wall_ns),
)


def compare(bare: Sequence[Trial], recorded: Sequence[Trial], control: Sequence[Trial]) -> OverheadResult:
    """Compare runs pair by pair: bare with recorded, and bare with bare again."""
    quantities = [_compare_time(name, of, bare, recorded, control) for name, of in _TIMES]
    overlap, caveats = _check_overlap(bare, recorded, control)
    if all(trial.num_ranks == 0 for trial in bare):
        caveats.insert(0, "step time, start-up, end: no process stepped an optimizer of torch")
    elif not any(q is not None and q.name == "step" for q in quantities):
        caveats.insert(
            0, f"step time: a run has {plural(bare[0].num_steps, 'step')}, too few; 4 are needed, 20 make sense"
        )
    return OverheadResult(
        num_pairs=len(bare),
        num_ranks=bare[0].num_ranks,
        num_steps=bare[0].num_steps,
        quantities=tuple(quantity for quantity in quantities if quantity is not None),
        overlap=overlap,
        cannot_tell=tuple(caveats),
    )


def _compare_time(
    name: str,
    of: Callable[[Trial], float | None],
    bare: Sequence[Trial],
    recorded: Sequence[Trial],
    control: Sequence[Trial],
) -> Quantity | None:
    a, b, c = ([of(trial) for trial in trials] for trials in (bare, recorded, control))
    known = [(x, y, z) for x, y, z in zip(a, b, c, strict=True) if x and y is not None and z is not None]
    if len(known) < len(bare):
        return None
    return Quantity(
        name=name,
        bare_ns=median(x for x, _, _ in known),
        recorded_ns=median(y for _, y, _ in known),
        difference_ns=median_interval([y - x for x, y, _ in known]),
        ratio=median_interval([y / x for x, y, _ in known]),
        control=median_interval([z / x for x, _, z in known]),
    )


def _check_overlap(
    bare: Sequence[Trial], recorded: Sequence[Trial], control: Sequence[Trial]
) -> tuple[OverlapCheck | None, list[str]]:
    trials = [*bare, *recorded, *control]
    if any(trial.uses_accelerator for trial in trials):
        return None, ["overlap: work runs on an accelerator, where the time of the host says nothing about overlap"]
    changes, noise, shares = [], [], []
    for a, b, c in zip(bare, recorded, control, strict=True):
        if a.step_ns is None or a.blocked_ns is None or b.blocked_ns is None or c.blocked_ns is None:
            return None, ["overlap: needs the times of steps"]
        changes.append((b.blocked_ns - a.blocked_ns) / a.step_ns)
        noise.append((c.blocked_ns - a.blocked_ns) / a.step_ns)
        shares.append(a.blocked_ns / a.step_ns)
    caveats = []
    if not all(trial.knows_queue for trial in trials):
        caveats.append(
            "overlap: the kernel does not report how long threads wait for a processor: that counts as blocked"
        )
    check = OverlapCheck(change=median_interval(changes), control=median_interval(noise), blocked_share=median(shares))
    return check, caveats
