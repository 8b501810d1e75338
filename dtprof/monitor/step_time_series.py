"""How long the newest steps took, every one of them: what a chart of steps can be continued with.

It takes only where steps end, so that it is had whenever one has ended; the parts of a step (newest_step.py) cost five
times as much, and the means of a page fifty times.
"""

from collections.abc import Collection, Mapping, Sequence

from dtprof.analysis.results import StepSeries
from dtprof.analysis.steps.step_boundaries import BACKWARD, MARKS, OPTIMIZER, RankSteps, agree_on_rule, find_steps
from dtprof.job.rank_batches import batch_ranks
from dtprof.records import events
from dtprof.records.tables import RankTables

ENDS: Collection[str] = (events.STEP, events.OPTIMIZER, *BACKWARD)
"""The spans that say where steps end."""
STEPS_BEFORE = 2
"""Of which records are needed to know how long a step took: its own, and those of the end of the one before."""


def find_ends(ranks: Sequence[RankTables]) -> dict[int, RankSteps]:
    """Return the steps of ranks by rank, from their spans alone; those named in ENDS suffice."""
    return agree_on_rule({own.rank: own for own in find_steps(batch_ranks(ranks))}) if ranks else {}


def follow_course(steps: Mapping[int, RankSteps], *, first: int) -> list[StepSeries]:
    """Return how long the steps that every rank with steps has ended took, from a step on.

    Parameters:
        steps: of every rank, by one rule; from STEPS_BEFORE steps before `first` on.
        first: number of a step.

    Returns:
        Of every rank with steps the same steps. Nothing where other rules tell steps than marks and optimizers:
        those count from the oldest record that is kept.
    """
    stepping = [own for own in steps.values() if own.count and own.rule in (MARKS, OPTIMIZER)]
    lasted = [
        dict(zip(own.numbers.tolist(), (own.windows[:, 1] - own.windows[:, 0]).tolist(), strict=True))
        for own in stepping
    ]
    common = set.intersection(*map(set, lasted)) if lasted else set()
    chosen = tuple(sorted(number for number in common if number >= first))
    if not chosen:
        return []
    return [
        StepSeries(rank=own.rank, duration_ns=tuple(durations[n] for n in chosen), first_step=chosen[0], numbers=chosen)
        for own, durations in zip(stepping, lasted, strict=True)
    ]
