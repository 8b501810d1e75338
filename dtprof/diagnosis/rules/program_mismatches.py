"""Programs that part by more than one call: batches that run out, pipelines of other plans, groups not made by all."""

from collections import Counter
from dataclasses import replace

from dtprof.diagnosis.findings import Finding, at_line, capitalised, rank_list, wait_words
from dtprof.diagnosis.job_state import Evidence, RankEvidence
from dtprof.diagnosis.rules.rank_deaths import call_sites, victims
from dtprof.records.tables import Site

FOLLOWS_FROM_UNEVEN_INPUTS = {
    "rank-exited",
    "rank-skipped-collective",
    "collective-order-mismatch",
    "size-mismatch",
    "dtype-mismatch",
    "root-mismatch",
    "step-mismatch",
    "group-order-inversion",
    "wrong-group",
    "p2p-unmatched",
    "backend-stall",
    "rank-stuck",
}


def find_uneven_inputs(evidence: Evidence, cause: Finding) -> Finding:
    """Return the finding for ranks that ran out of batches where that explains another cause, else that cause."""
    if cause.kind not in FOLLOWS_FROM_UNEVEN_INPUTS:
        return cause
    counted = _are_complete(evidence)
    least = min(rank.exhausted for rank in evidence.ranks.values())
    out = {
        rank.rank: rank
        for rank in evidence.ranks.values()
        if rank.newest_is_exhaustion and (rank.exhausted > least or not counted)
    }
    going_on = [rank for rank in evidence.ranks.values() if rank.rank not in out]
    if not out or 2 * len(out) > len(evidence.ranks) or any(rank.batches < 1 for rank in going_on):
        return cause
    most = max(rank.batches for rank in going_on)
    culprits = tuple(sorted(rank for rank, own in out.items() if own.batches < most or not counted))
    if not culprits:
        return cause
    held_up = tuple(sorted(set(victims(evidence, set(culprits))) | set(cause.waiting_ranks) - set(culprits)))
    fronts = {rank: front for rank in held_up if (front := evidence.ranks[rank].front) is not None}
    places = {rank: place for rank in culprits if (place := evidence.ranks[rank].place) is not None}
    first = out[culprits[0]]
    after = f" after {first.batches}" if counted else ""
    return replace(
        cause,
        kind="uneven-inputs",
        summary=f"{capitalised(culprits)} ran out of batches{after}, and left the loop; "
        f"{wait_words(held_up)} for {'it' if len(culprits) == 1 else 'them'} in the next step.",
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=0.9 if counted else 0.75,
        call_sites=call_sites(fronts) or cause.call_sites,
        culprit_call_sites=places or cause.culprit_call_sites,
        evidence=(
            f"data loaders gave {first.batches} batches to rank {first.rank}, and up to {most} to the others so far"
            if counted
            else f"the last that the data loader of rank {first.rank} gave was no batch; events were dropped, so that "
            "nobody knows how many each rank had",
            *cause.evidence[:2],
        ),
        advice=(
            "Give every rank as many batches (DistributedSampler, drop_last), or train inside "
            "torch.distributed.algorithms.Join.",
        ),
    )


def find_other_plans(evidence: Evidence) -> Finding | None:
    """Return the finding for ranks of a pipeline whose schedules are not those of the others."""
    plans = _plans(evidence)
    if len(plans) < 2 or len(plans) < len(evidence.ranks) or len(set(plans.values())) < 2:
        return None
    words = {rank: f"{schedule} with {number} microbatches" for rank, (schedule, number) in plans.items()}
    return _pipeline_finding(evidence, words)


def _plans(evidence: Evidence) -> dict[int, tuple[str, int]]:
    return {
        rank.rank: (rank.passes[-1].plan.schedule, rank.passes[-1].plan.num_microbatches)
        for rank in evidence.ranks.values()
        if rank.passes and rank.passes[-1].plan is not None
    }


def find_pipeline_mismatch(evidence: Evidence) -> Finding | None:
    """Return the finding for ranks of a pipeline whose plans, or numbers of microbatches run, differ."""
    if (other := find_other_plans(evidence)) is not None:
        return other
    ranks = {rank.rank: rank for rank in evidence.ranks.values() if rank.passes}
    plans = _plans(evidence)
    if len(ranks) < 2 or len(ranks) < len(evidence.ranks):
        return None
    ran = {}
    for rank, own in ranks.items():
        newest = next((one for one in reversed(own.passes) if one.ended), None)
        if newest is None or newest.plan is None:
            continue
        wanted = newest.plan.num_microbatches
        if any(number != wanted for number in newest.forwards.values()):
            ran[rank] = min(newest.forwards.values())
    if not ran or len(ran) == len(ranks):
        return None
    words = {
        rank: f"{ran[rank]} microbatches" if rank in ran else f"{plans[rank][1]} microbatches" if rank in plans else "?"
        for rank in ranks
    }
    return _pipeline_finding(evidence, words)


def _pipeline_finding(evidence: Evidence, words: dict[int, str]) -> Finding:
    counted = list(words.values())
    usual = max(sorted(set(counted)), key=counted.count)
    if all(counted.count(value) == counted.count(usual) for value in counted):
        usual = max(counted, key=lambda text: [int(part) for part in text.split() if part.isdigit()])
    culprits = tuple(sorted(rank for rank, value in words.items() if value != usual))
    held_up = victims(evidence, set(culprits))
    fronts = {rank: front for rank in held_up if (front := evidence.ranks[rank].front) is not None}
    front = next(iter(fronts.values()), None)
    places = {rank: place for rank in culprits if (place := evidence.ranks[rank].place) is not None}
    runs = "runs" if len(culprits) == 1 else "run"
    return Finding(
        kind="pipeline-schedule-mismatch",
        summary=f"{capitalised(culprits)} of the pipeline {runs} {words[culprits[0]]}, the others {usual}; "
        f"{wait_words(held_up)} for messages that do not come.",
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=0.9,
        group=evidence.group(front.group) if front is not None and front.group.ranks else None,
        op=front.op if front else None,
        seq=front.seq if front else None,
        step=min(evidence.ranks[rank].steps for rank in words),
        call_sites=call_sites(fronts),
        culprit_call_sites=places,
        evidence=tuple(f"rank {rank}: {value}" for rank, value in sorted(words.items())[:8]),
        advice=("Give every stage the same schedule and the same number of microbatches.",),
    )


def _are_complete(evidence: Evidence) -> bool:
    """Say whether no rank dropped events: else what they did can be compared, but not counted."""
    return all(rank.complete for rank in evidence.ranks.values())


def find_creation_mismatch(evidence: Evidence) -> Finding | None:
    """Return the finding for groups that some ranks are making and others are not, or make as their second, say."""
    counted = _are_complete(evidence)
    number = max((r.groups_made for r in evidence.ranks.values() if r.making_group is not None), default=0)
    if counted and number and (others := _find_other_groups(evidence)) is not None:
        return others
    making = {
        rank.rank: rank
        for rank in evidence.ranks.values()
        if rank.making_group is not None and (rank.groups_made == number or not counted)
    }
    absent = [
        rank
        for rank in evidence.ranks.values()
        if rank.rank not in making
        and (rank.groups_made < number or not counted)
        and (rank.blocking or rank.finished or rank.making_group is not None)
    ]
    if not making or not absent:
        return None
    culprits = tuple(sorted(rank.rank for rank in absent))
    waiting = tuple(sorted(making))
    sites = {rank: own.making_group for rank, own in making.items() if own.making_group is not None}
    places: dict[int, Site] = {rank: place for rank in culprits if (place := evidence.ranks[rank].place) is not None}
    line = next(iter(sites.values()), None)
    return Finding(
        kind="group-creation-mismatch",
        summary=f"{capitalised(culprits)} did not call new_group{at_line(line)}; {wait_words(waiting)} in it.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.9,
        step=min(rank.steps for rank in making.values()),
        call_sites=sites,
        culprit_call_sites=places,
        evidence=(
            *(f"rank {r.rank}: {_doing(r, counted=counted)}" for r in absent[:8]),
            *((f"{rank_list(waiting)} made {number} groups, this one included",) if counted else ()),
        ),
        advice=("Every rank of the job must call new_group, members or not, in the same order.",),
    )


def _find_other_groups(evidence: Evidence) -> Finding | None:
    """Return the finding where ranks call new_group at different lines, and some do not come out of it."""
    calls = {rank.rank: rank.group_sites for rank in evidence.ranks.values()}
    number = min(map(len, calls.values()))
    differing = (i for i in range(number) if len({sites[i] for sites in calls.values()}) > 1)
    place = next((i for i in differing if not _made_together(evidence, i)), None)
    if place is None:
        return None
    sites = {rank: site for rank, own in calls.items() if (site := own[place]) is not None}
    usual = Counter(sites.values()).most_common(1)[0][0]
    culprits = tuple(sorted(rank for rank, site in sites.items() if site != usual))
    tie = 2 * len(culprits) >= len(sites)
    waiting = tuple(sorted(set(sites) - set(culprits)))
    return Finding(
        kind="group-creation-mismatch",
        summary=f"{capitalised(culprits)} made another group at this place{at_line(sites[culprits[0]])}; others "
        f"called new_group{at_line(usual)}; ranks wait in new_group.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.6 if tie else 0.8,
        step=min(rank.steps for rank in evidence.ranks.values()),
        call_sites={rank: site for rank, site in sites.items() if rank in waiting},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=(
            f"their call number {place + 1} of new_group is at different lines",
            *(("as many ranks on either side: which one is wrong is a guess",) if tie else ()),
        ),
        advice=("Every rank of the job must call new_group, members or not, in the same order.",),
    )


def _made_together(evidence: Evidence, call: int) -> bool:
    """Say whether all ranks came out of a call of new_group with one group: then lines may differ by rank."""
    ranks = evidence.ranks.values()
    members = {key.ranks for rank in ranks for key in rank.groups if key.name == str(call + 1)}
    return len(members) == 1 and all(rank.groups_made - (rank.making_group is not None) > call for rank in ranks)


def _doing(rank: RankEvidence, *, counted: bool) -> str:
    made = f"made {rank.groups_made} groups and " if counted else ""
    return f"{made}{'has ended' if rank.finished else 'is elsewhere'}{at_line(rank.place)}"


def find_creation_risk(evidence: Evidence) -> list[Finding]:
    """Return the finding for groups that went well though ranks called new_group a different number of times.

    Groups are numbered by the calls of each rank: the next one has other names on other ranks. Groups whose name comes
    from their members (`use_local_synchronization`) need no call of the others: where there are any, nothing is said.
    """
    named = {key for rank in evidence.ranks.values() for key in rank.groups}
    made = {rank.rank: rank.groups_made for rank in evidence.ranks.values()}
    countable = _are_complete(evidence) and not evidence.missing and all(key.name.isdecimal() for key in named)
    if len(set(made.values())) < 2 or not countable:
        return []
    most = max(made.values())
    culprits = tuple(sorted(rank for rank, number in made.items() if number < most))
    if any(evidence.goes_on(evidence.ranks[rank]) for rank in culprits):
        return []  # it may be about to make them
    fewer = Counter(evidence.ranks[culprits[0]].group_sites)
    sites = {}
    for rank in made:
        left_out = Counter(evidence.ranks[rank].group_sites) - fewer
        if rank not in culprits and (site := next(filter(None, left_out), None)):
            sites[rank] = site
    line = next(iter(sites.values()), None)
    return [
        Finding(
            kind="group-creation-mismatch",
            severity="warning",
            summary=f"{capitalised(culprits)} did not make every call of new_group that the others made"
            f"{at_line(line)}; it went well this time: the next group has other names on other ranks, and hangs.",
            culprit_ranks=culprits,
            confidence=0.85,
            call_sites=sites,
            evidence=tuple(f"rank {rank} called new_group {number} times" for rank, number in sorted(made.items())[:8]),
            advice=("Every rank of the job must call new_group, members or not, in the same order.",),
        )
    ]
