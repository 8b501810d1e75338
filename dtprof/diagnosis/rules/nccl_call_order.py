"""NCCL calls, in NCCL's own log, that differ between members of a communicator, and members with fewer calls."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from dtprof.diagnosis.findings import Finding, capitalised, wait_words
from dtprof.diagnosis.log_findings.log_rule import log_finding, log_rule
from dtprof.diagnosis.log_findings.logged_absences import DID_LAST
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.rules.reported_disagreement import WHAT_IS_CALLED
from dtprof.diagnosis.sources.logs.log_facts import Communicator, NcclCall
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, odd_ones, operation, ranks_by_process
from dtprof.formatting import list_ranks, plural

WAITED = ("dump-signal", "stuck", "heartbeat")
ASPECTS = (
    ("collective-order-mismatch", "op"),
    ("dtype-mismatch", "dtype"),
    ("size-mismatch", "numel"),
    ("reduce-op-mismatch", "reduction"),
    ("root-mismatch", "root"),
)


@dataclass(frozen=True, kw_only=True)
class CommunicatorCalls:
    """The calls of the members of one communicator, by position."""

    size: int
    calls: Mapping[int, Mapping[int, NcclCall]]
    """By global rank, then by position; the newest only."""
    counted: bool
    """Whether positions are counted from the creation; else they are NCCL's own `opCount`."""

    def last(self, rank: int) -> int:
        """Return the position of the newest call of a rank."""
        return max(self.calls[rank])

    def place(self, position: int) -> str:
        """Return a position, as a reader finds it in the log."""
        where = f"call #{position + 1}" if self.counted else f"opCount {position:x}"
        return f"{where} of a communicator of {plural(self.size, 'rank')}"


def find_divergence(job: LoggedJob) -> Finding | None:
    """Return the finding for members of a communicator that called another operation, or fewer operations."""
    groups = _groups(job)
    return _find_calls_apart(groups) or _find_fewer_calls(job, groups)


def _find_calls_apart(groups: list[CommunicatorCalls]) -> Finding | None:
    """Return the finding for the first call that differs between members of a communicator."""
    apart = [(where, members) for members in groups if (where := _first_divergence(members)) is not None]
    if not apart:
        return None
    where, members = min(apart, key=lambda item: item[0])
    here = {rank: calls[where] for rank, calls in members.calls.items()}
    odd = odd_ones(dict[int, Hashable](here))
    others = tuple(rank for rank in sorted(here) if rank not in odd)
    if others and len({here[rank] for rank in odd}) == 1 and (stepped := _out_of_step(members, where, odd, others)):
        return stepped
    kind = next(kind for kind, name in ASPECTS if len({getattr(call, name) for call in here.values()}) > 1)
    against = f" where {list_ranks(others)} called {here[others[0]]}" if others else ""
    return Finding(
        kind=kind,
        summary=f"{capitalised(odd)} called {here[odd[0]]}{against}, as {members.place(where)}.",
        culprit_ranks=odd,
        waiting_ranks=others,
        grade=0.85 if others else 0.5,
        op=operation(here[odd[0]].op),
        evidence=tuple(f"rank {rank}: {call} (NCCL's own log)" for rank, call in sorted(here.items())[:4]),
        advice=(WHAT_IS_CALLED,),
    )


def _out_of_step(
    members: CommunicatorCalls, where: int, odd: tuple[int, ...], others: tuple[int, ...]
) -> Finding | None:
    """Return the finding if a minority of ranks skipped or added one call, and then went on as the others do."""
    mine, theirs = members.calls[odd[0]], members.calls[others[0]]
    ahead, behind = (theirs.get(where + 1), mine.get(where + 1))
    if mine[where] == ahead and behind != ahead:
        what, call = "left out", theirs[where]
    elif behind is not None and behind == theirs[where] and behind != ahead:
        what, call = "made one call too many,", mine[where]
    else:
        return None
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(odd)} {what} {call}, {members.place(where)}, and went on as the others do.",
        culprit_ranks=odd,
        waiting_ranks=others,
        grade=0.8,
        op=operation(call.op),
        evidence=(
            f"{list_ranks(odd)}: {mine[where]}, then {behind or 'nothing more'} (NCCL's own log)",
            f"{list_ranks(others)}: {theirs[where]}, then {ahead or 'nothing more'}",
        ),
        advice=("Look for a branch or an early return around this call on these ranks.",),
    )


def _find_fewer_calls(job: LoggedJob, groups: list[CommunicatorCalls]) -> Finding | None:
    """Return the finding for members that had called fewer, in a job of which an operation timed out."""
    if not (job.facts.timeouts or job.notes(*WAITED)):
        return None
    for members in groups:
        ends = {rank: members.last(rank) for rank in members.calls}
        first = min(ends.values())
        behind = tuple(sorted(rank for rank, end in ends.items() if end == first))
        waiting = tuple(sorted(set(ends) - set(behind)))
        if not waiting or len(behind) > len(waiting):
            continue
        missed = members.calls[waiting[0]].get(first + 1)
        if missed is None:
            continue
        return log_finding(
            job,
            "rank-skipped-collective",
            f"{capitalised(behind)} never called {missed}, {members.place(first + 1)}; {wait_words(waiting)} in it.",
            culprits=behind,
            waiting=waiting,
            grade=0.65,
            op=operation(missed.op),
            evidence=tuple(
                f"rank {rank}: {members.calls[rank][ends[rank]]}, {members.place(ends[rank])}, is its last call"
                for rank in (behind[0], waiting[0])
            ),
            advice=(DID_LAST,),
        )
    return None


def _first_divergence(members: CommunicatorCalls) -> int | None:
    """Return the first position at which the calls differ."""
    first = max(min(calls) for calls in members.calls.values())
    last = min(members.last(rank) for rank in members.calls)
    for position in sorted({at for calls in members.calls.values() for at in calls if first <= at <= last}):
        if len({calls.get(position) for calls in members.calls.values()}) > 1:
            return position if all(position in calls for calls in members.calls.values()) else None
    return None


def _groups(job: LoggedJob) -> list[CommunicatorCalls]:
    """Return the communicators whose members are all in the log, and their calls by rank."""
    found = job.facts.communicators
    ranks = ranks_by_process(list(found.values()))
    groups: dict[Hashable, list[Communicator]] = {}
    ordinals: dict[tuple[str, int], int] = {}
    for communicator in found.values():
        nth = ordinals[communicator.process, communicator.size] = (
            ordinals.get((communicator.process, communicator.size), -1) + 1
        )
        groups.setdefault(communicator.number or (communicator.size, nth), []).append(communicator)
    result = []
    for members in groups.values():
        named = [(ranks[member.process], member) for member in members if member.process in ranks and member.calls]
        whole = len(named) == len({rank for rank, _ in named}) == members[0].size > 1
        calls = _aligned([communicator for _, communicator in named]) if whole else None
        if calls is not None:
            by_rank = {rank: aligned for (rank, _), aligned in zip(named, calls, strict=True)}
            counted = all(communicator.rank is not None for _, communicator in named)
            result.append(CommunicatorCalls(size=members[0].size, calls=by_rank, counted=counted))
    return result


def _aligned(members: list[Communicator]) -> list[dict[int, NcclCall]] | None:
    """Return the calls by position: counted from the creation, else by NCCL's own count where that rises."""
    if all(member.rank is not None for member in members):
        return [
            {member.total - len(member.calls) + i: call for i, (_, call) in enumerate(member.calls)}
            for member in members
        ]
    if all(member.counts_rise and member.calls[-1][0] > 0 for member in members):
        return [dict(member.calls) for member in members]
    return None


RULES: Declared = (log_rule(find_divergence, ("rank-skipped-collective", *(kind for kind, _ in ASPECTS))),)
