"""The rules in order, and the outcome."""

from dataclasses import replace

from dtprof.analysis.rank_exits import NO_EXIT_RECORD
from dtprof.diagnosis.findings import Finding, Verdict, at_line, rank_list
from dtprof.diagnosis.job_state import Evidence, RankEvidence, Stop
from dtprof.diagnosis.rules import absent_ranks, rank_deaths, skipped_collectives
from dtprof.diagnosis.rules.argument_mismatches import find_blocking_mismatch, find_mismatches
from dtprof.diagnosis.rules.group_order import find_group_cycle, find_order_risk, find_wrong_handle
from dtprof.diagnosis.rules.handled_collectives import find_handled
from dtprof.diagnosis.rules.hazards import find_hazards, find_thread_order
from dtprof.diagnosis.rules.p2p_messages import find_broken_message, find_message_fault, find_odd_sizes
from dtprof.diagnosis.rules.program_mismatches import (
    find_creation_mismatch,
    find_creation_risk,
    find_other_plans,
    find_pipeline_mismatch,
    find_uneven_inputs,
)
from dtprof.diagnosis.rules.shifted_collectives import find_shift, find_skipped_round
from dtprof.diagnosis.rules.slow_ranks import find_long_operations, find_slow_ranks
from dtprof.diagnosis.rules.unwaited_handles import find_dropped_receives, find_unwaited
from dtprof.diagnosis.wait_graph import Wait, find_cycle, find_waits
from dtprof.job.stalls import SLOW_AFTER_NS, Progress

CRASHES = {"rank-crashed", "rank-killed"}
MAX_AT_REST = 4
SLOW = {"slow-rank", "long-operation"}
WAITS = {"rank-stuck", "rank-never-joined", "backend-stall"} | SLOW
"""Findings that only waiting shows, which may yet end; others are faults whatever happens."""


def decide(evidence: Evidence, source: tuple[str, ...]) -> Verdict:
    """Return the verdict: what ended or holds up the job, else what may in a job that goes well."""
    cause = _first_cause(evidence)
    if cause is not None:
        findings = [cause]
        if rank_deaths.is_late(evidence, cause):
            findings = _find_reason(evidence, cause)
        elif cause.kind == "rank-crashed":
            findings += [finding for finding in find_mismatches(evidence) if not finding.waiting_ranks]
    elif evidence.stalled or not evidence.ranks:
        findings = []
    else:
        findings = _find_risks(evidence)
    outcome, reasons = _outcome(evidence, findings)
    if outcome == "hang" and evidence.progress is not None and evidence.progress.state == Progress.SLOW:
        # Before the stall threshold no view calls it a hang; what was found is told all the same.
        outcome = "slow" if {finding.kind for finding in findings} <= WAITS else "risk"
        reasons = (*reasons, evidence.progress.words)
    if evidence.at_rest_s is not None:
        outcome = "unknown" if outcome == "healthy" else outcome
        reasons = (*(reasons if evidence.stop is None else ()), _rest_words(evidence, evidence.at_rest_s))
    return Verdict(
        outcome=outcome,
        source=source,
        ranks_seen=tuple(sorted(evidence.ranks)),
        ranks_missing=evidence.missing,
        findings=tuple(findings),
        cannot_tell=(*reasons, *evidence.problems),
    )


def _rest_words(evidence: Evidence, at_rest_s: float) -> str:
    ended = evidence.stop is not None
    return (
        f"{f'{_stopped(evidence.stop)} after ' if ended else ''}"
        f"nothing was recorded for {at_rest_s:.0f} s and every rank {'slept' if ended else 'sleeps'} outside any "
        f"collective: {_places(evidence)}. They {'waited' if ended else 'wait'} for input, a file, a lock or another "
        f"process{'' if ended else ', which may yet come'}"
    )


def _places(evidence: Evidence) -> str:
    """Say where ranks are, or were at their end."""
    ranks = sorted(evidence.ranks.values(), key=lambda rank: rank.rank)
    shown = "; ".join(f"rank {rank.rank}{_rest_place(rank)}" for rank in ranks[:MAX_AT_REST])
    return shown + (f"; and {len(ranks) - MAX_AT_REST} more" if len(ranks) > MAX_AT_REST else "")


def _rest_place(rank: RankEvidence) -> str:
    state = rank.stack.state if rank.stack is not None else ""
    frozen = f" (process state {state})" if state in absent_ranks.FROZEN else ""
    return f"{at_line(rank.place) or ' at an unknown line'}{frozen}"


def _find_reason(evidence: Evidence, late: Finding) -> list[Finding]:
    """Return why a rank died when its program had ended: back ends abort where operations are still going on."""
    dropped = [finding for finding in find_unwaited(evidence) if set(late.culprit_ranks) <= set(finding.culprit_ranks)]
    if not dropped:
        return [late]
    return [replace(dropped[0], evidence=(*dropped[0].evidence, late.summary)), *dropped[1:]]


def _first_cause(evidence: Evidence) -> Finding | None:
    death = rank_deaths.find_death(evidence)
    if death is not None and not rank_deaths.died_in_operation(evidence, death):
        other = find_other_plans(evidence)
        return death if other is None else replace(other, evidence=(*other.evidence, death.summary))
    exited = rank_deaths.find_exited(evidence)
    if death is None and exited is None and not evidence.stalled:
        return None if _ended_well(evidence) else rank_deaths.find_late_death(evidence) or _find_left_alone(evidence)
    fronts = skipped_collectives.find_fronts(evidence)
    parted = _find_parted(evidence, fronts)
    if death is not None:
        parted = parted or find_broken_message(evidence)
        # A back end may abort the process that receives what does not fit: then the end is a consequence.
        return death if parted is None else replace(parted, evidence=(*parted.evidence, death.summary))
    cause = parted or _find_held_up(evidence, exited, fronts) or rank_deaths.find_late_death(evidence)
    cause = cause or _find_left_alone(evidence)
    return find_uneven_inputs(evidence, cause) if cause is not None else None


def _find_left_alone(evidence: Evidence) -> Finding | None:
    """Find a rank that left, and why, where no operation is known to have failed."""
    left = rank_deaths.find_left_alone(evidence)
    if left is None:
        return None
    skipped = find_skipped_round(evidence)
    parted = skipped if skipped is not None and skipped.culprit_ranks == left.culprit_ranks else left
    return find_uneven_inputs(evidence, parted)


def _find_parted(evidence: Evidence, fronts: list[skipped_collectives.Front]) -> Finding | None:
    """Find the place where the programs of ranks went different ways."""
    return (
        find_pipeline_mismatch(evidence)
        or find_creation_mismatch(evidence)
        or skipped_collectives.find_skip(evidence, fronts)
        or find_shift(evidence)
        or find_skipped_round(evidence)
        or _find_mismatch(evidence, fronts)
    )


def _find_mismatch(evidence: Evidence, fronts: list[skipped_collectives.Front]) -> Finding | None:
    """Find calls that do not go together: made with the arguments of another group, or on the wrong group."""
    mismatch = find_blocking_mismatch(evidence, [(front.group, front.seq) for front in fronts])
    wrong = find_wrong_handle(evidence) if mismatch is not None else None
    return (
        mismatch if wrong is None or mismatch is None else replace(wrong, evidence=(*wrong.evidence, mismatch.summary))
    )


def _find_held_up(
    evidence: Evidence, exited: Finding | None, fronts: list[skipped_collectives.Front]
) -> Finding | None:
    """Find out from who waits for whom."""
    waits = find_waits(evidence)
    cycle = find_cycle(waits)
    messages = find_message_fault(evidence, waits, cycle)
    if exited is not None and (messages is None or not _is_first_message(waits, exited)):
        return exited
    return (
        absent_ranks.find_absent(evidence, waits)
        or messages
        or find_group_cycle(evidence, waits, cycle)
        or absent_ranks.find_never_joined(evidence)
        or _find_stall(evidence, fronts)
    )


def _find_stall(evidence: Evidence, fronts: list[skipped_collectives.Front]) -> Finding | None:
    """Find an operation that all came to and that does not end: after receives that were dropped, because of these."""
    stall = absent_ranks.find_backend_stall(evidence, fronts)
    dropped = find_dropped_receives(evidence) if stall is not None else []
    if stall is None or not dropped:
        return stall
    return replace(dropped[0], waiting_ranks=stall.waiting_ranks, evidence=(*dropped[0].evidence, stall.summary))


def _is_first_message(waits: dict[int, tuple[Wait, ...]], exited: Finding) -> bool:
    """Say whether ranks wait for those that left only in messages such as had never gone between them before.

    Then the program never was to send them; after others, the rank left too early.
    """
    held_up = [w.operation for own in waits.values() for w in own if set(w.awaited) & set(exited.culprit_ranks)]
    return bool(held_up) and all(operation.p2p and operation.nth == 0 for operation in held_up)


def _ended_well(evidence: Evidence) -> bool:
    return evidence.manifest.exit_status in (None, 0)


def _find_risks(evidence: Evidence) -> list[Finding]:
    """Find what is wrong, or may go wrong, in a job that ended in order or goes on."""
    crossed = find_thread_order(evidence)
    shift = crossed or find_shift(evidence)
    wrong = [shift] if shift is not None else find_mismatches(evidence)
    return [
        *wrong,
        *find_odd_sizes(evidence),
        *find_unwaited(evidence),
        *(finding for finding in find_dropped_receives(evidence) if evidence.ranks[finding.culprit_ranks[0]].finished),
        *find_order_risk(evidence),
        *find_creation_risk(evidence),
        *find_slow_ranks(evidence),
        *find_long_operations(evidence),
        *(note for note in find_hazards(evidence) if crossed is None or note.group != crossed.group),
        *(note for note in find_handled(evidence) if all(note.group != finding.group for finding in wrong)),
    ]


def _lost_words(rank: RankEvidence) -> str:
    error = rank.transport_exception
    text = f"{error.type}: {' '.join(error.message.split())[:200]}{at_line(error.frame)}" if error is not None else ""
    return f"rank {rank.rank} lost a peer ({text}), and the records do not show what happened to that one"


def _unknown_wait(evidence: Evidence) -> str:
    if evidence.missing:
        return (
            f"ranks wait, perhaps for {rank_list(evidence.missing)}, of which there is no record here: where other "
            "hosts keep runs of their own, give them all (dtprof diagnose NODE_DIR...)"
        )
    ranks = evidence.ranks.values()
    if all(rank.in_init for rank in ranks):
        return (
            f"all {len(evidence.ranks)} ranks wait in init_process_group and none is missing: they do not find each "
            f"other. MASTER_ADDR and MASTER_PORT must be the same for all, and the port not 0. {_places(evidence)}"
        )
    if any(rank.stack is not None and rank.stack.frames for rank in ranks):
        return f"ranks wait, and the records do not show for whom. {_places(evidence)}"
    return "ranks wait, and the records do not show for whom: take stacks (py-spy dump) of every rank"


def _stopped(stop: Stop | None) -> str:
    signals = "SIGKILL of all ranks together" if stop is not None and stop.by_kill else "SIGINT or SIGTERM"
    return f"the job was stopped from outside ({signals})"


def _stop_words(evidence: Evidence) -> str:
    stop = evidence.stop
    if stop is None or stop.quiet_ns <= SLOW_AFTER_NS:
        return f"{_stopped(stop)}; no fault was detected before that"
    return (
        f"{_stopped(stop)} when nothing had been recorded for "
        f"{stop.quiet_ns / 1e9:.0f} s, which is no longer than it may take (a rank once issued nothing for "
        f"{stop.usual_ns / 1e9:.0f} s): it may have stalled. {_places(evidence)}"
    )


def _was_stopped(evidence: Evidence) -> bool:
    """Say whether the job made progress until somebody stopped it."""
    ranks = evidence.ranks.values()
    asked = evidence.manifest.exit_status in rank_deaths.STOPPED or any(rank.stopped_politely for rank in ranks)
    return not evidence.stalled and (evidence.stop is not None or (asked and not _failed(evidence)))


def _failed(evidence: Evidence) -> bool:
    """Say whether a rank ended by an exception; one that was interrupted has not, nor one that lost it as its peer."""
    ranks = evidence.ranks.values()
    interrupted = any(rank.interruption is not None for rank in ranks)
    return any(
        rank.exceptions and rank.interruption is None and not (interrupted and rank.transport_exception is not None)
        for rank in ranks
    )


def _outcome(evidence: Evidence, findings: list[Finding]) -> tuple[str, tuple[str, ...]]:
    faults = [finding for finding in findings if finding.severity != "info"]
    if faults:
        kinds = {finding.kind for finding in faults}
        if kinds <= SLOW:
            return "slow", ()
        went_on = not evidence.went_wrong or _was_stopped(evidence)
        if went_on and not kinds & CRASHES and not any(finding.waiting_ranks for finding in faults):
            return "risk", ()
        failed = _failed(evidence) or any(r.signal_name in rank_deaths.NATIVE_CRASHES for r in evidence.ranks.values())
        is_crash = faults[0].kind in CRASHES or (failed and evidence.stopped_on_hang_ns is None)
        return ("crash" if is_crash else "hang"), ()
    status = evidence.manifest.exit_status
    if not evidence.ranks:
        return "unknown", ("no rank left a record: there is nothing to diagnose",)
    if status not in (None, 0):
        stopped = [rank.rank for rank in evidence.ranks.values() if rank.stopped_politely]
        lost = [rank for rank in evidence.ranks.values() if rank.transport_exception is not None]
        if lost and evidence.stop is None:
            return "unknown", tuple(_lost_words(rank) for rank in lost[:3])
        if evidence.stop is not None or stopped or status in rank_deaths.STOPPED:
            return "unknown", (_stop_words(evidence),)
        return "unknown", (f"the job ended with exit status {status}, and no record shows why",)
    if evidence.stalled:
        return "unknown", (_unknown_wait(evidence),)
    if not evidence.manifest.ended_realtime_ns and (gone := _gone_without_exit_record(evidence)):
        return "unknown", (
            f"{rank_list(gone)} {NO_EXIT_RECORD}: killed together with dtprof run, or with the host; "
            "no fault was detected before that",
        )
    return "healthy", ()


def _gone_without_exit_record(evidence: Evidence) -> tuple[int, ...]:
    """Return the ranks that are gone and did not end in order, where none is left."""
    ranks = evidence.ranks.values()
    gone = tuple(sorted(rank.rank for rank in ranks if rank.alive is False and rank.exit is None and not rank.finished))
    return gone if all(rank.rank in gone or rank.finished for rank in ranks) else ()
