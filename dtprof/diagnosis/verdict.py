"""The rules in order, and the outcome."""

from dataclasses import replace

from dtprof.analysis.rank_exits import NO_EXIT_RECORD
from dtprof.diagnosis.absent_ranks import FROZEN
from dtprof.diagnosis.blocked_ranks import operation_words
from dtprof.diagnosis.explained_waits import (
    find_explained,
    find_independent_crashes,
    find_unexplained_waits,
)
from dtprof.diagnosis.findings import Finding, Verdict, at_line, rank_list, wait_words
from dtprof.diagnosis.job_state import JobState, Operation, RankState, Stop
from dtprof.diagnosis.open_collectives import OpenCollective, find_open_collectives
from dtprof.diagnosis.rank_failures import NATIVE_CRASHES, STOPPED
from dtprof.diagnosis.rules import rank_crashed, rank_exited, rank_killed
from dtprof.diagnosis.rules.argument_mismatch import find_blocking_mismatch, find_mismatches
from dtprof.diagnosis.rules.backend_stall import find_backend_stall
from dtprof.diagnosis.rules.collective_in_except import find_handled
from dtprof.diagnosis.rules.device_stall import find_device_stall
from dtprof.diagnosis.rules.group_creation_mismatch import find_creation_mismatch, find_creation_risk
from dtprof.diagnosis.rules.group_order_inversion import find_group_cycle, find_issue_inversion
from dtprof.diagnosis.rules.group_order_risk import find_order_risk
from dtprof.diagnosis.rules.long_operation import find_long_operations
from dtprof.diagnosis.rules.p2p_deadlock_cycle import find_message_cycle
from dtprof.diagnosis.rules.p2p_size_mismatch import find_broken_message, find_odd_sizes
from dtprof.diagnosis.rules.p2p_tag_mismatch import find_other_tag
from dtprof.diagnosis.rules.p2p_unmatched import find_unmatched
from dtprof.diagnosis.rules.pipeline_schedule_mismatch import find_other_plans, find_pipeline_mismatch
from dtprof.diagnosis.rules.rank_never_came import find_never_came
from dtprof.diagnosis.rules.rank_never_joined import find_never_joined
from dtprof.diagnosis.rules.rank_skipped_collective import find_skip
from dtprof.diagnosis.rules.rank_stuck import find_absent
from dtprof.diagnosis.rules.shared_group import find_shared_groups
from dtprof.diagnosis.rules.slow_rank import find_slow_ranks
from dtprof.diagnosis.rules.step_mismatch import find_shift, find_skipped_round
from dtprof.diagnosis.rules.thread_order import find_thread_order
from dtprof.diagnosis.rules.unequal_timeouts import find_short_timeouts, find_unequal_timeouts
from dtprof.diagnosis.rules.uneven_inputs import find_uneven_inputs
from dtprof.diagnosis.rules.unwaited_async import find_dropped_receives, find_unwaited
from dtprof.diagnosis.rules.wrong_group import find_wrong_handle
from dtprof.diagnosis.wait_graph import Wait, find_cycle, find_waits
from dtprof.job.stalls import SLOW_AFTER_NS, Progress

CRASHES = {"rank-crashed", "rank-killed"}
MAX_AT_REST = 4
SLOW = {"slow-rank", "long-operation"}
WAITS = {"rank-stuck", "rank-never-joined", "backend-stall"} | SLOW
"""Findings that only waiting shows, which may yet end; others are faults whatever happens."""


def decide(job: JobState, source: tuple[str, ...]) -> Verdict:
    """Return the verdict: what ended or holds up the job, else what may in a job that goes well."""
    findings, unexplained = _find_causes(job)
    if findings:
        cause = findings[0]
        if rank_killed.is_late(job, cause):
            findings = _find_reason(job, cause)
        elif cause.kind == "rank-crashed":
            findings += [finding for finding in find_mismatches(job) if not finding.waiting_ranks]
    elif job.stalled or not job.ranks:
        findings = []
    else:
        findings = _find_risks(job)
    outcome, reasons = _outcome(job, findings)
    if outcome == "hang" and job.progress is not None and job.progress.state == Progress.SLOW:
        # Before the stall threshold no view calls it a hang; findings are reported all the same.
        outcome = "slow" if {finding.kind for finding in findings} <= WAITS else "risk"
        reasons = (*reasons, job.progress.words)
    if job.at_rest_s is not None:
        outcome = "unknown" if outcome == "healthy" else outcome
        reasons = (*(reasons if job.stop is None else ()), _rest_words(job, job.at_rest_s))
    return Verdict(
        outcome=outcome,
        source=source,
        ranks_seen=tuple(sorted(job.ranks)),
        ranks_missing=job.missing,
        findings=tuple(findings),
        cannot_tell=(*reasons, *job.problems, *_words_on_lost(job, findings), *_words_on_unexplained(job, unexplained)),
    )


def _find_causes(job: JobState) -> tuple[list[Finding], dict[int, Operation]]:
    """Return a finding for each independent fault, and what ranks wait in that none of them explains.

    What waits for a rank of a finding is a consequence of it. What the first cause leaves unexplained is looked at
    again, without the ranks that it explains.
    """
    causes: list[tuple[Finding, set[int]]] = []
    rest, unexplained, to_explain = job, dict[int, Operation](), set(job.ranks)
    while (cause := _first_cause(rest)) is not None:
        named = {*cause.culprit_ranks, *cause.waiting_ranks}
        explained = find_explained(rest, cause) & rest.ranks.keys()
        if causes and not (explained and named & to_explain):
            break
        causes.append((cause, explained))
        rest = rest.without(explained.union(cause.culprit_ranks))
        unexplained = find_unexplained_waits(rest)
        to_explain = set(unexplained) | find_independent_crashes(rest, causes[0][0], job)
        if not to_explain:
            break
    if len(causes) == 1:
        return [causes[0][0]], unexplained
    return [_limit(cause, explained) for cause, explained in causes], unexplained


def _limit(cause: Finding, explained: set[int]) -> Finding:
    """Return a finding with the waiting ranks that it explains only: others wait for another cause."""
    return replace(
        cause,
        waiting_ranks=tuple(rank for rank in cause.waiting_ranks if rank in explained),
        call_sites={rank: site for rank, site in cause.call_sites.items() if rank in explained},
    )


def _words_on_unexplained(job: JobState, unexplained: dict[int, Operation]) -> tuple[str, ...]:
    """Say for each operation who waits in it, where no finding explains why."""
    places: dict[str, list[int]] = {}
    for rank, operation in unexplained.items():
        places.setdefault(operation_words(job, operation), []).append(rank)
    return tuple(f"{wait_words(ranks)} in {words}, and no finding explains it" for words, ranks in places.items())


def _words_on_lost(job: JobState, findings: list[Finding]) -> tuple[str, ...]:
    lost = [rank for rank in job.lost if all(rank not in finding.culprit_ranks for finding in findings)]
    return (
        (
            f"{rank_list(lost)} left no {job.evidence_name}: ended, killed, or not given here; what "
            f"{'they' if len(lost) > 1 else 'it'} did is not known",
        )
        if lost
        else ()
    )


def _rest_words(job: JobState, at_rest_s: float) -> str:
    ended = job.stop is not None
    return (
        f"{f'{_stopped(job.stop)} after ' if ended else ''}"
        f"nothing was recorded for {at_rest_s:.0f} s and every rank {'slept' if ended else 'sleeps'} outside any "
        f"collective: {_places(job)}. They {'waited' if ended else 'wait'} for input, a file, a lock or another "
        f"process{'' if ended else ', which may yet come'}"
    )


def _places(job: JobState) -> str:
    """Say where ranks are, or were at their end."""
    ranks = sorted(job.ranks.values(), key=lambda rank: rank.rank)
    shown = "; ".join(f"rank {rank.rank}{_rest_place(rank)}" for rank in ranks[:MAX_AT_REST])
    return shown + (f"; and {len(ranks) - MAX_AT_REST} more" if len(ranks) > MAX_AT_REST else "")


def _rest_place(rank: RankState) -> str:
    state = rank.stack.state if rank.stack is not None else ""
    frozen = f" (process state {state})" if state in FROZEN else ""
    return f"{at_line(rank.place) or ' at an unknown line'}{frozen}"


def _find_reason(job: JobState, late: Finding) -> list[Finding]:
    """Return why a rank died when its program had ended: back ends abort where operations are still going on."""
    dropped = [finding for finding in find_unwaited(job) if set(late.culprit_ranks) <= set(finding.culprit_ranks)]
    if not dropped:
        return [late]
    return [replace(dropped[0], evidence=(*dropped[0].evidence, late.summary)), *dropped[1:]]


def _first_cause(job: JobState) -> Finding | None:
    death = rank_crashed.find_crash(job) or rank_killed.find_killed(job)
    if death is not None and not rank_killed.died_in_operation(job, death):
        other = find_other_plans(job)
        return death if other is None else replace(other, evidence=(*other.evidence, death.summary))
    exited = rank_exited.find_exited(job)
    if death is None and exited is None and not job.stalled:
        return None if _ended_well(job) else rank_killed.find_late_death(job) or _find_left_alone(job)
    open_collectives = find_open_collectives(job)
    divergence = _find_divergence(job, open_collectives)
    if death is not None:
        divergence = divergence or find_broken_message(job)
        # A back end may abort the process that receives what does not fit: then the end is a consequence.
        return death if divergence is None else replace(divergence, evidence=(*divergence.evidence, death.summary))
    cause = divergence or _find_held_up(job, exited, open_collectives) or rank_killed.find_late_death(job)
    cause = cause or _find_left_alone(job)
    return find_uneven_inputs(job, cause) if cause is not None else None


def _find_left_alone(job: JobState) -> Finding | None:
    """Find a rank that left, and why, where no operation is known to have failed."""
    left = rank_exited.find_left_alone(job)
    if left is None:
        return None
    skipped = find_skipped_round(job)
    divergence = skipped if skipped is not None and skipped.culprit_ranks == left.culprit_ranks else left
    return find_uneven_inputs(job, divergence)


def _find_divergence(job: JobState, open_collectives: list[OpenCollective]) -> Finding | None:
    """Find the place where the programs of ranks went different ways."""
    return (
        find_pipeline_mismatch(job)
        or find_creation_mismatch(job)
        or find_skip(job, open_collectives)
        or find_shift(job)
        or find_skipped_round(job)
        or _find_mismatch(job, open_collectives)
    )


def _find_mismatch(job: JobState, open_collectives: list[OpenCollective]) -> Finding | None:
    """Find calls that do not go together: made with the arguments of another group, or on the wrong group."""
    mismatch = _find_mismatch_before(job, open_collectives) or find_blocking_mismatch(
        job, [(collective.group, collective.seq) for collective in open_collectives]
    )
    wrong = find_wrong_handle(job) if mismatch is not None else None
    return (
        mismatch if wrong is None or mismatch is None else replace(wrong, evidence=(*wrong.evidence, mismatch.summary))
    )


def _find_mismatch_before(job: JobState, open_collectives: list[OpenCollective]) -> Finding | None:
    """Find a mismatch that came before what does not end: devices compare nothing, and hang or diverge later."""
    if not any(operation.on_device for rank in job.ranks.values() for operation in rank.open_operations):
        return None
    stuck = {job.group(collective.group).name: collective for collective in open_collectives}
    mismatches = find_mismatches(job)
    if not mismatches:
        return None

    def name_of(finding: Finding) -> str:
        return finding.group.name if finding.group is not None else ""

    first, *others = sorted(mismatches, key=lambda f: (name_of(f) not in stuck, -f.confidence))
    held_up = stuck[name_of(first)].waiting if name_of(first) in stuck else {}
    return replace(
        first,
        waiting_ranks=tuple(sorted(set(held_up) - set(first.culprit_ranks))),
        evidence=(*first.evidence, *(finding.summary for finding in others[:3])),
    )


def _find_held_up(job: JobState, exited: Finding | None, open_collectives: list[OpenCollective]) -> Finding | None:
    """Find out from who waits for whom."""
    waits = find_waits(job)
    cycle = find_cycle(waits)
    messages = _find_message_fault(job, waits, cycle)
    if exited is not None and (messages is None or not _is_first_message(waits, exited)):
        return exited
    return (
        find_absent(job, waits)
        or find_never_came(job, waits)
        or messages
        or find_group_cycle(job, waits, cycle)
        or find_never_joined(job)
        or find_issue_inversion(job, open_collectives)
        or find_device_stall(job, open_collectives)
        or _find_stall(job, open_collectives)
    )


def _find_message_fault(job: JobState, waits: dict[int, tuple[Wait, ...]], cycle: tuple[int, ...]) -> Finding | None:
    """Find the messages that hold the job up."""
    unmet = [wait for own in waits.values() for wait in own if wait.operation.p2p and wait.awaited]
    unmet.sort(key=lambda wait: wait.operation.issued_ns)
    return (
        find_other_tag(job, unmet)
        or find_message_cycle(job, waits, cycle)
        or find_broken_message(job)
        or find_unmatched(job, unmet, waits)
    )


def _find_stall(job: JobState, open_collectives: list[OpenCollective]) -> Finding | None:
    """Find an operation that all entered and that does not complete; if receives were dropped before, these are why."""
    stall = find_backend_stall(job, open_collectives)
    dropped = find_dropped_receives(job) if stall is not None else []
    if stall is None or not dropped:
        return stall
    return replace(dropped[0], waiting_ranks=stall.waiting_ranks, evidence=(*dropped[0].evidence, stall.summary))


def _is_first_message(waits: dict[int, tuple[Wait, ...]], exited: Finding) -> bool:
    """Say whether ranks wait for those that left only in messages such as had never gone between them before.

    Then the program never was to send them; after others, the rank left too early.
    """
    held_up = [w.operation for own in waits.values() for w in own if set(w.awaited) & set(exited.culprit_ranks)]
    return bool(held_up) and all(operation.p2p and operation.nth == 0 for operation in held_up)


def _ended_well(job: JobState) -> bool:
    return job.manifest.exit_status in (None, 0)


def _find_risks(job: JobState) -> list[Finding]:
    """Find what is wrong, or may go wrong, in a job that ended in order or goes on."""
    crossed = find_thread_order(job)
    shift = crossed or find_shift(job)
    wrong = [shift] if shift is not None else find_mismatches(job)
    notes = (*find_unequal_timeouts(job), *find_short_timeouts(job), *find_shared_groups(job))
    return [
        *wrong,
        *find_odd_sizes(job),
        *find_unwaited(job),
        *(finding for finding in find_dropped_receives(job) if job.ranks[finding.culprit_ranks[0]].finished),
        *find_order_risk(job),
        *find_creation_risk(job),
        *find_slow_ranks(job),
        *find_long_operations(job),
        *(note for note in notes if crossed is None or note.group != crossed.group),
        *(note for note in find_handled(job) if all(note.group != finding.group for finding in wrong)),
    ]


def _lost_words(rank: RankState) -> str:
    error = rank.transport_exception
    text = f"{error.type}: {' '.join(error.message.split())[:200]}{at_line(error.frame)}" if error is not None else ""
    return f"rank {rank.rank} lost a peer ({text}), and the records do not show what happened to that one"


def _wait_words(job: JobState) -> str:
    """Say who waits in the operation that was begun first, where one rank's newest records tell."""
    if all(rank.sees_program for rank in job.ranks.values()):
        return "ranks wait"
    open_collectives = find_open_collectives(job)
    if open_collectives:
        waiting = open_collectives[0].waiting
        return f"{wait_words(tuple(sorted(waiting)))} in {operation_words(job, next(iter(waiting.values())))}"
    messages = ((rank.rank, o) for rank in job.ranks.values() for o in rank.open_operations)
    return next((f"rank {rank} waits in {operation_words(job, o)}" for rank, o in messages), "ranks wait")


def _unknown_wait(job: JobState) -> str:
    if job.missing:
        return (
            f"{_wait_words(job)}, perhaps for {rank_list(job.missing)}, of which there is no {job.evidence_name} here: "
            f"{job.how_to_complete}"
        )
    ranks = job.ranks.values()
    if all(rank.in_init for rank in ranks):
        return (
            f"all {len(job.ranks)} ranks wait in init_process_group and none is missing: they do not find each "
            f"other. MASTER_ADDR and MASTER_PORT must be the same for all, and the port not 0. {_places(job)}"
        )
    if any(rank.stack is not None and rank.stack.frames for rank in ranks):
        return f"ranks wait, and the records do not show for whom. {_places(job)}"
    return f"{_wait_words(job)}, and the records do not show for whom: take stacks (py-spy dump) of every rank"


def _stopped(stop: Stop | None) -> str:
    signals = "SIGKILL of all ranks together" if stop is not None and stop.by_kill else "SIGINT or SIGTERM"
    return f"the job was stopped from outside ({signals})"


def _stop_words(job: JobState) -> str:
    stop = job.stop
    if stop is None or stop.quiet_ns <= SLOW_AFTER_NS:
        return f"{_stopped(stop)}; no fault was detected before that"
    return (
        f"{_stopped(stop)} when nothing had been recorded for "
        f"{stop.quiet_ns / 1e9:.0f} s, which is no longer than it may take (a rank once issued nothing for "
        f"{stop.usual_ns / 1e9:.0f} s): it may have stalled. {_places(job)}"
    )


def _was_stopped(job: JobState) -> bool:
    """Say whether the job made progress until somebody stopped it."""
    ranks = job.ranks.values()
    asked = job.manifest.exit_status in STOPPED or any(rank.stopped_politely for rank in ranks)
    return not job.stalled and (job.stop is not None or (asked and not _failed(job)))


def _failed(job: JobState) -> bool:
    """Say whether a rank ended by an exception; one that was interrupted has not, nor one that lost it as its peer."""
    ranks = job.ranks.values()
    interrupted = any(rank.interruption is not None for rank in ranks)
    return any(
        rank.exceptions and rank.interruption is None and not (interrupted and rank.transport_exception is not None)
        for rank in ranks
    )


def _outcome(job: JobState, findings: list[Finding]) -> tuple[str, tuple[str, ...]]:
    faults = [finding for finding in findings if finding.severity != "info"]
    if faults:
        kinds = {finding.kind for finding in faults}
        if kinds <= SLOW:
            return "slow", ()
        went_on = not job.went_wrong or _was_stopped(job)
        if went_on and not kinds & CRASHES and not any(finding.waiting_ranks for finding in faults):
            return "risk", ()
        failed = _failed(job) or any(r.signal_name in NATIVE_CRASHES for r in job.ranks.values())
        is_crash = faults[0].kind in CRASHES or (failed and job.stopped_on_hang_ns is None)
        return ("crash" if is_crash else "hang"), ()
    status = job.manifest.exit_status
    if not job.ranks:
        return "unknown", ("no rank left a record: there is nothing to diagnose",)
    if status not in (None, 0):
        stopped = [rank.rank for rank in job.ranks.values() if rank.stopped_politely]
        lost = [rank for rank in job.ranks.values() if rank.transport_exception is not None]
        if lost and job.stop is None:
            return "unknown", tuple(_lost_words(rank) for rank in lost[:3])
        if job.stop is not None or stopped or status in STOPPED:
            return "unknown", (_stop_words(job),)
        return "unknown", (f"the job ended with exit status {status}, and no record shows why",)
    if job.stalled:
        return "unknown", (_unknown_wait(job),)
    if not job.manifest.ended_realtime_ns and (gone := _without_exit_record(job)):
        return "unknown", (
            f"{rank_list(gone)} {NO_EXIT_RECORD}: killed together with dtprof run, or with the host; "
            "no fault was detected before that",
        )
    return "healthy", ()


def _without_exit_record(job: JobState) -> tuple[int, ...]:
    """Return the ranks that are gone and did not end in order, where none is left."""
    ranks = job.ranks.values()
    gone = tuple(sorted(rank.rank for rank in ranks if rank.alive is False and rank.exit is None and not rank.finished))
    return gone if all(rank.rank in gone or rank.finished for rank in ranks) else ()
