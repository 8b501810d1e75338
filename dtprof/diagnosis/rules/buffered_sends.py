"""Blocking sends that complete only because the backend buffers messages without a receiver.

On another one, or with larger messages, they wait for each other in a cycle.

The messages are replayed as if each send waited for its receive. Collectives and handles would only hold ranks back
further: without them fewer cycles are found, and those that are found are there. gloo's sends do wait for their
receives, so that such a program hangs there.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.p2p_messages import message_finding, message_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array

MAX_MESSAGES = 100_000
"""In a job: more are not replayed."""
BLOCKING = ("send", "recv", "send_object_list", "recv_object_list")
"""Functions that return when the message has gone, or has come."""

MessageEnd = tuple[GroupId, int, int, int, int]
"""Of a message: group, sender, receiver, tag, how many went before."""


@dataclass(frozen=True, kw_only=True)
class _Message:
    """One end of a message in the program of a rank."""

    at: int  # among the operations of the rank
    end: MessageEnd
    peer: int
    sends: bool
    blocks: bool


def find_buffered_sends(case: Case) -> Iterator[Finding]:
    """Give a warning for the first cycle of blocking sends that each wait for a receive behind another one."""
    job = case.job
    programs = _list_messages(job)
    cycle = _find_cycle(programs) if programs else {}
    if not cycle:
        return
    operations = {rank: job.ranks[rank].operations[message.at] for rank, message in sorted(cycle.items())}
    ranks = tuple(sorted(cycle))
    facts = (f"rank {rank}: {message_words(o)}{at_line(o.site)}" for rank, o in list(operations.items())[:8])
    finding = message_finding(
        "p2p-deadlock-cycle",
        f"{capitalised(ranks)} send to one another before they receive: that goes well only while the backend keeps "
        "the messages.",
        job=job,
        operations=operations,
        culprits=ranks,
        grade=0.8,
        facts=tuple(facts),
        advice="Let every second rank receive first, or post sends and receives together with batch_isend_irecv.",
    )
    yield replace(finding, severity="warning")


def _list_messages(job: JobState) -> dict[int, list[_Message]]:
    """Return the messages of each rank in program order; none where not all are known."""
    count = 0
    for rank in job.ranks.values():
        count += sum(map(len, rank.messages.values()))
        has_any_source = any(channel.peer < 0 for channel in rank.channels)
        if count > MAX_MESSAGES or has_any_source or not rank.complete or rank.first_row or not rank.sees_program:
            return {}
    # As a rule a framework sends, or no send blocks: then no message is worth a look.
    if not any(_has_blocking_send(rank) for rank in job.ranks.values()):
        return {}
    return {rank.rank: _messages_of(rank) for rank in job.ranks.values()}


def _has_blocking_send(rank: RankState) -> bool:
    sending = [table for channel, table in rank.messages.items() if channel.sends and channel.peer != rank.rank]
    return any(any(_find_blocking(rank, table).values()) for table in sending)


def _find_blocking(rank: RankState, messages: Array) -> dict[int, bool]:
    """Say of each call site of messages whether it blocks."""
    of_site = dict(zip(messages["site"].tolist(), messages["at"].tolist(), strict=True))
    sites = {line: rank.operations[at].site for line, at in of_site.items()}
    return {line: site is not None and site.label is None and site.api in BLOCKING for line, site in sites.items()}


def _messages_of(rank: RankState) -> list[_Message]:
    messages = []
    for channel, table in rank.messages.items():
        pair = (rank.rank, channel.peer) if channel.sends else (channel.peer, rank.rank)
        blocking = _find_blocking(rank, table)
        for at, nth, line in zip(table["at"].tolist(), table["nth"].tolist(), table["site"].tolist(), strict=True):
            end = (channel.group, *pair, channel.tag, nth)
            messages.append(
                _Message(
                    at=at,
                    end=end,
                    peer=channel.peer,
                    sends=channel.sends,
                    blocks=blocking[line] and rank.rank != channel.peer,
                )
            )
    return sorted(messages, key=lambda message: message.at)


def _find_cycle(programs: dict[int, list[_Message]]) -> dict[int, _Message]:
    """Return the messages at which ranks wait for one another where every send waits for its receive."""
    posted: set[tuple[MessageEnd, bool]] = set()
    place = dict.fromkeys(programs, 0)
    waiting: dict[tuple[MessageEnd, bool], int] = {}  # rank that waits for an end
    ready = deque(programs)
    while ready:
        rank = ready.popleft()
        own = programs[rank]
        while place[rank] < len(own):
            message = own[place[rank]]
            posted.add((message.end, message.sends))
            if (other := waiting.pop((message.end, message.sends), None)) is not None:
                ready.append(other)
            if message.blocks and (message.end, not message.sends) not in posted:
                waiting[message.end, not message.sends] = rank
                break
            place[rank] += 1
    held = {rank: programs[rank][place[rank]] for rank in waiting.values()}
    for rank in sorted(held):
        path = [rank]
        while (peer := held[path[-1]].peer) in held and peer not in path:
            path.append(peer)
        if peer in path:
            cycle = {one: held[one] for one in path[path.index(peer) :]}
            return cycle if any(message.sends for message in cycle.values()) else {}
    return {}


RULES: Declared = (Rule(kinds=("p2p-deadlock-cycle",), stages=(Stage.RISK,), find=find_buffered_sends),)
