"""Both ends of a message have different sizes."""

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, at_line, explain
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.p2p_messages import message_finding
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import partner_of
from dtprof.records import codes
from dtprof.records.tables import Array

MIN_MESSAGES = 2
"""Messages of one size before an end that takes another size is said to have changed."""
MIN_PAIRS = 2
"""Other pairs of ranks whose messages of an exchange have one size before an end of another size is odd."""


def find_broken_messages(case: Case) -> Iterator[Finding]:
    """Give the finding for each message that met, with another size at its other end, and did not end well."""
    job = case.job
    met = [
        (rank.rank, mine, other)
        for rank in job.ranks.values()
        for mine in rank.open_operations
        if mine.p2p
        and (other := partner_of(job.ranks, rank.rank, mine)) is not None
        and (other.nbytes != mine.nbytes or _have_other_types(mine, other))
    ]
    odd = _find_odd_rank(job, met)
    for rank, mine, other in met:
        yield _size_finding(job, rank, mine, other, passed=False, odd=odd)


def _find_odd_rank(job: JobState, met: Collection[tuple[int, Operation, Operation]]) -> tuple[int, str] | None:
    """Return the rank at whose end the size of messages that do not fit is odd, and the evidence.

    Its messages fit none of its peers, two or more; or those of all other pairs of the exchange have one size.
    """
    distinct = {frozenset((rank, mine.peer_rank)) for rank, mine, _ in met}
    if len(distinct) == 1:
        return _find_odd_end(job, *next(iter(met)))
    odd = next(iter(frozenset.intersection(*distinct)), None) if distinct else None
    if odd is None or not {channel.peer for channel in job.ranks[odd].channels} <= frozenset.union(*distinct):
        return None
    return odd, f"messages of rank {odd} have another size than their other end with each of its peers"


def _find_odd_end(job: JobState, rank: int, mine: Operation, other: Operation) -> tuple[int, str] | None:
    """Return the end of a message whose size is not that of the messages which other pairs exchange at its lines."""
    ends = {rank: mine, mine.peer_rank: other}
    lines = {(end.op, end.site) for end in ends.values() if end.site is not None}
    sizes = dict[frozenset[int], set[tuple[int, int]]]()
    for state in job.ranks.values():
        rows = (int(at) for table in state.messages.values() for at in table["at"][table["nth"] == mine.nth])
        for operation in map(state.operations.__getitem__, rows):
            if (operation.op, operation.site) in lines:
                pair = frozenset((state.rank, operation.peer_rank))
                sizes.setdefault(pair, set()).add((operation.nbytes, operation.dtype))
    sizes.pop(frozenset(ends), None)
    usual = set().union(*sizes.values())
    odd = [r for r, end in ends.items() if (end.nbytes, end.dtype) not in usual]
    if len(sizes) < MIN_PAIRS or len(usual) != 1 or len(odd) != 1:
        return None
    return odd[0], f"{len(sizes)} other pairs of ranks send and receive {min(usual)[0]:,} bytes at these lines"


def _have_other_types(mine: Operation, other: Operation) -> bool:
    """Say whether both ends take the message for elements of different types; devices compare nothing."""
    return mine.on_device and codes.NONE not in (mine.dtype, other.dtype) and mine.dtype != other.dtype


def _size_words(end: Operation, other: Operation) -> str:
    types = f" of {codes.dtype_name(end.dtype)}" if _have_other_types(end, other) else ""
    return f"{end.nbytes:,} bytes{types}"


def find_odd_sizes(case: Case) -> Iterator[Finding]:
    """Give findings for messages that the backend let pass with other sizes at both ends.

    One a pair of ranks, or one for the rank that is at an end of all of them.
    """
    job = case.job
    met = list[tuple[int, Operation, Operation]]()
    for rank, sender in sorted(job.ranks.items()):
        first: dict[int, tuple[int, int]] = {}  # by receiver: where its first such message is at both ends
        for channel, sent in sender.messages.items() if sender.complete else ():
            receiver = job.ranks.get(channel.peer)
            if not channel.sends or receiver is None or not receiver.complete:
                continue
            if any(one.peer < 0 for one in receiver.channels):
                continue  # a receive from any source takes what comes first: order pairs nothing
            taken = receiver.messages.get(channel.other(rank))
            odd = _first_of_other_size(sent, taken) if taken is not None else None
            if odd is not None:
                first[channel.peer] = min(odd, first.get(channel.peer, odd))
        for peer, (mine, theirs) in sorted(first.items(), key=lambda one: one[1]):
            met.append((rank, sender.operations[mine], job.ranks[peer].operations[theirs]))
    odd_rank = _find_odd_rank(job, met)
    for rank, *ends in met[:1] if odd_rank is not None else met:
        yield replace(_size_finding(job, rank, *ends, passed=True, odd=odd_rank), waiting_ranks=(), call_sites={})


def explain_stall(case: Case, stall: Finding) -> Iterator[Finding]:
    """Give the finding for a message between devices of two sizes before what its ranks do not complete.

    Both ends of a small one complete under NCCL, and its proxies stay behind.
    """
    waiting = set(stall.waiting_ranks)
    for odd in case.findings(find_odd_sizes):
        if waiting.issuperset(odd.culprit_ranks) and odd.group is not None and odd.group.is_nccl:
            yield replace(explain(odd, stall), waiting_ranks=tuple(sorted(waiting.difference(odd.culprit_ranks))))
            return


def _first_of_other_size(sent: Array, taken: Array) -> tuple[int, int] | None:
    """Return where the first message of a channel that went well with two sizes is among the operations of its ends."""
    # Messages of a channel arrive in order: those with one number are the two ends of one message.
    begin = max(sent["nth"][0], taken["nth"][0])
    size = max(0, min(sent["nth"][-1], taken["nth"][-1]) + 1 - begin)
    mine, theirs = (end[begin - end["nth"][0] :][:size] for end in (sent, taken))
    well = mine["plain"] & mine["done"] & theirs["plain"] & theirs["done"]
    odd = np.flatnonzero(well & (mine["nbytes"] != theirs["nbytes"]))
    return (int(mine["at"][odd[0]]), int(theirs["at"][odd[0]])) if len(odd) else None


def _size_finding(
    job: JobState, rank: int, mine: Operation, other: Operation, *, passed: bool, odd: tuple[int, str] | None
) -> Finding:
    """Return the finding for two ends of a message of different sizes.

    Parameters:
        odd: the rank at whose end sizes are odd, if others tell, and the evidence.
    """
    peer = mine.peer_rank
    operations = {rank: mine, peer: other}
    sender, receiver = (rank, peer) if mine.op == "send" else (peer, rank)
    sent, taken = operations[sender], operations[receiver]
    after = "; the rest of the buffer holds what it held before" if passed else ""
    changed = [r for r, operation in operations.items() if _has_changed(job, r, operation)]
    facts = [f"both are message #{mine.nth} from rank {sender} to rank {receiver} of their group and tag"]
    if len(changed) == 1 and _is_answered_alike(job, operations, changed[0]):
        facts.append(f"rank {changed[0]} has another size now, and so has the answer at both ends")
        changed = [operations[changed[0]].peer_rank]
    elif len(changed) == 1:
        facts.append(f"all messages before had one size at both ends, and rank {changed[0]} has another size now")
    elif odd is not None:
        changed = [odd[0]]
        facts.append(odd[1])
    return message_finding(
        "p2p-size-mismatch",
        f"Rank {sender} sends {_size_words(sent, taken)}{at_line(sent.site)} to rank {receiver}, which receives "
        f"{_size_words(taken, sent).replace(' bytes', '', 1)}{at_line(taken.site)}{after}.",
        job=job,
        operations=operations,
        culprits=tuple(changed) if len(changed) == 1 else tuple(sorted(operations)),
        grade=0.9,
        evidence_class=Evidence.DIRECT,
        facts=tuple(facts),
        advice="Give both ends buffers of the same shape and element type, or send the size first.",
    )


def _is_answered_alike(job: JobState, operations: dict[int, Operation], changed: int) -> bool:
    """Say whether the next message the other way has at both ends the size of one of them, as of a smaller batch."""
    answers = set()
    for rank, end in operations.items():
        back = (o for o in job.ranks[rank].operations if o.p2p and (o.group, o.peer) == (end.group, end.peer))
        later = (o.nbytes for o in back if o.op != end.op and o.issued_ns > end.issued_ns)
        answers.add(next(later, None))
    return answers == {operations[changed].nbytes}


def _has_changed(job: JobState, rank: int, operation: Operation) -> bool:
    """Say whether an end of a message has another size than all messages of its channel before."""
    channel = job.ranks[rank].messages.get(operation.channel_end)
    if channel is None:
        return False
    before = channel["nbytes"][channel["nth"] < operation.nth]
    return len(before) >= MIN_MESSAGES and bool((before == before[0]).all() and before[0] != operation.nbytes)


RULES: Declared = (
    Rule(kinds=("p2p-size-mismatch",), stages=(Stage.BROKEN_MESSAGE, Stage.WAIT), find=find_broken_messages),
    Rule(kinds=("p2p-size-mismatch",), stages=(Stage.RISK,), find=find_odd_sizes),
    Refinement(kinds=("p2p-size-mismatch",), causes=("backend-stall",), stages=(Stage.STALL,), refine=explain_stall),
)
