"""Point-to-point operations that do not meet: cycles, partners that never come, other tags, other sizes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list
from dtprof.diagnosis.job_state import ChannelEnd, Evidence, Operation
from dtprof.diagnosis.rules.rank_deaths import call_sites
from dtprof.diagnosis.wait_graph import Wait, find_waits, is_met
from dtprof.records.tables import Array


def find_message_fault(
    evidence: Evidence, waits: dict[int, tuple[Wait, ...]], cycle: tuple[int, ...]
) -> Finding | None:
    """Return the finding for the messages that hold the job up."""
    unmet = [wait for own in waits.values() for wait in own if wait.operation.p2p and wait.awaited]
    unmet.sort(key=lambda wait: wait.operation.issued_ns)
    return (
        _other_tag(evidence, unmet)
        or _cycle(evidence, waits, cycle)
        or find_broken_message(evidence)
        or _unmatched(evidence, unmet, waits)
    )


def _words(operation: Operation) -> str:
    peer = operation.peer_rank
    other = "any rank" if peer < 0 else f"rank {peer}"
    tag = f" with tag {operation.tag}" if operation.tag else ""
    return f"{operation.op} {'to' if operation.op == 'send' else 'from'} {other}{tag}"


def _finding(
    kind: str,
    summary: str,
    *,
    evidence: Evidence,
    operations: dict[int, Operation],
    culprits: tuple[int, ...],
    confidence: float,
    facts: tuple[str, ...],
    advice: str,
) -> Finding:
    chosen = operations[min(operations)]
    held_up = tuple(r for r in sorted(find_waits(evidence)) if r not in culprits)
    waiting = {rank: evidence.ranks[rank].blocking[0] for rank in held_up}
    own = call_sites(operations)
    places = {r: place for r in culprits if (place := own.get(r) or evidence.ranks[r].place) is not None}
    return Finding(
        kind=kind,
        summary=summary,
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        confidence=confidence,
        group=evidence.group(chosen.group),
        op=chosen.op,
        seq=chosen.seq,
        step=chosen.step,
        call_sites=call_sites(waiting),
        culprit_call_sites=places,
        evidence=facts,
        advice=(advice,),
    )


def _opposite(evidence: Evidence, rank: int, operation: Operation) -> list[Operation]:
    """Return what the peer has posted for this rank, the other way, and waits for in vain."""
    peer = evidence.ranks.get(operation.peer_rank)
    if peer is None:
        return []
    return [
        other
        for other in peer.open_operations
        if other.p2p
        and other.op != operation.op
        and other.peer_rank == rank
        and other.group == operation.group
        and is_met(evidence, peer.rank, other) is False
    ]


def _other_tag(evidence: Evidence, unmet: list[Wait]) -> Finding | None:
    for wait in unmet:
        mine = wait.operation
        for other in _opposite(evidence, wait.rank, mine):
            if other.tag == mine.tag:
                continue
            peer = mine.peer_rank
            operations = {wait.rank: mine, peer: other}
            guilty = [r for r, o in operations.items() if _is_unheard_of(evidence, r, o)]
            if len(guilty) != 1:
                guilty = [r for r, o in operations.items() if _breaks_rhythm(evidence, r, o)]
            culprits = tuple(guilty) if len(guilty) == 1 else tuple(sorted(operations))
            facts = [f"rank {r}: {_words(o)}{at_line(o.site)}" for r, o in sorted(operations.items())]
            if len(guilty) == 1:
                facts.append(f"rank {guilty[0]} does not go on as it had with its tags here before")
            return _finding(
                "p2p-tag-mismatch",
                f"{capitalised([wait.rank])} and {rank_list([peer])} wait for each other with different tags: "
                f"{_words(mine)}{at_line(mine.site)}, {_words(other)}{at_line(other.site)}.",
                evidence=evidence,
                operations=operations,
                culprits=culprits,
                confidence=0.9,
                facts=tuple(facts),
                advice="Give both ends the same tag.",
            )
    return None


def _is_unheard_of(evidence: Evidence, rank: int, operation: Operation) -> bool:
    """Say whether this is the rank's first message with this tag, after others on the same way."""
    channels = evidence.ranks[rank].channels
    same_way = [
        c
        for c in channels
        if (c.group, c.peer, c.sends) == (operation.group, operation.peer_rank, operation.op == "send")
    ]
    return operation.nth == 0 and len(same_way) > 1


def _breaks_rhythm(evidence: Evidence, rank: int, operation: Operation) -> bool:
    """Say whether the rank's tags on this way rose by the same number each time, and do not any more."""
    before = [
        o.tag
        for o in evidence.ranks[rank].operations
        if o.p2p
        and o.seq < operation.seq
        and (o.group, o.op, o.peer) == (operation.group, operation.op, operation.peer)
    ]
    steps = {b - a for a, b in pairwise(before)}
    return len(before) > 2 and len(steps) == 1 and operation.tag - before[-1] not in steps


def _cycle(evidence: Evidence, waits: dict[int, tuple[Wait, ...]], cycle: tuple[int, ...]) -> Finding | None:
    """Return the finding for ranks that wait for one another's messages in a ring."""
    inside = {
        rank: wait
        for rank in cycle
        for wait in waits[rank][:1]
        if wait.operation.p2p and any(r in cycle for r in wait.awaited)
    }
    if len(cycle) < 2 or len(inside) < len(cycle):
        return None
    if sum(_went_astray(evidence, wait) for wait in inside.values()) == 1:
        return None  # one turned to the wrong peer: the others wait as they always did
    facts = tuple(f"rank {r}: {_words(w.operation)}{at_line(w.operation.site)}" for r, w in sorted(inside.items())[:8])
    kinds = {wait.operation.op for wait in inside.values()}
    both = "receives before it sends" if kinds == {"recv"} else "sends before it receives"
    middle = both if len(kinds) == 1 else "waits for the next"
    name = capitalised(cycle)
    return _finding(
        "p2p-deadlock-cycle",
        f"{name} wait for one another in a cycle of messages: each {middle}.",
        evidence=evidence,
        operations={rank: wait.operation for rank, wait in inside.items()},
        culprits=cycle,
        confidence=0.95,
        facts=facts,
        advice="Let every second rank take the other order, or post all of them with batch_isend_irecv before waiting.",
    )


def find_broken_message(evidence: Evidence) -> Finding | None:
    """Return the finding for a message that met, with another size at its other end, and did not end well."""
    for rank in evidence.ranks.values():
        for mine in rank.open_operations:
            other = partner_of(evidence, rank.rank, mine) if mine.p2p else None
            if other is not None and other.nbytes != mine.nbytes:
                return size_finding(evidence, rank.rank, mine, other, passed=False)
    return None


def partner_of(evidence: Evidence, rank: int, operation: Operation) -> Operation | None:
    """Return the other end of a message."""
    peer = evidence.ranks.get(operation.peer_rank)
    if peer is None or operation.nth < 0 or not (peer.complete and evidence.ranks[rank].complete):
        return None
    if any(c.peer < 0 for owner in (peer, evidence.ranks[rank]) for c in owner.channels):
        return None  # a receive from any source takes what comes: order does not tell
    return next(
        (
            o
            for o in reversed(peer.operations)
            if o.p2p
            and o.op != operation.op
            and (o.group, o.tag, o.nth, o.peer_rank) == (operation.group, operation.tag, operation.nth, rank)
        ),
        None,
    )


def find_odd_sizes(evidence: Evidence) -> list[Finding]:
    """Return findings for messages that the back end let pass with other sizes at both ends, one a pair of ranks."""
    found = []
    for rank, sender in sorted(evidence.ranks.items()):
        first: dict[int, tuple[int, int]] = {}  # by receiver: where its first such message is at both ends
        for channel, sent in sender.messages.items() if sender.complete else ():
            receiver = evidence.ranks.get(channel.peer)
            if not channel.sends or receiver is None or not receiver.complete:
                continue
            if any(one.peer < 0 for one in receiver.channels):
                continue  # a receive from any source takes what comes: order does not tell
            taken = receiver.messages.get(ChannelEnd(channel.group, rank, channel.tag, sends=False))
            odd = _first_of_other_size(sent, taken) if taken is not None else None
            if odd is not None:
                first[channel.peer] = min(odd, first.get(channel.peer, odd))
        for peer, (mine, theirs) in sorted(first.items(), key=lambda one: one[1]):
            ends = sender.operations[mine], evidence.ranks[peer].operations[theirs]
            found.append(replace(size_finding(evidence, rank, *ends, passed=True), waiting_ranks=(), call_sites={}))
    return found


def _first_of_other_size(sent: Array, taken: Array) -> tuple[int, int] | None:
    """Return where the first message of a channel that went well with two sizes is among the operations of its ends."""
    begin = max(sent["nth"][0], taken["nth"][0])
    size = max(0, min(sent["nth"][-1], taken["nth"][-1]) + 1 - begin)
    mine, theirs = (end[begin - end["nth"][0] :][:size] for end in (sent, taken))
    well = mine["plain"] & mine["done"] & theirs["plain"] & theirs["done"]
    odd = np.flatnonzero(well & (mine["nbytes"] != theirs["nbytes"]))
    return (int(mine["at"][odd[0]]), int(theirs["at"][odd[0]])) if len(odd) else None


def size_finding(evidence: Evidence, rank: int, mine: Operation, other: Operation, *, passed: bool) -> Finding:
    """Return the finding for two ends of a message of different sizes."""
    peer = mine.peer_rank
    operations = {rank: mine, peer: other}
    sender, receiver = (rank, peer) if mine.op == "send" else (peer, rank)
    sent, taken = operations[sender], operations[receiver]
    after = "; the rest of the buffer holds what it held before" if passed else ""
    return _finding(
        "p2p-size-mismatch",
        f"Rank {sender} sends {sent.nbytes:,} bytes{at_line(sent.site)} to rank {receiver}, which receives "
        f"{taken.nbytes:,}{at_line(taken.site)}{after}.",
        evidence=evidence,
        operations=operations,
        culprits=tuple(sorted(operations)),
        confidence=0.9,
        facts=(f"both are message #{mine.nth} from rank {sender} to rank {receiver} of their group and tag",),
        advice="Give both ends buffers of the same shape and element type, or send the size first.",
    )


def _unmatched(evidence: Evidence, unmet: list[Wait], waits: dict[int, tuple[Wait, ...]]) -> Finding | None:
    """Return the finding for a message whose other end its peer does not post: it waits elsewhere, or has ended.

    A rank that turns to a peer as never before while another waits for it went astray itself: it is heard last, and
    those that wait for it first.
    """
    astray = {wait.rank for wait in unmet if _went_astray(evidence, wait)}
    for wait in sorted(unmet, key=lambda wait: (wait.rank in astray, not astray & set(wait.awaited))):
        mine = wait.operation
        peers = [evidence.ranks[r] for r in wait.awaited if r in evidence.ranks]
        elsewhere = [p for p in peers if p.finished or (p.rank in waits and not _comes_soon(p.rank, waits))]
        if not peers or len(elsewhere) < len(peers) or wait.any_of_them:
            continue
        peer = elsewhere[0]
        others = _expecting(evidence, wait.rank, mine)
        front = peer.front
        doing = (
            "has ended its program"
            if peer.finished
            else f"waits in {front.op} #{front.seq} of {group_words(evidence.group(front.group))}{at_line(front.site)}"
            if front
            else "runs on"
        )
        facts = [f"rank {wait.rank}: {_words(mine)}{at_line(mine.site)}", f"rank {peer.rank} {doing}"]
        facts += [f"rank {r} waits in {_words(o)}{at_line(o.site)}" for r, o in others.items()]
        needed = "receive" if mine.op == "send" else "send"
        return _finding(
            "p2p-unmatched",
            f"{capitalised([wait.rank])} waits in {_words(mine)}{at_line(mine.site)}, and rank {peer.rank} made no "
            f"{needed} for it: it {doing}.",
            evidence=evidence,
            operations={wait.rank: mine},
            culprits=(peer.rank,),
            confidence=0.85 if not others else 0.7,
            facts=tuple(facts),
            advice=f"Make the {needed} on rank {peer.rank}, or leave out the call{at_line(mine.site)}.",
        )
    return None


def _went_astray(evidence: Evidence, wait: Wait) -> bool:
    mine = wait.operation
    usual = [c for c in evidence.ranks[wait.rank].channels if c.sends == (mine.op == "send")]
    first = mine.nth == 0 and len({channel.peer for channel in usual}) > 1
    return first and any(other.nth > 0 for other in _expecting(evidence, wait.rank, mine).values())


def _expecting(evidence: Evidence, rank: int, operation: Operation) -> dict[int, Operation]:
    """Return other ranks whose messages to or from this one meet nothing either: one may be named wrongly."""
    found = {}
    for other in evidence.ranks.values():
        for o in other.open_operations:
            if o.p2p and o.op != operation.op and o.peer_rank == rank and other.rank != operation.peer_rank:
                found[other.rank] = o
    return found


def _comes_soon(rank: int, waits: dict[int, tuple[Wait, ...]]) -> bool:
    """Say whether a rank waits for messages itself, of ranks that are not held up: it may come to this one."""
    return all(wait.operation.p2p and not any(r in waits for r in wait.awaited) for wait in waits[rank])
