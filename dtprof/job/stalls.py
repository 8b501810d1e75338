"""Whether a job makes progress: one model of stalls for `dtprof run`, `top`, live pages, metrics and `diagnose`.

A rank makes progress when it begins or ends an operation or a phase. A job is as far as its furthest rank: it is slow
once no rank has made progress for SLOW_AFTER_NS, and stalled once none has for the stall threshold, which follows from
`--hang-after`, from the pauses that the job makes anyway, and from what ranks outside operations are at.
"""

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dtprof.records import events
from dtprof.text_enum import TextEnum

SLOW_AFTER_NS = 5_000_000_000
"""A job that recorded nothing for less than this counts as making progress."""
HANG_AFTER_S = 10.0
"""Default of --hang-after for runs that record none, or whose alarm is off."""
PAUSES = 10.0
"""Times the median of its own pauses that a job may make no progress; at most so many times --hang-after."""
MIN_PAUSES, MAX_PAUSES = 5, 99
FIRST_STEP = 5.0
"""Multiple of --hang-after that a rank may work on its first step, and before it."""
LONGER_THAN_EVER = 2
"""A job that was stopped from outside had stalled where its last pause was so many times as long as any before."""
INTERVAL_NS = 500_000_000
"""Progress within this time is one and the same: pauses are counted in intervals, as often as the watcher polls."""


class Progress(TextEnum):
    """The progress of a rank or a job."""

    PROGRESSING = "progressing"
    SLOW = "slow"
    STALLED = "stalled"


class RankPhase(TextEnum):
    """The phase of a rank outside operations, which decides how long it may take."""

    STEPS = "steps"
    FIRST_STEP = "first step"
    CHECKPOINT = events.CHECKPOINT
    EVALUATION = events.EVALUATION
    COMPILE = events.COMPILE


MAY_TAKE_LONG: Collection[RankPhase] = (RankPhase.CHECKPOINT, RankPhase.EVALUATION, RankPhase.COMPILE)
"""Phases in which a rank may rightly keep the others waiting, for however long."""


def phase_of(open_phases: Collection[str], *, steps: int) -> RankPhase:
    """Return the activity of a rank, from the names of its open phases and its number of ended steps."""
    for phase in MAY_TAKE_LONG:
        if phase in open_phases:
            return phase
    return RankPhase.FIRST_STEP if steps == 0 and open_phases else RankPhase.STEPS


class Pauses:
    """The pauses that a job makes anyway: between each two intervals with progress, those without any."""

    def __init__(self) -> None:
        """Know of no progress."""
        self._newest: int | None = None
        self._pauses: deque[int] = deque(maxlen=MAX_PAUSES)

    def add(self, intervals: Iterable[int]) -> None:
        """Take in intervals with progress, ascending: times in ns by INTERVAL_NS. Those before the newest are known."""
        for interval in intervals:
            if self._newest is None or interval > self._newest:
                if self._newest is not None:
                    self._pauses.append(interval - self._newest - 1)
                self._newest = interval

    @property
    def usual_s(self) -> float:
        """The median pause, in seconds; 0 before enough are known."""
        return statistics.median(self._pauses) * INTERVAL_NS / 1e9 if len(self._pauses) >= MIN_PAUSES else 0.0


def hang_after_of(settings: Mapping[str, str]) -> float:
    """Return the --hang-after of a run from the settings in its manifest, in seconds; 0 where it tells of none."""
    try:
        return float(settings.get("hang_after_s", ""))
    except ValueError:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class StallThreshold:
    """For how long a job may make no progress, and why."""

    seconds: float  # infinite: a rank is in a phase that may take long
    reason: str


def stall_threshold(*, hang_after_s: float, usual_pause_s: float, phase: RankPhase = RankPhase.STEPS) -> StallThreshold:
    """Return the stall threshold of a job.

    Parameters:
        hang_after_s: as the user gave it; 0 for none.
        usual_pause_s: of the job, as Pauses tells it.
        phase: what the ranks are at that the others wait for.
    """
    base_s = hang_after_s or HANG_AFTER_S
    given = f"--hang-after {hang_after_s:g}" if hang_after_s else f"{HANG_AFTER_S:g} s, as no --hang-after is given"
    if phase in MAY_TAKE_LONG:
        return StallThreshold(seconds=float("inf"), reason=f"a rank is in phase {phase}, which may take long")
    thresholds = [StallThreshold(seconds=base_s, reason=given)]
    if phase == RankPhase.FIRST_STEP:
        reason = f"{FIRST_STEP:g} times {given}: a rank works on its first step"
        thresholds.append(StallThreshold(seconds=FIRST_STEP * base_s, reason=reason))
    reason = f"{PAUSES:g} times the usual pause of this job, {usual_pause_s:.1f} s"
    thresholds.append(StallThreshold(seconds=PAUSES * min(base_s, usual_pause_s), reason=reason))
    return max(thresholds, key=lambda threshold: threshold.seconds)


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """The progress of a running rank."""

    quiet_s: float  # since its newest progress
    phase: RankPhase = RankPhase.STEPS
    waits: bool = False  # inside an operation: others have to come


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """The progress of a job, and its stall threshold."""

    state: Progress
    quiet_s: float  # since the newest progress of any rank
    threshold: StallThreshold
    ranks: Mapping[int, Progress]

    @property
    def words(self) -> str:
        """The state of a job that does not progress, with the threshold and its reason."""
        quiet = f"no rank has made progress for {self.quiet_s:.0f} s"
        if self.threshold.seconds == float("inf"):
            return f"{self.state}: {quiet} ({self.threshold.reason})"
        return f"{self.state}: {quiet} (stall threshold {self.threshold.seconds:.0f} s: {self.threshold.reason})"


def assess_job(ranks: Mapping[int, RankProgress], *, hang_after_s: float, usual_pause_s: float) -> JobProgress:
    """Return how a job and its ranks fare.

    Parameters:
        ranks: those that have not ended.
        hang_after_s: as the user gave it; 0 for none.
        usual_pause_s: of the job, as Pauses tells it.
    """
    # Ranks inside operations wait for the others: how long that may take depends on what those are at.
    phases = {rank.phase for rank in ranks.values() if not rank.waits} or {RankPhase.STEPS}
    threshold = max(
        (stall_threshold(hang_after_s=hang_after_s, usual_pause_s=usual_pause_s, phase=phase) for phase in phases),
        key=lambda threshold: threshold.seconds,
    )
    states = {number: _state(rank.quiet_s, threshold) for number, rank in ranks.items()}
    quiet_s = min((rank.quiet_s for rank in ranks.values()), default=0.0)
    return JobProgress(state=_state(quiet_s, threshold), quiet_s=quiet_s, threshold=threshold, ranks=states)


def _state(quiet_s: float, threshold: StallThreshold) -> Progress:
    if quiet_s >= threshold.seconds:
        return Progress.STALLED
    return Progress.SLOW if quiet_s * 1e9 > SLOW_AFTER_NS else Progress.PROGRESSING


def had_stalled(*, quiet_ns: int, longest_pause_ns: int) -> bool:
    """Say whether a job that was stopped from outside had stalled: nobody waits for the threshold any more then.

    Parameters:
        quiet_ns: from its newest progress until it was stopped.
        longest_pause_ns: that a rank of it had made before.
    """
    return quiet_ns > max(SLOW_AFTER_NS, LONGER_THAN_EVER * longest_pause_ns)
