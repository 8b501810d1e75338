"""A straggler: late in most steps, at a notable cost."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, Stragglers
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import format_fraction, list_ranks
from dtprof.records.sites import Site

if TYPE_CHECKING:
    from dtprof.analysis.results import StragglerResult

MIN_SLOWDOWN = 1.2
"""The job would be this much faster without the rank's lag."""
MIN_LAST_SHARE = 0.6
MIN_STEPS = 6
MIN_LAG_NS = 2_000_000
"""Below that, a rank that the system gives a core a little later is as slow."""
MAX_CHANCE = 0.02
"""How probable it may be that some rank is to blame in as many steps where each time any may be."""
MOST_UNSEEN = 0.9 * (1 - 1 / MIN_SLOWDOWN)
"""Of its steps, for the median rank to be blocked: where it is less, no rank's lag makes up MIN_SLOWDOWN."""
MANY_STEPS = 500
"""From here on it is not probable, whatever the share."""


def find_slow_ranks(case: Case) -> Iterator[Finding]:
    """Give findings for ranks that are most to blame in most of the steps waited in, at a notable cost."""
    job = case.job
    if job.find_stragglers is None or _blocks_too_little(job):
        return
    stragglers = job.find_stragglers()
    for straggler in stragglers.found:
        # Steps may gain little without this one where the next holds them up nearly as long: then all are slow.
        slow = (straggler,) if (straggler.slowdown or 0) >= MIN_SLOWDOWN else stragglers.found
        alone = len(slow) == 1
        slowdown = straggler.slowdown if alone else slow[-1].slowdown_together
        lag = straggler.lag_ns_per_step if alone else slow[-1].together_ns_per_step
        if slowdown is None or slowdown < MIN_SLOWDOWN:
            continue
        if not _is_sure(job, slow, lag, stragglers.steps):
            continue
        rank = job.ranks.get(straggler.rank)
        culprits = tuple(sorted(straggler.rank for straggler in slow))
        named = list_ranks(culprits)
        summary = f"{named[0].upper()}{named[1:]} {'is' if alone else 'are'} late in most steps; steps would be "
        summary += f"{slowdown:.3g} times as fast without {'its' if alone else 'their'} lag."
        yield Finding(
            kind="slow-rank",
            severity="warning",
            summary=summary,
            culprit_ranks=culprits,
            waiting_ranks=tuple(r for r in sorted(job.ranks) if r not in culprits),
            grade=0.85,
            step=rank.steps if rank else None,
            culprit_call_sites={
                straggler.rank: Site(
                    file=straggler.sampled.file, line=straggler.sampled.line, function=straggler.sampled.function
                )
                for straggler in slow
                if straggler.sampled is not None
            },
            evidence=(*_list_facts(straggler, stragglers.found), *_list_span(stragglers)),
            advice=(
                f"Look at what {named} {'does' if alone else 'do'} that the others do not: data, host, other work "
                "on its cores (dtprof report shows the steps of ranks beside each other).",
            ),
        )


def _blocks_too_little(job: JobState) -> bool:
    """Say whether no straggler can cost so much: the median rank was not blocked for as long."""
    shares = [rank.blocked_share for rank in job.ranks.values()]
    known = [share for share in shares if share is not None]
    return len(known) == len(shares) > 0 and statistics.median(known) < MOST_UNSEEN


def _list_facts(straggler: "StragglerResult", listed: "tuple[StragglerResult, ...]") -> list[str]:
    cost, named = straggler.blame_ns_per_step, f"rank {straggler.rank}"
    facts = [
        f"{named} has the most blame in {format_fraction(straggler.last_share, 0)} of the steps with notable waits"
    ]
    if cost is not None:
        facts.append(f"the others lose {cost / 1e6:,.0f} ms a step to it, taken together")
    if straggler.phase is not None:
        facts.append(f"its extra work lies mostly {straggler.phase_words}")
    if straggler.cause is not None:
        facts.append(straggler.cause)
    if straggler.sampled is not None:
        facts.append(f"{named} was sampled {straggler.sampled.words}")
    together = listed[-1].slowdown_together
    if len(listed) > 1 and together is not None:
        others = list_ranks(one.rank for one in listed if one is not straggler)
        facts.append(
            f"without it {others} would still be late; without all of them, steps {together:.3g} times as fast"
        )
    return facts


def _list_span(stragglers: Stragglers) -> list[str]:
    """Say which steps show it where that are the newest alone."""
    if stragglers.newest_s is None:
        return []
    return [
        f"this is what the newest {stragglers.steps:,} steps show, of {stragglers.newest_s:.0f} s; over the whole run "
        "no rank is late as often"
    ]


def _is_sure(job: JobState, slow: "Sequence[StragglerResult]", lag_ns: int | None, steps: int) -> bool:
    """Say whether one of these ranks was to blame too often, and for too much, to be so by chance.

    Where several take turns, none is to blame in most steps. More than half of the ranks are no stragglers.
    """
    last_share = min(1.0, math.fsum(straggler.last_share for straggler in slow))
    if steps < MIN_STEPS or last_share < MIN_LAST_SHARE or (lag_ns is not None and lag_ns < MIN_LAG_NS):
        return False
    if len(slow) > 1 and 2 * len(slow) > job.world_size:
        return False
    share, times = len(slow) / job.world_size, math.ceil(last_share * steps)
    tail = (math.comb(steps, k) * share**k * (1 - share) ** (steps - k) for k in range(times, steps + 1))
    return steps > MANY_STEPS or math.comb(job.world_size, len(slow)) * math.fsum(tail) <= MAX_CHANCE


RULES: Declared = (Rule(kinds=("slow-rank",), stages=(Stage.RISK,), find=find_slow_ranks),)
