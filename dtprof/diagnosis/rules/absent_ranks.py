"""Nobody ended and nobody went another way: a rank does not come, or an operation does not end."""

from collections.abc import Mapping
from dataclasses import replace

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.job_state import Evidence, Operation, RankEvidence
from dtprof.diagnosis.rules.rank_deaths import STOPPED, call_sites, seen_at
from dtprof.diagnosis.rules.skipped_collectives import Front
from dtprof.diagnosis.wait_graph import Wait
from dtprof.records import events

PASSING_NS = 1_000_000_000
"""An operation that all came to less than this before they were stopped is none that does not end."""
FROZEN = ("stopped", "disk-sleep", "tracing-stop")
"""States in which a process does nothing, whatever comes."""
LONG_PHASES = {
    events.CHECKPOINT: "Let it finish, or make the others not wait for it: save asynchronously, or raise the timeout.",
    events.EVALUATION: "Let it finish, or have all ranks evaluate a part each, so that none waits.",
    events.COMPILE: "Let it finish; a cache of compiled code that lasts (TORCHINDUCTOR_CACHE_DIR) spares the next job.",
}
"""What may rightly take long while others wait, and what to do about it; an evaluation where the rank works."""


def find_absent(evidence: Evidence, waits: dict[int, tuple[Wait, ...]]) -> Finding | None:
    """Return the finding for a rank that others wait for and that nothing holds up."""
    for wait in sorted((w for own in waits.values() for w in own), key=lambda w: w.operation.issued_ns):
        idle = [
            evidence.ranks[r]
            for r in wait.awaited
            if r in evidence.ranks and r not in waits and not evidence.ranks[r].finished
        ]
        if idle and not wait.any_of_them:
            return _absent_in_operation(evidence, wait.operation, waits, idle)
    return None


def _absent_in_operation(
    evidence: Evidence, op: Operation, waits: dict[int, tuple[Wait, ...]], absent: list[RankEvidence]
) -> Finding:
    group = evidence.group(op.group)
    waiting = tuple(sorted(waits))
    here = tuple(
        rank
        for rank in waiting
        if any((w.operation.group, w.operation.seq, w.operation.p2p) == (op.group, op.seq, op.p2p) for w in waits[rank])
    )
    return replace(
        _absent_finding(absent, here, f"{op.op} #{op.seq} of {group_words(group)}"),
        waiting_ranks=waiting,
        group=group,
        op=op.op,
        seq=op.seq,
        step=op.step,
        call_sites=call_sites({rank: own[0].operation for rank, own in waits.items()}),
    )


def _absent_finding(absent: list[RankEvidence], waiting: tuple[int, ...], place: str) -> Finding:
    culprits = tuple(sorted(rank.rank for rank in absent))
    sites = {rank.rank: site for rank in absent if (site := rank.place) is not None}
    first = min(absent, key=lambda rank: rank.rank)
    kind, words, advice, confidence = _what_it_does(first)
    words = words if len(absent) == 1 else words.replace("is ", "are ", 1).replace("does not", "do not")
    return Finding(
        kind=kind,
        severity="warning" if kind == "long-operation" else "error",
        summary=f"{capitalised(culprits)} {words}{seen_at(first)}; {wait_words(waiting)}"
        f" for {'it' if len(absent) == 1 else 'them'} in {place}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=confidence,
        culprit_call_sites=sites,
        evidence=tuple(f"rank {rank.rank}: {_seen(rank)}" for rank in absent[:8]),
        advice=(advice,),
        in_first_step=all(_works(rank) and rank.steps == 0 and bool(rank.open_phases) for rank in absent),
    )


def _what_it_does(rank: RankEvidence) -> tuple[str, str, str, float]:
    stack = rank.stack
    if frozen := _frozen_words(rank):
        return "rank-frozen", f"is {frozen}", "Find out who stopped the process.", 0.95
    for phase, advice in LONG_PHASES.items():
        if phase in rank.open_phases and (phase != events.EVALUATION or _works(rank)):
            return "long-operation", f"is in a long {phase}", advice, 0.8
    if _works(rank):
        return "rank-stuck", "is busy outside any collective and does not come", "Look at the line it runs.", 0.75
    seen = rank.interruption is not None or (stack is not None and bool(stack.frames))
    return (
        "rank-stuck",
        "is stuck outside any collective",
        "Look at the line it is at: input, a lock, a file, a queue.",
        0.9 if seen else 0.6,
    )


def _works(rank: RankEvidence) -> bool:
    return rank.stack is not None and rank.stack.is_busy


def _seen(rank: RankEvidence) -> str:
    stack = rank.stack
    phases = f" in phase {rank.open_phases[-1]}" if rank.open_phases else ""
    if stack is None and rank.interruption is not None:
        return f"Ctrl-C (SIGINT) found it{at_line(rank.interruption.frame) or ' at an unknown line'}{phases}"
    if stack is None:
        return f"no stack was taken; its last record is{at_line(rank.last_site) or ' at an unknown line'}{phases}"
    if not stack.frames:
        return f"process state {stack.state}{phases}; {stack.reason}"
    path = " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in stack.frames[:4])
    share = "" if stack.cpu_share is None else f", {stack.cpu_share:.0%} of a core"
    return f"process state {stack.state}{share}{phases}; stack: {path}"


def find_never_joined(evidence: Evidence) -> Finding | None:
    """Return the finding for ranks that do not come while the others wait in init_process_group."""
    waiting = tuple(sorted(rank.rank for rank in evidence.ranks.values() if rank.in_init))
    if not waiting:
        return None
    sites = {r: site for r in waiting if (site := evidence.ranks[r].last_site) is not None}
    if evidence.missing:
        found = _without_record(evidence, waiting)
    else:
        absent = [rank for rank in evidence.ranks.values() if not (rank.in_init or rank.blocking or rank.exceptions)]
        if not absent:
            return None
        gone = [rank for rank in absent if rank.finished]
        found = _gone(gone, waiting) if gone else _elsewhere(absent, waiting)
    return replace(found, call_sites=sites)


def _without_record(evidence: Evidence, waiting: tuple[int, ...]) -> Finding:
    """Tell of ranks without a record; of those whose processes were seen, what these do instead of joining."""
    seen = [evidence.starting[rank] for rank in evidence.missing if rank in evidence.starting]
    whose = f"{capitalised(evidence.missing)} of {evidence.world_size}"
    summary, confidence = f"{whose} never joined", 0.8
    advice = "Check that every rank was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."
    if seen and len(seen) == len(evidence.missing):
        does = "busy" if _works(seen[0]) else _frozen_words(seen[0]) or "held up"
        who = "it" if len(seen) == 1 else f"rank {seen[0].rank}"
        summary = f"{whose} started and did not join: {who} is {does}{seen_at(seen[0])}"
        advice, confidence = "Look at the line it is at: what comes before init_process_group.", 0.9
    unseen = [rank for rank in evidence.missing if rank not in evidence.starting]
    return Finding(
        kind="rank-never-joined",
        summary=f"{summary}; {wait_words(waiting)} in init_process_group.",
        culprit_ranks=evidence.missing,
        waiting_ranks=waiting,
        confidence=confidence,
        culprit_call_sites={rank.rank: site for rank in seen if (site := rank.place) is not None},
        evidence=(
            *(f"rank {rank.rank} (process {rank.pid}): {_seen(rank)}" for rank in seen[:8]),
            *([f"{rank_list(unseen) if seen else 'they'} left no record at all"] if unseen else []),
        ),
        advice=(advice,),
        in_first_step=bool(seen) and not unseen and all(_works(rank) or _reads(rank) for rank in seen),
    )


def _reads(rank: RankEvidence) -> bool:
    """Say whether it waits for a disk, as a process does that loads libraries."""
    return rank.stack is not None and rank.stack.state == "disk-sleep"


def _frozen_words(rank: RankEvidence) -> str:
    stack = rank.stack
    return f"frozen (process state {stack.state})" if stack is not None and stack.state in FROZEN else ""


def _gone(gone: list[RankEvidence], waiting: tuple[int, ...]) -> Finding:
    culprits = tuple(sorted(rank.rank for rank in gone))
    return Finding(
        kind="rank-exited",
        summary=f"{capitalised(culprits)} ended; {wait_words(waiting)} for {'it' if len(gone) == 1 else 'them'} in "
        "init_process_group.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        confidence=0.85,
        culprit_call_sites={rank.rank: site for rank in gone if (site := rank.place) is not None},
        evidence=tuple(f"rank {rank.rank}: the program ended in order" for rank in gone[:8]),
        advice=("Make every rank call init_process_group as often as the others.",),
    )


def _elsewhere(absent: list[RankEvidence], waiting: tuple[int, ...]) -> Finding:
    found = _absent_finding(absent, waiting, "init_process_group")
    if not all(rank.groups for rank in absent):
        return found
    # Seen on gloo, torch 2.13: docs/explanation/measurements/stress.md.
    held = (
        "A group that a rank had before may hang in its end, where a DDP module outlives it: let go of modules before "
        "destroy_process_group."
    )
    return replace(found, advice=(*found.advice, held))


def _was_passing(evidence: Evidence, members: Mapping[int, Operation]) -> bool:
    """Say whether the ranks were stopped from outside so soon after they had come that they may well have gone on."""
    newest_ns = max(operation.issued_ns for operation in members.values())
    ends = [evidence.ranks[rank].exit for rank in members if evidence.ranks[rank].stopped_politely]
    return len(ends) == len(members) and all(end is not None and end.t_ns < newest_ns + PASSING_NS for end in ends)


def find_backend_stall(evidence: Evidence, fronts: list[Front]) -> Finding | None:
    """Return the finding for an operation that every member came to, alike, and that does not end, or ended in errors.

    The errors are those of connections, on ranks that all lived: nobody sent the job a signal, and nobody left.
    """
    for front in fronts:
        members = {**front.waiting, **front.elsewhere}
        if len(members) < len(front.group.ranks) or len(members) < 2 or front.absent:
            continue
        failed = {rank: operation for rank, operation in members.items() if operation.failed}
        if failed and (
            evidence.manifest.exit_status in STOPPED
            or any(evidence.ranks[rank].transport_exception is None for rank in failed)
        ):
            continue
        if not failed and (front.elsewhere or _was_passing(evidence, members)):
            continue
        op = next(iter(front.waiting.values()))
        group = evidence.group(front.group)
        end = f"it failed on {rank_list(tuple(failed))}" if failed else "it does not end"
        errors = [error for rank in failed if (error := evidence.ranks[rank].transport_exception) is not None]
        return Finding(
            kind="backend-stall",
            summary=f"All {len(members)} members of {group_words(group)} came to {op.op} #{op.seq} and {end}.",
            culprit_ranks=(),
            waiting_ranks=tuple(sorted(front.waiting)),
            confidence=0.5 if failed else 0.7,
            group=group,
            op=op.op,
            seq=op.seq,
            step=op.step,
            call_sites=call_sites(front.waiting),
            evidence=(
                "operation and arguments agree on every member",
                *(f"{error.type}: {' '.join(error.message.split())[:200]}" for error in errors[:1]),
            ),
            advice=("Look at the network between the members' hosts and at the back end's own log.",),
        )
    return None
