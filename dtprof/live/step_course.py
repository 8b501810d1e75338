"""How long the newest steps took, every one of them: what a chart of steps can be continued with.

It takes only where steps end, so that it is had at every look; the parts of a step (newest_step.py) cost ten times as
much, and the means of a page a hundred times.
"""

from collections.abc import Collection, Sequence

from dtprof import events
from dtprof.analysis.rank_batches import batch_ranks
from dtprof.analysis.results import StepSeries
from dtprof.analysis.steps import BACKWARD, MARKS, OPTIMIZER, agree_on_rule, find_steps
from dtprof.tables import RankTables

ENDS: Collection[str] = (events.STEP, events.OPTIMIZER, *BACKWARD)
"""The spans that say where steps end."""
STEPS_BEFORE = 2
"""Of which records are needed to know how long a step took: its own, and those of the end of the one before."""


def find_course(ranks: Sequence[RankTables], *, first: int) -> list[StepSeries]:
    """Return how long the steps that every rank with steps has ended took, from a step on.

    Parameters:
        ranks: their newest spans, of STEPS_BEFORE steps before `first` and later ones; those named in ENDS suffice.
        first: number of a step.

    Returns:
        Of every rank with steps the same steps. Nothing where steps are told by other rules than marks and optimizers:
        those count from the oldest record that is kept.
    """
    if not ranks:
        return []
    steps = agree_on_rule({own.rank: own for own in find_steps(batch_ranks(ranks))})
    stepping = [own for own in steps.values() if own.count and own.rule in (MARKS, OPTIMIZER)]
    if not stepping:
        return []
    common = set.intersection(*(set(own.numbers.tolist()) for own in stepping))
    chosen = sorted(number for number in common if number >= first)
    if not chosen:
        return []
    found = []
    for own in stepping:
        lasted = dict(zip(own.numbers.tolist(), (own.windows[:, 1] - own.windows[:, 0]).tolist(), strict=True))
        found.append(
            StepSeries(
                rank=own.rank,
                duration_ns=tuple(lasted[number] for number in chosen),
                first_step=chosen[0],
                numbers=tuple(chosen),
            )
        )
    return found
