"""Operations that NCCL's watchdog gave up on: which rank stood where in which group, and who is silent."""

from collections.abc import Hashable
from dataclasses import dataclass

from dtprof.diagnosis.findings import Finding, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.logs.facts import Progress, Timeout
from dtprof.diagnosis.logs.job import Job, group_of, operation
from dtprof.diagnosis.logs.mismatches import odd_ones
from dtprof.tables import Group

AGREE_IN_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
COLLECT = (
    "Give the logs of all ranks. Next time set TORCH_FR_BUFFER_SIZE=20000 (before torch 2.9 "
    "TORCH_NCCL_TRACE_BUFFER_SIZE), TORCH_NCCL_DUMP_ON_TIMEOUT=1 and diagnose the dumps, or start with dtprof run."
)
SUSPENDED = 2.0


@dataclass(frozen=True, kw_only=True)
class Front:
    """The oldest operation of a rank in a group that did not end."""

    timeout: Timeout
    progress: Progress | None


Fronts = dict[int, Front]
Key = tuple[str, str] | None


def find_timeouts(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the finding that watchdogs' timeouts give, and what they leave open."""
    groups = _groups(job)
    if not groups:
        return None, ()
    key, fronts = max(groups.items(), key=lambda item: len(item[1]))
    late = [front.timeout for front in fronts.values()]
    if all(one.limit_ms and one.ran_ms >= SUSPENDED * one.limit_ms for one in late):
        return _suspended(key, fronts)
    if key is None and len({(one.seq, one.op) for one in late}) > 1:
        reason = "this torch prints no group: sequence numbers that differ may belong to different groups"
        return _nobody(key, fronts, (), reason)
    return _disagreement(job, key, fronts) or _out_of_step(key, fronts) or _silent(job, key, fronts, groups)


def _groups(job: Job) -> dict[Key, Fronts]:
    """Return the oldest timed-out operation of each rank in each group."""
    named = {(one.rank, one.work): one for one in job.facts.progress}
    result: dict[Key, Fronts] = {}
    for timeout in job.facts.timeouts:
        if timeout.rank is None:
            continue
        progress = named.get((timeout.rank, timeout.seq))
        key = (progress.group, progress.description) if progress else None
        fronts = result.setdefault(key, {})
        if timeout.rank not in fronts or timeout.seq < fronts[timeout.rank].timeout.seq:
            fronts[timeout.rank] = Front(timeout=timeout, progress=progress)
    return _joined(result)


def _joined(groups: dict[Key, Fronts]) -> dict[Key, Fronts]:
    """Add ranks whose line with the group is missing to the only group that has the same operation."""
    unnamed = groups.get(None)
    if unnamed and len(groups) == 2:
        key = next(name for name in groups if name is not None)
        places = {(front.timeout.seq, front.timeout.op) for front in groups[key].values()}
        alike = {rank: one for rank, one in unnamed.items() if (one.timeout.seq, one.timeout.op) in places}
        groups[key] = {**alike, **groups[key]}
        groups[None] = {rank: one for rank, one in unnamed.items() if rank not in groups[key]}
    return {key: fronts for key, fronts in groups.items() if fronts}


def _group(key: Key, ranks: set[int]) -> Group | None:
    return group_of(key[0], key[1], ranks) if key else None


def _nobody(key: Key, fronts: Fronts, facts: tuple[str, ...], reason: str) -> tuple[Finding, tuple[str, ...]]:
    """Return the finding that says who waits where, and accuses nobody."""
    first = _usual(fronts)
    op, group = operation(first.op), _group(key, set(fronts))
    same = len({(one.timeout.seq, one.timeout.op) for one in fronts.values()}) == 1
    place = f"{op or first.op} #{first.seq}" if same else op or first.op
    where = f" of {group_words(group)}" if group else ""
    finding = Finding(
        kind="rank-skipped-collective",
        summary=f"{wait_words(sorted(fronts)).capitalize()} in {place}{where}; for whom is not in the log.",
        culprit_ranks=(),
        waiting_ranks=tuple(sorted(fronts)),
        confidence=0.2,
        group=group,
        op=op,
        seq=first.seq if same else None,
        evidence=(*facts, *_outstanding(fronts)),
        advice=(COLLECT,),
    )
    return finding, (f"which rank did not come, or whether the network failed: {reason}",)


def _usual(fronts: Fronts) -> Timeout:
    """Return the operation most ranks are in."""
    places = [(one.timeout.seq, one.timeout.op) for one in fronts.values()]
    chosen = max(places, key=places.count)
    return next(one.timeout for one in fronts.values() if (one.timeout.seq, one.timeout.op) == chosen)


def _outstanding(fronts: Fronts) -> tuple[str, ...]:
    told = {
        one.progress.enqueued - one.progress.completed
        for one in fronts.values()
        if one.progress and one.progress.enqueued is not None and one.progress.completed is not None
    }
    if len(told) == 1 and len(fronts) > 1:
        return (f"all of them had {told.pop()} operation(s) outstanding: they are at one place of the program",)
    return ()


def _suspended(key: Key, fronts: Fronts) -> tuple[Finding, tuple[str, ...]]:
    one = next(iter(fronts.values())).timeout
    reason = (
        f"an operation ran {one.ran_ms / 1000:.0f} s against a limit of {one.limit_ms / 1000:.0f} s: "
        "the processes were suspended, or their hosts stood still"
    )
    return _nobody(key, fronts, (reason,), reason)


def _disagreement(job: Job, key: Key, fronts: Fronts) -> tuple[Finding, tuple[str, ...]] | None:
    """Return the finding for members that made different operations, or sizes, at one position."""
    seq = _usual(fronts).seq
    here = {rank: one.timeout for rank, one in fronts.items() if one.timeout.seq == seq}
    ops: dict[int, Hashable] = {rank: operation(one.op) or one.op for rank, one in here.items()}
    sizes: dict[int, Hashable] = {
        rank: (one.numel_in, one.numel_out) for rank, one in here.items() if operation(one.op) in AGREE_IN_SIZE
    }
    if len(set(ops.values())) > 1:
        kind, values, words = "collective-order-mismatch", ops, "different operations"
    elif len(set(sizes.values())) > 1 and "COALESCED" not in {one.op for one in here.values()}:
        kind, values, words = "size-mismatch", sizes, "different sizes"
    else:
        return None
    if _ambiguous(fronts):
        return None
    culprits = odd_ones(values)
    waiting = tuple(rank for rank in sorted(here) if rank not in culprits)
    group = _group(key, set(fronts))
    finding = Finding(
        kind=kind,
        summary=f"{capitalised(culprits)} made {words} at #{seq} of {group_words(group)}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.7 if waiting and key else 0.45,
        group=group,
        op=operation(here[culprits[0]].op),
        seq=seq,
        call_sites=job.sites(list(waiting)),
        culprit_call_sites=job.sites(list(culprits)),
        evidence=tuple(f"rank {rank}: {one.op} of {one.numel_in} elements" for rank, one in sorted(here.items())[:4]),
        advice=("Compare what these ranks call, and the sizes they pass.", COLLECT),
    )
    return finding, ()


def _ambiguous(fronts: Fronts) -> bool:
    """Say whether one name stands for several groups: the same rank of a group on several global ranks."""
    ranks = [one.timeout.group_rank for one in fronts.values() if one.progress is None] + [
        one.progress.group_rank for one in fronts.values() if one.progress is not None
    ]
    return len(ranks) != len(set(ranks))


def _out_of_step(key: Key, fronts: Fronts) -> tuple[Finding, tuple[str, ...]] | None:
    positions: dict[int, Hashable] = {rank: one.timeout.seq for rank, one in fronts.items()}
    if key is None or len(set(positions.values())) == 1:
        return None
    culprits = odd_ones(positions)
    if len(culprits) == len(positions) or _ambiguous(fronts):
        return _nobody(key, fronts, (), "the ranks stand at different positions, and none of these is the majority's")
    waiting = tuple(rank for rank in sorted(fronts) if rank not in culprits)
    usual, group = _usual(fronts), _group(key, set(fronts))
    at = ", ".join(f"#{seq}" for seq in sorted({fronts[rank].timeout.seq for rank in culprits}))
    finding = Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(culprits)} stands at {at} of {group_words(group)}; "
        f"{wait_words(waiting)} in {operation(usual.op) or usual.op} #{usual.seq}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.5,
        group=group,
        op=operation(usual.op),
        seq=usual.seq,
        evidence=tuple(f"rank {rank}: {fronts[rank].timeout.op} #{fronts[rank].timeout.seq}" for rank in culprits[:3]),
        advice=("Look for a collective that only some ranks make.", COLLECT),
    )
    return finding, ()


def _silent(job: Job, key: Key, fronts: Fronts, groups: dict[Key, Fronts]) -> tuple[Finding, tuple[str, ...]]:
    """Accuse the members that reported nothing, where it is known who they are and they are few."""
    usual, group = _usual(fronts), _group(key, set(fronts))
    if not _is_prefix(key, fronts):
        reason = f"the members of {group_words(group)} are not in the log"
        return _nobody(key, fronts, (), reason)
    size, certain = _size(job, fronts)
    elsewhere = {rank for other in groups.values() for rank in other} - set(fronts)
    missing = set(range(size)) - set(fronts)
    culprits = tuple(sorted(missing - elsewhere))
    op = operation(usual.op) or usual.op
    where = f" of {group_words(group)}" if group else ""
    if not missing and certain and len(fronts) > 1:
        return _all_in(key, fronts), ("whether the network, a device or the library is at fault",)
    if not culprits or not size or len(missing) > len(fronts):
        count = f"{len(fronts)} of {size} ranks" if size and certain else f"only {rank_list(sorted(fronts))}"
        return _nobody(key, fronts, (), f"{count} reported; the others are silent")
    facts = [f"{rank_list(culprits)} reported nothing, {rank_list(sorted(fronts))} did", *_outstanding(fronts)]
    facts += [note.text[:160] for note in job.notes("trace-cache")[:1]]
    facts += [f"the log also says: {hint.type}: {hint.message[:120]}" for hint in job.hints[:1]]
    seen = bool(set(culprits) & job.facts.ranks_named)
    finding = Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(culprits)} did not come to {op} #{usual.seq}{where}; {wait_words(sorted(fronts))}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(fronts)),
        confidence=round((0.5 if len(culprits) == 1 else 0.4) + 0.1 * (seen and certain), 2),
        group=group,
        op=operation(usual.op),
        seq=usual.seq,
        call_sites=job.sites(sorted(fronts)),
        evidence=tuple(facts),
        advice=("Look at what these ranks did last: saving, evaluation, a shorter input, an early return.", COLLECT),
    )
    return finding, ("whether the silent ranks skipped the operation, were stuck before it, or inside its call",)


def _is_prefix(key: Key, fronts: Fronts) -> bool:
    """Say whether the group's members are the ranks from 0 on: then ranks of the group are global ranks."""
    if key is None or key[1] == "default_pg" or (key[0] == "0" and not key[1]):
        return True
    return all(one.progress is not None and one.progress.group_rank == rank for rank, one in fronts.items())


def _size(job: Job, fronts: Fronts) -> tuple[int, bool]:
    """Return how many members the group has, 0 where nothing tells, and whether it is certain."""
    least = max(fronts) + 1
    ratios = set()
    for one in fronts.values():
        big, small = max(one.timeout.numel_in or 0, one.timeout.numel_out or 0), one.timeout.numel_in or 0
        if operation(one.timeout.op) == "reduce_scatter":
            small = one.timeout.numel_out or 0
        if operation(one.timeout.op) in ("all_gather", "reduce_scatter") and small and big % small == 0:
            ratios.add(big // small)
    if len(ratios) == 1 and (size := ratios.pop()) >= least:
        return size, True
    if job.facts.world_size >= least:
        return job.facts.world_size, True
    if job.has_table:
        return max(least, len(job.known)), True
    # Whole machines: any other number of ranks hints at higher ones that are silent, too.
    plausible = max(least, len(job.known))
    return (plausible if plausible in (2, 4) or plausible % 8 == 0 else 0), False


def _all_in(key: Key, fronts: Fronts) -> Finding:
    usual, group = _usual(fronts), _group(key, set(fronts))
    return Finding(
        kind="backend-stall",
        summary=f"All {len(fronts)} ranks are in {operation(usual.op) or usual.op} #{usual.seq} and it does not end.",
        culprit_ranks=(),
        waiting_ranks=tuple(sorted(fronts)),
        confidence=0.5,
        group=group,
        op=operation(usual.op),
        seq=usual.seq,
        evidence=("operation, position and size agree on every rank", *_outstanding(fronts)),
        advice=("Look at the network between the hosts and at NCCL's own log (NCCL_DEBUG=INFO).", COLLECT),
    )
