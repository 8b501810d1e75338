"""Ranks called new_group a different number of times, in another order, or for other members, and it did not block.

gloo connects the members of a group when it is made, and may block there; NCCL when the group is first used.
"""

from collections import Counter
from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.diagnosis.rules.group_creation_mismatch import ADVICE
from dtprof.formatting import list_ranks, plural


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
        grade=0.85,
        call_sites=sites,
        evidence=tuple(
            f"rank {rank} called new_group {plural(number, 'time')}" for rank, number in sorted(made.items())[:8]
        ),
        advice=(ADVICE,),
    )


def find_other_members(case: Case) -> Iterator[Finding]:
    """Give the finding for a group that a rank makes of other members than the others, and that went well.

    Ranks that each make a group of their own members differ as well. Where one asks for a group that it is no member
    of, all ranks make every group, and have to make the same ones.
    """
    job = case.job
    calls = {rank.rank: tuple(zip(rank.group_sites, rank.group_members, strict=True)) for rank in job.ranks.values()}
    if not job.is_complete or job.missing or len({len(own) for own in calls.values()}) > 1:
        return
    for number in range(len(calls[min(calls)])):
        here = {rank: own[number] for rank, own in calls.items()}
        usual, most = Counter(here.values()).most_common(1)[0]
        odd = tuple(sorted(rank for rank, call in here.items() if call[0] == usual[0] and call[1] != usual[1]))
        alike = tuple(sorted(rank for rank, call in here.items() if call == usual))
        members = _members(job, alike, str(number + 1))
        if not odd or 2 * most <= len(here) or not all(call[1] for call in here.values()) or set(alike) <= members:
            continue
        line = here[odd[0]][0]
        yield Finding(
            kind="group-creation-mismatch",
            severity="warning",
            summary=f"{capitalised(odd)} made another group than the others{at_line(line)}, which have "
            f"{list_ranks(tuple(sorted(members)))} in it; it did not hang this time: who is no member for the others "
            "waits in it for ever.",
            culprit_ranks=odd,
            grade=0.85,
            call_sites={rank: site for rank in alike if (site := here[rank][0]) is not None},
            culprit_call_sites={rank: site for rank in odd if (site := here[rank][0]) is not None},
            evidence=(f"call number {number + 1} of new_group is for the same members on {list_ranks(alike)}",),
            advice=("Compute the members of a group from the same numbers on every rank.",),
        )


def find_other_order(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that make the same groups in different orders: by one name they mean two of them."""
    job = case.job
    made = {rank.rank: rank.group_members for rank in job.ranks.values()}
    named = {key for rank in job.ranks.values() for key in rank.groups}
    countable = job.is_complete and not job.missing and all(key.name.isdecimal() for key in named)
    same_groups = len({tuple(sorted(members)) for members in made.values()}) == 1
    if not countable or not same_groups or len(set(made.values())) < 2 or not all(map(all, made.values())):
        return
    usual, most = Counter(made.values()).most_common(1)[0]
    culprits = tuple(sorted(rank for rank, members in made.items() if members != usual))
    tie = 2 * most <= len(made)
    number = next(i for i, pair in enumerate(zip(usual, made[culprits[0]], strict=True)) if pair[0] != pair[1])
    sites = {rank: site for rank in made if (site := job.ranks[rank].group_sites[number]) is not None}
    line = sites.get(culprits[0])
    yield Finding(
        kind="group-creation-mismatch",
        severity="warning",
        summary=f"{capitalised(culprits)} called new_group for the same groups in another order than the others"
        f"{at_line(line)}; it did not hang this time: whoever uses one of them waits for members that mean another.",
        culprit_ranks=culprits,
        grade=0.6 if tie else 0.85,
        call_sites={rank: site for rank, site in sites.items() if rank not in culprits},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=(
            f"call number {number + 1} of new_group is for other members there; all {len(usual)} calls together are "
            "for the same groups on every rank",
            *(("the ranks split into equal halves: which half is wrong is a guess",) if tie else ()),
        ),
        advice=(ADVICE,),
    )


def _members(job: JobState, ranks: tuple[int, ...], name: str) -> set[int]:
    """Return the members of the group that these ranks have used by this name; all where none has used it."""
    known = (key for rank in ranks for key in job.ranks[rank].groups if key.name == name and not key.instance)
    return {*next((key.ranks for key in known), ranks)}


RULES: Declared = (
    Rule(kinds=("group-creation-mismatch",), stages=(Stage.RISK,), find=find_other_members),
    Rule(kinds=("group-creation-mismatch",), stages=(Stage.RISK,), find=find_creation_risk),
    Rule(kinds=("group-creation-mismatch",), stages=(Stage.RISK,), find=find_other_order),
)
