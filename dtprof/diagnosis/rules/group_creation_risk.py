"""Ranks called new_group a different number of times, and it did not block this time."""

from collections import Counter
from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.diagnosis.rules.group_creation_mismatch import ADVICE


def find_creation_risk(case: Case) -> Iterator[Finding]:
    """Give the finding for groups that went well though ranks called new_group a different number of times.

    Groups are numbered by the calls of each rank: the next one has other names on other ranks. Groups whose name comes
    from their members (`use_local_synchronization`) need no call of the others: where there are any, nothing is said.
    """
    job = case.job
    named = {key for rank in job.ranks.values() for key in rank.groups}
    made = {rank.rank: rank.groups_made for rank in job.ranks.values()}
    countable = job.is_complete and not job.missing and all(key.name.isdecimal() for key in named)
    if len(set(made.values())) < 2 or not countable:
        return
    most = max(made.values())
    culprits = tuple(sorted(rank for rank, number in made.items() if number < most))
    if any(job.goes_on(job.ranks[rank]) for rank in culprits):
        return  # it may be about to make them
    fewer = Counter(job.ranks[culprits[0]].group_sites)
    sites = {}
    for rank in made:
        left_out = Counter(job.ranks[rank].group_sites) - fewer
        if rank not in culprits and (site := next(filter(None, left_out), None)):
            sites[rank] = site
    line = next(iter(sites.values()), None)
    yield Finding(
        kind="group-creation-mismatch",
        severity="warning",
        summary=f"{capitalised(culprits)} did not make every call of new_group that the others made"
        f"{at_line(line)}; it did not hang this time: the next group has other names on other ranks, and hangs.",
        culprit_ranks=culprits,
        confidence=0.85,
        call_sites=sites,
        evidence=tuple(f"rank {rank} called new_group {number} times" for rank, number in sorted(made.items())[:8]),
        advice=(ADVICE,),
    )


RULES: Declared = (Rule(kinds=("group-creation-mismatch",), stages=(Stage.RISK,), find=find_creation_risk),)
