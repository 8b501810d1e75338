"""All members entered the same collective, and it does not complete."""

from collections.abc import Iterator, Mapping

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.device_evidence import begin_words, with_connecting, with_device_health
from dtprof.diagnosis.findings import Evidence, Finding, at_line, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import partner_of
from dtprof.records.nodes.exit_records import is_stop

ADVICE = "Look at the network between the members' hosts and at the backend's own log."
PASSING_NS = 1_000_000_000
"""An operation that all members issued less than this before the job was stopped may have been about to complete."""


def _was_passing(job: JobState, members: Mapping[int, Operation]) -> bool:
    """Say whether the job was stopped so soon after all members issued the operation that it may have completed."""
    newest_ns = max(operation.issued_ns for operation in members.values())
    ends = [job.ranks[rank].exit for rank in members if job.ranks[rank].stopped_politely]
    return len(ends) == len(members) and all(end is not None and end.t_ns < newest_ns + PASSING_NS for end in ends)


def find_backend_stalls(case: Case) -> Iterator[Finding]:
    """Give findings for an operation that all members issued with matching arguments, and that stalls or failed.

    It failed with connection errors although all ranks were alive: no rank exited, and nobody stopped the job.
    """
    job = case.job
    for collective in case.open_collectives:
        members = {**collective.waiting, **collective.elsewhere}
        if len(members) < len(collective.group.ranks) or len(members) < 2 or collective.absent:
            continue
        failed = {rank: operation for rank, operation in members.items() if operation.failed}
        if failed and (
            is_stop(job.manifest.exit_status) or any(job.ranks[rank].transport_exception is None for rank in failed)
        ):
            continue
        # A member that completed it, or issued another operation there, is another rule's.
        if not failed and (collective.elsewhere or _was_passing(job, members)):
            continue
        op = next(iter(collective.waiting.values()))
        group = job.group(collective.group)
        end = f"it failed on {list_ranks(tuple(failed))}" if failed else "it does not complete"
        errors = [error for rank in failed if (error := job.ranks[rank].transport_exception) is not None]
        finding = Finding(
            kind="backend-stall",
            summary=f"All {len(members)} members of {group_words(group)} entered {op.op} #{op.seq}, and {end}.",
            culprit_ranks=(),
            waiting_ranks=tuple(sorted(collective.waiting)),
            grade=0.5 if failed else 0.7,
            evidence_class=None if failed else Evidence.DIRECT,
            group=group,
            op=op.op,
            seq=op.seq,
            step=op.step,
            call_sites=call_sites(collective.waiting),
            evidence=(
                "operation and arguments agree on every member",
                *(begin_words(members) if op.on_device else ()),
                *(f"{error.type}: {' '.join(error.message.split())[:200]}" for error in errors[:1]),
            ),
            advice=(ADVICE,),
        )
        yield with_device_health(job, with_connecting(finding, op), members) if op.on_device else finding
    yield from _find_stalled_messages(job)


def _find_stalled_messages(job: JobState) -> Iterator[Finding]:
    """Give the finding for each message between devices that both sides issued, and that does not complete."""
    for rank in job.ranks.values():
        for here in rank.open_operations:
            other = partner_of(job.ranks, rank.rank, here) if here.p2p and here.on_device else None
            if other is None or not other.open:
                continue
            source, target = (rank.rank, here.peer_rank) if here.op == "send" else (here.peer_rank, rank.rank)
            group = job.group(here.group)
            finding = Finding(
                kind="backend-stall",
                summary=f"The message from rank {source} to rank {target} ({group_words(group)}){at_line(here.site)} "
                "does not end, though both sides issued it.",
                culprit_ranks=(),
                waiting_ranks=tuple(sorted((source, target))),
                grade=0.6,
                group=group,
                op=here.op,
                seq=here.seq,
                step=here.step,
                call_sites=call_sites({rank.rank: here, here.peer_rank: other}),
                evidence=("sizes agree, and neither rank waits for anything older",),
                advice=(ADVICE,),
            )
            yield with_connecting(finding, here)


RULES: Declared = (Rule(kinds=("backend-stall",), stages=(Stage.STALL,), find=find_backend_stalls),)
