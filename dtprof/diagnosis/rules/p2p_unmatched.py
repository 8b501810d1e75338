"""A rank waits for a message of which the peer never posts the other end."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import operation_words
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.p2p_messages import message_finding, message_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.job.issued_operations import Operation
from dtprof.job.own_pattern import usual_operation
from dtprof.job.wait_graph import Wait, find_expecting, went_astray

MAX_ASKED = 64
"""Messages, those waited for longest, whose peers' own patterns are looked at."""


def find_unmatched(case: Case) -> Iterator[Finding]:
    """Give findings for messages whose other end its peer does not post: it waits elsewhere, or has ended.

    A rank that turns to a peer as never before while another waits for it went astray itself: it is heard last, and
    those that wait for it first.
    """
    job, unmet, waits = case.job, case.unmet_messages, case.job.waits
    astray = {wait.rank for wait in unmet if went_astray(job.ranks, wait)}
    for wait in sorted(unmet, key=lambda wait: (wait.rank in astray, not astray & set(wait.awaited))):
        mine = wait.operation
        peers = [job.ranks[r] for r in wait.awaited if r in job.ranks]
        elsewhere = [p for p in peers if p.finished or (p.rank in waits and not _comes_soon(job, p.rank))]
        if not peers or len(elsewhere) < len(peers) or wait.any_of_them:
            continue
        peer = elsewhere[0]
        others = find_expecting(job.ranks, wait.rank, mine)
        operation = peer.first_blocking
        doing = (
            "has ended its program"
            if peer.finished
            else f"waits in {operation_words(job, operation)}"
            if operation
            else "runs on"
        )
        facts = [f"rank {wait.rank}: {message_words(mine)}{at_line(mine.site)}", f"rank {peer.rank} {doing}"]
        facts += [f"rank {r} waits in {message_words(o)}{at_line(o.site)}" for r, o in others.items()]
        needed = "receive" if mine.op == "send" else "send"
        yield message_finding(
            "p2p-unmatched",
            f"{capitalised([wait.rank])} waits in {message_words(mine)}{at_line(mine.site)}, and rank {peer.rank} made "
            f"no {needed} for it: it {doing}.",
            job=job,
            operations={wait.rank: mine},
            culprits=(peer.rank,),
            confidence=0.85 if not others else 0.7,
            facts=tuple(facts),
            advice=f"Make the {needed} on rank {peer.rank}, or leave out the call{at_line(mine.site)}.",
        )


def find_omitted(case: Case) -> Iterator[Finding]:
    """Give findings for messages that a peer makes in every round, and left out of its newest one.

    It waits in the next round then, and the ranks that keep to their programs wait for it, in a chain or a cycle.
    """
    job, waits = case.job, case.job.waits
    for wait in case.unmet_messages[:MAX_ASKED]:
        mine = wait.operation
        for rank in wait.awaited[:MAX_ASKED]:
            stuck = waits[rank][0].operation if rank in waits else None
            usual = usual_operation(job.ranks[rank].operations, stuck) if stuck is not None else None
            if usual is None or not _is_other_end(usual, of=mine, rank=wait.rank) or _left_own_program(job, wait):
                continue
            needed = "receive" if mine.op == "send" else "send"
            yield message_finding(
                "p2p-unmatched",
                f"Rank {rank} left out the {needed}{at_line(usual.site)} that rank {wait.rank} waits for"
                f"{at_line(mine.site)}.",
                job=job,
                operations={wait.rank: mine} | {r: own[0].operation for r, own in waits.items() if r != rank},
                culprits=(rank,),
                confidence=0.8,
                facts=(
                    f"rank {wait.rank}: {message_words(mine)}{at_line(mine.site)}",
                    f"after the same operations as now, rank {rank} made {message_words(usual)} in its round before",
                ),
                advice=f"Make the {needed} on rank {rank} in every round: look for a branch around it.",
            )


def _is_other_end(operation: Operation, *, of: Operation, rank: int) -> bool:
    return operation.p2p and operation.op != of.op and operation.group == of.group and operation.peer_rank == rank


def _left_own_program(job: JobState, wait: Wait) -> bool:
    return usual_operation(job.ranks[wait.rank].operations, wait.operation) is not None


def _comes_soon(job: JobState, rank: int) -> bool:
    """Say whether a rank waits only for messages of ranks that go on and are not blocked: it may yet post this one."""
    return all(
        wait.operation.p2p and not any(r in job.waits or job.ranks[r].finished for r in wait.awaited if r in job.ranks)
        for wait in job.waits[rank]
    )


RULES: Declared = (
    Rule(kinds=("p2p-unmatched",), stages=(Stage.WAIT,), find=find_omitted),
    Rule(kinds=("p2p-unmatched",), stages=(Stage.WAIT,), find=find_unmatched),
)
