"""Not all ranks call new_group or split_group, or not in the same order."""

from collections import Counter
from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import fewest_steps, places_of
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks, plural

ADVICE = "Every rank of the job must call new_group, members or not, in the same order."
SAME_MEMBERS = "Every rank must give new_group the same ranks: take them from what all have alike, or broadcast them."


def find_creation_mismatch(case: Case) -> Iterator[Finding]:
    """Give the finding for groups that some ranks are making and others are not, or make as their second, say."""
    job, counted = case.job, case.job.is_complete
    number = max((r.groups_made for r in job.ranks.values() if r.making_group is not None), default=0)
    if counted and number and (others := _find_other_groups(job)) is not None:
        yield others
        return
    making = {
        rank.rank: rank
        for rank in job.ranks.values()
        if rank.making_group is not None and (rank.groups_made == number or not counted)
    }
    absent = [
        rank
        for rank in job.ranks.values()
        if rank.rank not in making
        and (rank.groups_made < number or not counted)
        and (rank.blocking or rank.finished or rank.making_group is not None)
    ]
    if not making or not absent:
        return
    culprits = tuple(sorted(rank.rank for rank in absent))
    waiting = tuple(sorted(making))
    sites = {rank: own.making_group for rank, own in making.items() if own.making_group is not None}
    places = places_of(job.ranks[rank] for rank in culprits)
    line = next(iter(sites.values()), None)
    yield Finding(
        kind="group-creation-mismatch",
        summary=f"{capitalised(culprits)} did not call new_group{at_line(line)}; {wait_words(waiting)} in it.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        grade=0.9,
        step=fewest_steps(making.values()),
        call_sites=sites,
        culprit_call_sites=places,
        evidence=(
            *(f"rank {r.rank}: {_doing(r, counted=counted)}" for r in absent[:8]),
            *((f"{list_ranks(waiting)} made {plural(number, 'group')}, this one included",) if counted else ()),
        ),
        advice=(ADVICE,),
    )


def _find_other_groups(job: JobState) -> Finding | None:
    """Return the finding where ranks call new_group at other lines or for other members, and some stay in it."""
    calls = {rank.rank: tuple(zip(rank.group_sites, rank.group_members, strict=True)) for rank in job.ranks.values()}
    number = min(map(len, calls.values()))
    differing = (i for i in range(number) if len({own[i] for own in calls.values()}) > 1)
    place = next((i for i in differing if _hangs(job, i)), None)
    if place is None:
        return None
    made = {rank: own[place] for rank, own in calls.items()}
    sites = {rank: site for rank, (site, _) in made.items() if site is not None}
    chosen, _ = Counter(made.values()).most_common(1)[0]
    usual = chosen[0]
    culprits = tuple(sorted(rank for rank, call in made.items() if call != chosen))
    if len(set(sites.values())) == 1:
        what, how, advice = "asked for other members", "for other members", SAME_MEMBERS
    else:
        what, how, advice = "made another group at this place", "at different lines", ADVICE
    here = at_line(sites.get(culprits[0]))
    tie = 2 * len(culprits) >= len(sites)
    waiting = tuple(sorted(set(sites) - set(culprits)))
    return Finding(
        kind="group-creation-mismatch",
        summary=f"{capitalised(culprits)} {what}{here}; others called new_group{at_line(usual)}; "
        "ranks wait in new_group.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        grade=0.6 if tie else 0.8,
        step=fewest_steps(job.ranks.values()),
        call_sites={rank: site for rank, site in sites.items() if rank in waiting},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=(
            f"their call number {place + 1} of new_group is {how}",
            *(("the ranks split into equal halves: which half is wrong is a guess",) if tie else ()),
        ),
        advice=(advice,),
    )


def _hangs(job: JobState, call: int) -> bool:
    """Say whether ranks that call new_group differently there do not come out of it together.

    Ranks that each make a group of their own members only come out of it, and differ in nothing but the members.
    """
    ranks = job.ranks.values()
    if len({rank.group_sites[call] for rank in ranks}) > 1:
        return not _made_together(job, call)
    return any(rank.making_group is not None and rank.groups_made == call + 1 for rank in ranks)


def _made_together(job: JobState, call: int) -> bool:
    """Say whether all ranks came out of a call of new_group with one group: then lines may differ by rank."""
    ranks = job.ranks.values()
    members = {key.ranks for rank in ranks for key in rank.groups if key.name == str(call + 1)}
    return len(members) == 1 and all(rank.groups_made - (rank.making_group is not None) > call for rank in ranks)


def _doing(rank: RankState, *, counted: bool) -> str:
    made = f"made {plural(rank.groups_made, 'group')} and " if counted else ""
    return f"{made}{'has ended' if rank.finished else 'is elsewhere'}{at_line(rank.place)}"


RULES: Declared = (Rule(kinds=("group-creation-mismatch",), stages=(Stage.DIVERGENCE,), find=find_creation_mismatch),)
