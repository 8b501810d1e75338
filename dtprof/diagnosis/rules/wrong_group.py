"""A rank made the call of its peers on the handle of another group."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, groupby, islice, pairwise

from dtprof.diagnosis.blocked_ranks import call_sites, operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised, explain, group_words, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.diagnosis.rules import argument_mismatch
from dtprof.diagnosis.sibling_groups import are_siblings
from dtprof.formatting import list_ranks
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import newest_departure
from dtprof.records.member_checksums import checksum_of
from dtprof.records.sites import Site

MAX_SUBSETS = 5_000
"""Sets of ranks that are tried as members of a group."""


def find_wrong_call(job: JobState, operations: dict[int, Operation], everyone: dict[int, Operation]) -> Finding | None:
    """Return the finding for a rank that made the call of its peers, at the same line, on another group than ever."""
    for rank, mine in operations.items():
        if newer := _newer_groups(job, rank, mine, everyone):
            return _wrong_finding(job, rank, mine, newer, everyone)
    for rank, mine in operations.items():
        if mine.site is None or _was_used(job, mine, or_sibling=True) or _comes_next(job, rank, mine):
            continue
        peers = {
            r: other
            for r, other in everyone.items()
            if (other.site, other.op) == (mine.site, mine.op)
            and other.group != mine.group
            and rank in other.group.ranks
        }
        usual = {r: o for r, o in peers.items() if _was_used(job, o)}
        if not usual and 2 * len(peers) > len(everyone) and _is_made_once(job, mine.site):
            usual = peers  # outside of loops one line makes no two calls, of which this could be the later one
        if not usual and (_is_of_another_axis(job, rank, mine, peers) or _is_alone_there(job, rank, mine, peers)):
            usual = peers
        companions = [o for o in everyone.values() if o.place == mine.place]
        if not usual or len(companions) > len(usual):
            continue
        return _wrong_finding(job, rank, mine, usual, everyone)
    return None


def _is_of_another_axis(job: JobState, rank: int, mine: Operation, peers: dict[int, Operation]) -> bool:
    """Say whether all others make the call of a line on groups of one name, and of another name than this rank's.

    Some of them are past the line: it does not go on with groups of the other name, nor does the next line, with which
    this rank may have swapped it.
    """
    others = [other for other in job.ranks.values() if other.rank != rank]
    here = [
        (job.group(o.group).description, other.operations[-1].site != o.site)
        for other in others
        for o in other.operations
        if (o.site, o.op) == (mine.site, mine.op)
    ]
    names, wrong = {name for name, _ in here}, job.group(mine.group).description
    follows = {
        job.group(after.group).description
        for other in others
        for before, after in pairwise(other.operations)
        if (before.site, before.op, after.op) == (mine.site, mine.op, mine.op)
    }
    is_known = bool(peers and wrong) and len(names) == 1 and any(is_past for _, is_past in here)
    return is_known and wrong not in names | follows


def _is_alone_there(job: JobState, rank: int, mine: Operation, peers: dict[int, Operation]) -> bool:
    """Say whether each member of a rank's group made the call of a line, which all make once, on another group.

    And all members of the group of the peers made it on that: with this rank there, each group would be whole.
    """
    if mine.site is None or not peers or not _is_made_once(job, mine.site):
        return False
    made = {
        other.rank: {o.group for o in other.operations if (o.site, o.op) == (mine.site, mine.op)}
        for other in job.ranks.values()
    }
    others = {*mine.group.ranks} - {rank}
    return all(made.get(r) and mine.group not in made[r] for r in others) and all(
        made.get(r) == {peer.group} for peer in peers.values() for r in {*peer.group.ranks} - {rank}
    )


def _newer_groups(job: JobState, rank: int, mine: Operation, everyone: dict[int, Operation]) -> dict[int, Operation]:
    """Return the calls of most ranks at the same line on a group that is new there, where each group has had its time.

    As where every epoch makes a group: the line took one after the other, and never went back to an older one.
    """
    caller = job.ranks[rank]
    here = [o for o in caller.operations if (o.site, o.op) == (mine.site, mine.op)]
    used = [key for key, _ in groupby(o.group for o in here)]
    peers = {
        r: o
        for r, o in everyone.items()
        if (o.site, o.op) == (mine.site, mine.op)
        and o.group not in used
        and rank in o.group.ranks
        and caller.groups_made >= job.ranks[r].groups_made
    }
    by_turns = mine.site is not None and len(used) > 1 and len(set(used)) == len(used) and used[-1] == mine.group
    has_ended = any(o.group == mine.group and o.done for o in here)
    return peers if by_turns and has_ended and 2 * len(peers) > len(everyone) else {}


def _is_made_once(job: JobState, site: Site) -> bool:
    place = job.place_in_source(site)
    return place is not None and not place.in_loop


def _comes_next(job: JobState, rank: int, operation: Operation) -> bool:
    """Say whether the group is that of the like call that follows this line in its step: then two were swapped."""
    following = [
        after.group
        for before, after in pairwise(job.ranks[rank].operations)
        if (before.site, before.op) == (operation.site, operation.op)
        and before.done
        and after.op == operation.op
        and after.step == before.step
        and not _is_further_up(after, before)
    ]
    return bool(following) and following.count(operation.group) * 2 > len(following)


def _is_further_up(a: Operation, b: Operation) -> bool:
    """Say whether one call lies before another in their function: made after it, it is of the next round."""
    if a.site is None or b.site is None:
        return False
    return a.site.shares_function(b.site) and a.site.line < b.site.line


def _blocking_collectives(job: JobState) -> dict[int, Operation]:
    """Return the collective that each rank waits in."""
    return {rank: waits[0].operation for rank, waits in job.waits.items() if not waits[0].operation.p2p}


def _awaited_members(job: JobState, operations: dict[int, Operation]) -> Iterator[tuple[Operation, RankState]]:
    """Yield the members that have not issued these operations, the earliest first; once where several wait alike."""
    places: dict[tuple[object, ...], Operation] = {}
    for operation in sorted(operations.values(), key=lambda operation: operation.issued_ns):
        places.setdefault((operation.group, operation.seq, operation.op, operation.site), operation)
    for operation in places.values():
        for rank in operation.group.ranks:
            member = job.ranks.get(rank)
            if member is not None and member.counts.get((operation.group, False), 0) <= operation.seq:
                yield operation, member


def explain_mismatch(case: Case, mismatch: Finding) -> Iterator[Finding]:
    """Give the finding for a rank whose peers wait for it in a call that it made on another group, where it misfits."""
    everyone = _blocking_collectives(case.job)
    # Also where it may as well have swapped the call with the next: a misfit of arguments is a consequence of either.
    if (wrong := find_call_of_absent(case.job, everyone, everyone, or_swapped=True)) is not None:
        yield explain(wrong, mismatch)


def explain_exit_by_wrong_group(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for a rank that waits for ranks that ended in a call that its peers made on another group."""
    everyone = _blocking_collectives(case.job)
    if (wrong := find_wrong_call(case.job, everyone, everyone)) is not None:
        yield explain(wrong, left)


def explain_absence(case: Case, cause: Finding) -> Iterator[Finding]:
    """Give the finding for a rank that its peers wait for in a call which it made on a group it is no member of.

    torch leaves such a call out with a warning, so that the rank goes on without it.
    """
    everyone = _blocking_collectives(case.job)
    for operation, member in _awaited_members(case.job, everyone):
        site = next((site for _, site in member.outside_calls if _is_line_of(operation, site)), None)
        if site is not None:
            yield explain(_outside_finding(case.job, member.rank, site, operation, everyone), cause)
            return


def find_left_out_calls(case: Case) -> Iterator[Finding]:
    """Give a finding for calls on a group that the caller is no member of, in a job that went well.

    A warning where the callers had made a group of their own, of that size, which nobody ever used: they passed the
    group of others. Else a note: that all ranks make the call and torch leaves it out on some is a habit.
    """
    job = case.job
    callers: dict[tuple[str, int], dict[int, Site]] = {}
    for rank in job.ranks.values():
        for _, site in rank.outside_calls:
            callers.setdefault((site.file, site.line), {})[rank.rank] = site
    for sites in callers.values():
        meant = next(
            (o for rank in job.ranks.values() for o in rank.operations if _is_line_of(o, next(iter(sites.values())))),
            None,
        )
        if meant is not None:
            yield _left_out_finding(job, meant, sites)


def _left_out_finding(job: JobState, meant: Operation, sites: dict[int, Site]) -> Finding:
    owners = {rank for members in _unused_groups(job, sorted(sites), len(meant.group.ranks)) for rank in members}
    culprits = tuple(sorted(owners or sites))
    beside = f", and never used the {'groups' if len(owners) > len(meant.group.ranks) else 'group'} made for them"
    return Finding(
        kind="wrong-group",
        severity="warning" if owners else "info",
        summary=f"{capitalised(culprits)} called {meant.op} on {group_words(job.group(meant.group))} of "
        f"{list_ranks(meant.group.ranks)}{at_line(sites[culprits[0]])}{beside if owners else ''}: torch skips the call "
        "with a warning.",
        culprit_ranks=culprits,
        grade=0.8,
        group=job.group(meant.group),
        op=meant.op,
        step=meant.step,
        call_sites=call_sites({r: meant for r in meant.group.ranks if r not in sites}),
        culprit_call_sites={rank: sites[rank] for rank in culprits},
        advice=("Pass the group that the rank is a member of, or make the call on its members alone.",),
    )


def _unused_groups(job: JobState, ranks: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of these ranks of a size that were made and never used."""
    asked = {checksum for rank in ranks for checksum in job.ranks[rank].group_members}
    used = {frozenset(key.ranks) for rank in job.ranks.values() for key in rank.groups}
    for members in islice(combinations(ranks, size), MAX_SUBSETS):
        if checksum_of(members) in asked and frozenset(members) not in used:
            yield members


def _is_line_of(operation: Operation, site: Site) -> bool:
    return operation.site is not None and (site.file, site.line) == (operation.site.file, operation.site.line)


def _outside_finding(job: JobState, rank: int, site: Site, meant: Operation, everyone: dict[int, Operation]) -> Finding:
    finding = _finding(
        job,
        rank,
        meant,
        everyone,
        summary=f"Rank {rank} called {meant.op} on a group that it is no member of, where its peers use "
        f"{group_words(job.group(meant.group))}: torch leaves the call out with a warning.",
        grade=0.9,
    )
    waiting = wait_words(finding.waiting_ranks)
    return replace(finding, culprit_call_sites={rank: site}, evidence=(f"{waiting} in {operation_words(job, meant)}",))


def _finding(
    job: JobState, rank: int, meant: Operation, everyone: dict[int, Operation], *, summary: str, grade: float
) -> Finding:
    """Return the finding for a rank that did not make the operation meant, for which its peers wait."""
    waiting = {r: o for r, o in everyone.items() if r != rank}
    return Finding(
        kind="wrong-group",
        summary=summary,
        culprit_ranks=(rank,),
        waiting_ranks=tuple(sorted(waiting)),
        grade=grade,
        group=job.group(meant.group),
        op=meant.op,
        seq=meant.seq,
        step=meant.step,
        call_sites=call_sites(waiting),
        advice=("Pass the same group as the other ranks do at this line.",),
    )


def find_call_of_absent(
    job: JobState, operations: dict[int, Operation], everyone: dict[int, Operation], *, or_swapped: bool = False
) -> Finding | None:
    """Return the finding where the call on the wrong group met a peer's next call there, and went well or did not fit.

    Peers wait at a line for a rank whose newest call of that line was made on a group that it never took there before.
    """
    for operation, member in _awaited_members(job, operations):
        if operation.site is None:
            continue
        here = (operation.site, operation.op)
        *before, newest = [o for o in member.operations if (o.site, o.op) == here] or [operation]
        groups = {o.group for o in before}
        has_left = len(before) > 1 and groups == {operation.group}
        # Outside of loops one line makes no two calls, of which the other group could be that of the later.
        is_other = groups <= {newest.group} and _is_made_once(job, operation.site) and _is_odd(job, newest, operation)
        is_meant = or_swapped or _is_meant_for_peers(job, member.rank, newest)
        if newest.group != operation.group and is_meant and (has_left or is_other):
            return _wrong_finding(job, member.rank, newest, _like(operation, everyone), everyone)
        instead = _call_instead(job, member, operation) or _call_unlike_siblings(job, member, operation)
        if instead is not None:
            return _wrong_finding(job, member.rank, instead, _like(operation, everyone), everyone)
    return None


def _is_odd(job: JobState, call: Operation, usual: Operation) -> bool:
    """Say whether most ranks make the call of a line on groups as large as the usual one, and one alone its own."""
    sizes = Counter(
        next((len(o.group.ranks) for o in rank.operations if (o.site, o.op) == (call.site, call.op)), 0)
        for rank in job.ranks.values()
    )
    most = sizes[len(usual.group.ranks)]
    return 2 * most > len(job.ranks) and sizes[len(call.group.ranks)] == 1


def _like(operation: Operation, everyone: dict[int, Operation]) -> dict[int, Operation]:
    return {r: o for r, o in everyone.items() if (o.group, o.seq) == (operation.group, operation.seq)}


def _call_instead(job: JobState, member: RankState, awaited: Operation) -> Operation | None:
    """Return the call at the line of an awaited one that a rank made on another group where it always made that one.

    A rank that then goes on with the awaited call, or has yet to go on, may have swapped two calls of the line: not
    where it has the size of the awaited call, and not that with which calls on its group begin in a round.
    """
    at = newest_departure(member.operations, awaited.label)
    if at is None:
        return None
    instead, following = member.operations[at], member.operations[at + 1 : at + 2]
    is_alike = (instead.site, instead.op) == (awaited.site, awaited.op) and instead.group != awaited.group
    if not is_alike or (following and following[0].label == awaited.label):
        return None
    labels = [operation.label for operation in member.operations[:at]]
    newest = max((i for i, label in enumerate(labels) if label == awaited.label), default=at)
    is_next = _comes_next(job, member.rank, instead) or instead.label in labels[newest + 1 :]  # later in its round
    begun = next((o for o in member.operations[newest + 1 : at] if o.group == instead.group), None)
    is_resized = begun is not None and instead.numel == awaited.numel != begun.numel
    return instead if following or is_resized or not is_next else None


def _call_unlike_siblings(job: JobState, member: RankState, awaited: Operation) -> Operation | None:
    """Return the call of a rank where all other ranks made an awaited one, or that on a sibling of its group.

    Where it made the awaited one before, or came to the line in earlier steps, these tell. Calls of a line are counted
    within their step: each rank's first is compared with the first of the others. A rank whose next call of the line
    is the awaited one, or may yet be, has swapped two.
    """
    if awaited.site is None or awaited.step is None:
        return None
    known = (o for o in member.operations if o.label[1:] == awaited.label[1:])
    if any(o.step is None or o.step < awaited.step or are_siblings(job, o.group, awaited.group) for o in known):
        return None
    made = {rank.rank: _calls_alike(rank, awaited) for rank in job.ranks.values()}
    waiting = next((calls for rank, calls in made.items() if rank != member.rank and awaited in calls), [])
    at = waiting.index(awaited) if waiting else 0
    mine, others = made.pop(member.rank), [calls for calls in made.values() if len(calls) > at]
    if not waiting or len(mine) <= at or len(others) < 2 or are_siblings(job, mine[at].group, awaited.group):
        return None
    if not all(are_siblings(job, calls[at].group, awaited.group) for calls in others):
        return None
    if len(mine) > at + 1:
        return mine[at] if mine[at + 1].group != awaited.group else None
    # The call after it of a rank that went on: another one of the line, or none, where that is done with.
    went_on = [rank for rank, calls in made.items() if len(calls) > at and job.ranks[rank].operations[-1] != calls[at]]
    after = [made[rank][at + 1] for rank in went_on if len(made[rank]) > at + 1]
    return mine[at] if went_on and not any(are_siblings(job, o.group, mine[at].group) for o in after) else None


def _calls_alike(rank: RankState, call: Operation) -> list[Operation]:
    """Return the calls of a rank with the same call stack and step, on any group."""
    return [o for o in rank.operations if o.step == call.step and o.label[1:] == call.label[1:]]


def _is_meant_for_peers(job: JobState, rank: int, call: Operation) -> bool:
    """Say whether a call came to an end with others, or is open and no call of the next line made too early."""
    if call.failed:
        return _was_met(job, rank, call)
    return call.done or not _comes_next(job, rank, call)


def _was_met(job: JobState, rank: int, call: Operation) -> bool:
    """Say whether another member made the call at this position of the group: nobody's limit ended it unmet."""
    members = (job.ranks[other] for other in call.group.ranks if other != rank and other in job.ranks)
    return any(member.counts.get((call.group, False), 0) > call.seq for member in members)


def _wrong_finding(
    job: JobState, rank: int, mine: Operation, usual: dict[int, Operation], everyone: dict[int, Operation]
) -> Finding:
    """Return the finding for a rank that made a call on another group than the peers that wait for it."""
    meant = next(iter(usual.values()))
    finding = _finding(
        job,
        rank,
        meant,
        everyone,
        summary=f"Rank {rank} made {operation_words(job, mine)}, where its peers use "
        f"{group_words(job.group(meant.group))}.",
        grade=0.85,
    )
    return replace(
        finding,
        evidence_class=Evidence.DIRECT,
        step=mine.step,
        culprit_call_sites=call_sites({rank: mine}),
        evidence=(
            f"this line is one of {group_words(job.group(meant.group))} on {list_ranks(tuple(usual))}; with "
            f"{group_words(job.group(mine.group))} it was never used before",
            f"{wait_words(tuple(sorted(usual)))} in {operation_words(job, meant)}",
        ),
    )


def _was_used(job: JobState, operation: Operation, *, or_sibling: bool = False) -> bool:
    """Say whether any rank ended another call at the line of an operation on its group, or on a sibling of it."""
    is_meant: dict[GroupId, bool] = {operation.group: True}
    for rank in job.ranks.values():
        for o in rank.operations:
            if o.site != operation.site or not o.done or o == operation:
                continue
            if o.group not in is_meant:
                is_meant[o.group] = or_sibling and are_siblings(job, o.group, operation.group)
            if is_meant[o.group]:
                return True
    return False


RULES: Declared = (
    Rule(kinds=("wrong-group",), stages=(Stage.RISK,), find=find_left_out_calls),
    Refinement(
        kinds=("wrong-group",), causes=argument_mismatch.KINDS, stages=(Stage.DIVERGENCE,), refine=explain_mismatch
    ),
    Refinement(
        kinds=("wrong-group",), causes=("rank-exited",), stages=(Stage.WAIT,), refine=explain_exit_by_wrong_group
    ),
    Refinement(
        kinds=("wrong-group",),
        causes=(
            "rank-exited",
            "rank-skipped-collective",
            "rank-stuck",
            "group-order-inversion",
            *argument_mismatch.KINDS,
        ),
        stages=(Stage.DIVERGENCE, Stage.WAIT),
        refine=explain_absence,
    ),
)
