"""Operations that NCCL's watchdog timed out: the progress of each rank in each group, and the silent ranks."""

from collections.abc import Hashable

from dtprof.diagnosis.findings import Finding, capitalised, group_words, wait_words
from dtprof.diagnosis.log_findings.log_rule import log_finding, log_rule
from dtprof.diagnosis.log_findings.logged_absences import (
    COLLECT,
    DID_LAST,
    fewer_calls_finding,
    unnamed_absence_finding,
)
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.logged_job import ABORTED, LoggedJob, odd_ones
from dtprof.diagnosis.sources.logs.watchdog_progress import (
    Fronts,
    Key,
    begins_at_zero,
    fronts_by_group,
    group_at,
    group_size,
    is_ambiguous,
    one_number_for_many,
    operation_of,
    place_of,
    usual_front,
)
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import SIZES_AGREE

AGREE_IN_SIZE = (*SIZES_AGREE, "all_gather")
"""NCCL gathers tensors of different sizes by other operations than that."""
SUSPENDED = 2.0


def find_timeouts(job: LoggedJob) -> Finding | None:
    """Return the finding from timeouts of watchdogs, and its caveats."""
    groups = fronts_by_group(job)
    if not groups:
        return None
    key, fronts = max(groups.items(), key=lambda item: len(item[1]))
    late = [front.timeout for front in fronts.values()]
    if all(timeout.limit_ms and timeout.ran_ms >= SUSPENDED * timeout.limit_ms for timeout in late):
        return _suspended(job, key, fronts)
    if one_number_for_many(job.facts.timeouts):
        reason = "this torch prints ranks of groups, and one number stands for several processes"
        return _no_culprit(job, key, fronts, (), reason)
    if operation_of(late[0]) in ("send", "recv", None):
        reason = "of messages between two ranks the log does not name the other side"
        return _no_culprit(job, key, fronts, (), reason)
    if key is None and len({(timeout.seq, timeout.op) for timeout in late}) > 1:
        reason = "this torch prints no group: sequence numbers that differ may belong to different groups"
        return _no_culprit(job, key, fronts, (), reason)
    return (
        _disagreement(job, key, fronts)
        or _out_of_step(job, key, fronts)
        or _behind(job, key, fronts)
        or _silent(job, key, fronts, groups)
    )


def _no_culprit(job: LoggedJob, key: Key, fronts: Fronts, facts: tuple[str, ...], reason: str) -> Finding:
    first = usual_front(fronts)
    op, group = operation_of(first), group_at(key, set(fronts))
    same = len({(front.timeout.seq, front.timeout.op) for front in fronts.values()}) == 1
    place = place_of(first) if same else op or first.op
    where = f" of {group_words(group)}" if group else ""
    return unnamed_absence_finding(
        job,
        waiting=fronts,
        place=f"{place}{where}",
        reason=f"which rank did not come, or whether the network failed: {reason}",
        advice=(COLLECT,),
        op=op,
        group=group,
        seq=first.seq if same else None,
        evidence=(*facts, *_outstanding(fronts)),
    )


def _outstanding(fronts: Fronts) -> tuple[str, ...]:
    outstanding = {
        front.progress.enqueued - front.progress.completed
        for front in fronts.values()
        if front.progress and front.progress.enqueued is not None and front.progress.completed is not None
    }
    if len(outstanding) == 1 and len(fronts) > 1:
        count = plural(outstanding.pop(), "operation")
        return (f"all of them had {count} outstanding: they are at one place of the program",)
    return ()


def _suspended(job: LoggedJob, key: Key, fronts: Fronts) -> Finding:
    timeout = next(iter(fronts.values())).timeout
    reason = (
        f"an operation ran {timeout.ran_ms / 1000:.0f} s against a limit of {timeout.limit_ms / 1000:.0f} s: "
        "the processes were suspended, or their hosts stalled"
    )
    return _no_culprit(job, key, fronts, (reason,), reason)


def _disagreement(job: LoggedJob, key: Key, fronts: Fronts) -> Finding | None:
    """Return the finding for members that made different operations, or sizes, at one position."""
    seq = usual_front(fronts).seq
    here = {rank: front.timeout for rank, front in fronts.items() if front.timeout.seq == seq}
    ops: dict[int, Hashable] = {rank: operation_of(timeout) or timeout.op for rank, timeout in here.items()}
    sizes: dict[int, Hashable] = {
        rank: (timeout.numel_in, timeout.numel_out)
        for rank, timeout in here.items()
        if operation_of(timeout) in AGREE_IN_SIZE
    }
    if len(set(ops.values())) > 1:
        kind, values, words = "collective-order-mismatch", ops, "different operations"
    elif len(set(sizes.values())) > 1:
        kind, values, words = "size-mismatch", sizes, "different sizes"
    else:
        return None
    if is_ambiguous(fronts):
        return None
    culprits = odd_ones(values)
    waiting = tuple(rank for rank in sorted(here) if rank not in culprits)
    group = group_at(key, set(fronts))
    return log_finding(
        job,
        kind,
        f"{capitalised(culprits)} made {words} at #{seq} of {group_words(group)}.",
        culprits=culprits,
        waiting=waiting,
        grade=0.7 if waiting and key else 0.45,
        group=group,
        op=operation_of(here[culprits[0]]),
        seq=seq,
        evidence=tuple(
            f"rank {rank}: {timeout.op} of {timeout.numel_in} elements" for rank, timeout in sorted(here.items())[:4]
        ),
        advice=("Compare what these ranks call, and the sizes they pass.", COLLECT),
    )


def _out_of_step(job: LoggedJob, key: Key, fronts: Fronts) -> Finding | None:
    positions: dict[int, Hashable] = {rank: front.timeout.seq for rank, front in fronts.items()}
    if key is None or len(set(positions.values())) == 1:
        return None
    culprits = odd_ones(positions)
    if len(culprits) == len(positions) or is_ambiguous(fronts):
        return _no_culprit(
            job, key, fronts, (), "the ranks stand at different positions, and none of these is the majority's"
        )
    waiting = tuple(rank for rank in sorted(fronts) if rank not in culprits)
    usual, group = usual_front(fronts), group_at(key, set(fronts))
    found = {seq for rank in culprits if (seq := fronts[rank].timeout.seq) is not None}
    at = ", ".join(f"#{seq}" for seq in sorted(found))
    return log_finding(
        job,
        "rank-skipped-collective",
        f"{capitalised(culprits)} stand{'s' if len(culprits) == 1 else ''} at {at} of {group_words(group)}; "
        f"{wait_words(waiting)} in {place_of(usual)}.",
        culprits=culprits,
        waiting=waiting,
        grade=0.5,
        group=group,
        op=operation_of(usual),
        seq=usual.seq,
        evidence=tuple(f"rank {rank}: {place_of(fronts[rank].timeout)}" for rank in culprits[:3]),
        advice=("Look for a collective that only some ranks make.", COLLECT),
    )


def _behind(job: LoggedJob, key: Key, fronts: Fronts) -> Finding | None:
    """Return the finding for ranks that reported that they had not enqueued the operation."""
    usual, group = usual_front(fronts), group_at(key, set(fronts))
    if key is None or usual.seq is None or is_ambiguous(fronts):
        return None
    reported = {
        progress.rank: progress.enqueued
        for progress in job.facts.progress
        if (progress.group, progress.description) == key
    }
    behind = {r: done for r, done in reported.items() if r is not None and r not in fronts and done is not None}
    enqueued = {rank: behind[rank] for rank in sorted(behind) if behind[rank] < usual.seq}
    if not enqueued or len(enqueued) > len(fronts):
        return None
    return fewer_calls_finding(
        job, group, usual.seq, enqueued=enqueued, waiting=tuple(sorted(fronts)), grade=0.7, name=usual.op
    )


def _silent(job: LoggedJob, key: Key, fronts: Fronts, groups: dict[Key, Fronts]) -> Finding:
    """Accuse the members that reported nothing, where it is known who they are and they are few."""
    usual, group = usual_front(fronts), group_at(key, set(fronts))
    if not begins_at_zero(key, fronts):
        reason = f"the members of {group_words(group)} are not in the log"
        return _no_culprit(job, key, fronts, (), reason)
    size, certain = group_size(job, fronts)
    elsewhere = {rank for other in groups.values() for rank in other} - set(fronts)
    missing = set(range(size)) - set(fronts)
    aborted = {rank for rank, end in job.exits.items() if end.status == ABORTED}  # by watchdogs of their own
    culprits = tuple(sorted(missing - elsewhere - aborted))
    where = f" of {group_words(group)}" if group else ""
    if not missing and certain and len(fronts) > 1:
        return _all_in(job, key, fronts)
    if not culprits or not size or len(missing) > len(fronts) or (len(missing) == len(fronts) > 1 and not certain):
        count = f"{len(fronts)} of {size} ranks" if size and certain else f"only {list_ranks(sorted(fronts))}"
        return _no_culprit(job, key, fronts, (), f"{count} reported; the others are silent")
    facts = [f"{list_ranks(culprits)} reported nothing, {list_ranks(sorted(fronts))} did", *_outstanding(fronts)]
    facts += [note.text[:160] for note in job.notes("trace-cache")[:1]]
    facts += [f"the log also says: {hint.type}: {hint.message[:120]}" for hint in job.hints[:1]]
    seen = bool(set(culprits) & job.facts.ranks_named)
    return log_finding(
        job,
        "rank-skipped-collective",
        f"{capitalised(culprits)} did not come to {place_of(usual)}{where}; {wait_words(sorted(fronts))}.",
        culprits=culprits,
        waiting=fronts,
        grade=_trust(len(culprits), len(fronts), seen=seen and certain),
        group=group,
        op=operation_of(usual),
        seq=usual.seq,
        evidence=tuple(facts),
        advice=(DID_LAST, COLLECT),
        leaves_open=("whether the silent ranks skipped the operation, were stuck before it, or inside its call",),
    )


def _trust(silent: int, reported: int, *, seen: bool) -> float:
    """Return how sure it is that the silent ranks are to blame: one that waits alone may have called one too many."""
    if silent >= reported:
        return 0.35
    return (0.6 if seen else 0.5) if silent == 1 else 0.4


def _all_in(job: LoggedJob, key: Key, fronts: Fronts) -> Finding:
    usual, group = usual_front(fronts), group_at(key, set(fronts))
    return log_finding(
        job,
        "backend-stall",
        f"All {len(fronts)} ranks are in {place_of(usual)} and it does not end.",
        waiting=fronts,
        grade=0.5,
        group=group,
        op=operation_of(usual),
        seq=usual.seq,
        evidence=("operation, position and size agree on every rank", *_outstanding(fronts)),
        advice=("Look at the network between the hosts and at NCCL's own log (NCCL_DEBUG=INFO).", COLLECT),
        leaves_open=("whether the network, a device or the library is at fault",),
    )


RULES: Declared = (
    log_rule(
        find_timeouts,
        ("rank-skipped-collective", "collective-order-mismatch", "size-mismatch", "backend-stall"),
    ),
)
