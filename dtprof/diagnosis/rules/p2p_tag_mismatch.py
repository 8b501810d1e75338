"""Both ends of a message wait, with different tags."""

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.p2p_messages import message_finding, message_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import has_come

SAME_TAG = "Give both ends the same tag."
_words = functools.partial(message_words, with_any_tag=True)


def _opposite(job: JobState, rank: int, operation: Operation) -> list[Operation]:
    """Return the messages that the peer posted for this rank in the other direction and waits for in vain."""
    peer = job.ranks.get(operation.peer_rank)
    if peer is None:
        return []
    return [
        other
        for other in peer.open_operations
        if other.p2p
        and other.op != operation.op
        and other.peer_rank == rank
        and other.group == operation.group
        and has_come(job.ranks, peer.rank, other) is False
    ]


def find_other_tags(case: Case) -> Iterator[Finding]:
    """Give findings for messages that meet nothing, whose peer waits for one of this rank with another tag."""
    job = case.job
    for wait in case.unmet_messages:
        mine = wait.operation
        for other in _opposite(job, wait.rank, mine):
            if other.tag == mine.tag:
                continue
            peer = mine.peer_rank
            operations = {wait.rank: mine, peer: other}
            facts = [f"rank {r}: {_words(o)}{at_line(o.site)}" for r, o in sorted(operations.items())]
            culprits, advice = tuple(sorted(operations)), SAME_TAG
            if (blame := _find_blame(job, operations)) is not None:
                culprits, advice = (blame.rank,), blame.advice
                facts.append(blame.fact)
            yield message_finding(
                "p2p-tag-mismatch",
                f"{capitalised([wait.rank])} and {list_ranks([peer])} wait for each other with different tags: "
                f"{_words(mine)}{at_line(mine.site)}, {_words(other)}{at_line(other.site)}.",
                job=job,
                operations=operations,
                culprits=culprits,
                grade=0.9,
                evidence_class=Evidence.DIRECT,
                facts=tuple(facts),
                advice=advice,
            )


class _Blame(NamedTuple):
    """The one of two ranks whose tag is wrong, and what shows it."""

    rank: int
    fact: str
    advice: str = SAME_TAG


def _find_blame(job: JobState, operations: dict[int, Operation]) -> _Blame | None:
    """Return whose tag is wrong; None where nothing tells."""
    # Where tags count, each of them is new: who counts on has done nothing.
    for is_off in (_breaks_rhythm, _is_unheard_of):
        off = [r for r, o in operations.items() if is_off(job, r, o)]
        if len(off) == 1:
            if agreed := _agrees_with(job, off[0], operations[off[0]]):
                (other,) = operations.keys() - {*off}
                return _Blame(other, f"rank {off[0]} and {list_ranks(agreed)} went over to this tag alike")
            return _Blame(off[0], f"rank {off[0]} does not go on as it had with its tags here before")
    tags = _tags_of_others(job, operations)
    odd = [r for r, o in operations.items() if o.tag not in tags]
    if len(tags) == len(odd) == 1:
        return _Blame(odd[0], f"the other ranks are at tag {tags.pop()} here")
    met = {r: others for r, o in operations.items() if (others := _met_with(job, r, o))}
    if len(met) != 1:
        return None
    ((sound, others),) = met.items()
    (culprit,) = operations.keys() - met.keys()
    return _Blame(
        culprit,
        f"rank {sound} used the same tags with {list_ranks(others)}, this one as well",
        f"Give both ends the same tag: look for a message that rank {culprit} left out before.",
    )


def find_untaken_tag(case: Case) -> Iterator[Finding]:
    """Give findings for ranks that wait for a message, whose peer has sent them one with a tag of its own.

    The backend kept it, and nobody takes it.
    """
    job = case.job
    for wait in case.unmet_messages:
        mine, peer = wait.operation, job.ranks.get(wait.operation.peer_rank)
        if peer is None or mine.op == "send" or not (peer.complete and job.ranks[wait.rank].complete):
            continue
        taken = job.ranks[wait.rank].channels
        for end, count in peer.channels.items():
            if not end.sends or end.peer != wait.rank or end.group != mine.group or end.tag == mine.tag:
                continue
            took = taken.get(end.other(peer.rank), 0)
            is_new = (count == 1 and not took, mine.nth == 0 and took > 0)  # of the peer's tag, of the tag waited for
            sent = next((o for o in reversed(peer.operations) if o.op == "send" and o.channel_end == end), None)
            if count <= took or not any(is_new) or sent is None:
                continue
            culprit, other = (peer.rank, wait.rank) if is_new[0] else (wait.rank, peer.rank)
            yield message_finding(
                "p2p-tag-mismatch",
                f"Rank {wait.rank} waits in {_words(mine)}{at_line(mine.site)}; rank {peer.rank} sent it a "
                f"message that nobody takes: {_words(sent)}{at_line(sent.site)}.",
                job=job,
                operations={wait.rank: mine, peer.rank: sent},
                culprits=(culprit,),
                grade=0.85,
                evidence_class=Evidence.FIRST_TIME,
                facts=(f"rank {culprit} never used its tag here before, and rank {other} went on as ever",),
                advice=SAME_TAG,
            )


def _is_unheard_of(job: JobState, rank: int, operation: Operation) -> bool:
    """Say whether this is the rank's first message with this tag, after others on the same way."""
    channels = job.ranks[rank].channels
    same_way = [
        c
        for c in channels
        if (c.group, c.peer, c.sends) == (operation.group, operation.peer_rank, operation.op == "send")
    ]
    return operation.nth == 0 and len(same_way) > 1


def _tags_of_others(job: JobState, operations: dict[int, Operation]) -> set[int]:
    """Return the tags with which ranks beside the two wait at their lines, as where all count their rounds."""
    sites = {o.site for o in operations.values()} - {None}
    others = (rank for rank in job.ranks.values() if rank.rank not in operations)
    return {o.tag for rank in others for o in rank.open_operations if o.p2p and o.site in sites}


def _met_with(job: JobState, rank: int, operation: Operation) -> list[int]:
    """Return the peers with which the rank, at this line, completed all tags that it did with this one, and this tag.

    As a server does that counts the rounds of all its workers; this may be its first message with one of them.
    """
    tags: dict[int, set[int]] = {}
    for o in job.ranks[rank].operations:
        if o.p2p and o.done and o.site is not None and (o.op, o.site) == (operation.op, operation.site):
            tags.setdefault(o.peer_rank, set()).add(o.tag)
    own = tags.pop(operation.peer_rank, set())
    if operation.tag in own:
        return []
    return sorted(peer for peer, met in tags.items() if own | {operation.tag} <= met)


def _breaks_rhythm(job: JobState, rank: int, operation: Operation) -> bool:
    """Say whether the rank's tags rose by the same number each time, or came in rounds, and do not any more."""
    before = [
        o.tag
        for o in job.ranks[rank].operations
        if o.p2p
        and o.seq < operation.seq
        and (o.group, o.op, o.peer) == (operation.group, operation.op, operation.peer)
    ]
    steps = {b - a for a, b in pairwise(before)}
    again = [tag for *pair, tag in zip(before, before[1:], before[2:], strict=False) if pair == before[-2:]]
    leaves_round = len(again) > 1 and len({*again}) == 1 and operation.tag != again[0]
    return leaves_round or (len(before) > 2 and len(steps) == 1 and operation.tag - before[-1] not in steps)


def _agrees_with(job: JobState, rank: int, operation: Operation) -> list[int]:
    """Return other peers with which the rank went over to the same tag since its last message on this way, and met."""
    own = [o for o in job.ranks[rank].operations if o.p2p and o.issued_ns < operation.issued_ns]
    same_way = (o.issued_ns for o in own if (o.group, o.op, o.peer) == (operation.group, operation.op, operation.peer))
    last_ns = max(same_way, default=0)
    met = (o for o in own if o.done and o.issued_ns > last_ns and o.tag == operation.tag)
    return sorted({o.peer_rank for o in met if o.peer_rank != operation.peer_rank and _breaks_rhythm(job, rank, o)})


RULES: Declared = (
    Rule(kinds=("p2p-tag-mismatch",), stages=(Stage.WAIT,), find=find_other_tags),
    Rule(kinds=("p2p-tag-mismatch",), stages=(Stage.WAIT,), find=find_untaken_tag),
)
