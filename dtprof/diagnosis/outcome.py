"""The outcome of a job in one word, and the caveats of its diagnosis."""

from collections.abc import Mapping, Sequence

from dtprof.analysis.rank_exits import EndState
from dtprof.diagnosis.absent_ranks import FROZEN
from dtprof.diagnosis.blocked_ranks import operation_words
from dtprof.diagnosis.findings import Finding, at_line, wait_words
from dtprof.diagnosis.job_state import JobState, RankState, Stop
from dtprof.diagnosis.open_collectives import find_open_collectives
from dtprof.diagnosis.rank_failures import NATIVE_CRASHES
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation
from dtprof.job.stalls import SLOW_AFTER_NS, Progress
from dtprof.records.nodes.exit_records import is_stop

CRASHES = {"rank-crashed", "rank-killed"}
SLOW = {"slow-rank", "slow-link", "long-operation"}
WAITS = {"rank-stuck", "rank-never-joined", "backend-stall", "host-silent"} | SLOW
"""Findings that only waiting shows, which may yet end; others are faults whatever happens."""
NAME_THE_RANKS = "Lines carry no rank: next time use torchrun --tee 3 or --log-dir DIR, or srun --label."
MAX_PLACES = 4
"""Ranks whose places a sentence lists."""


def assess_outcome(
    job: JobState, findings: Sequence[Finding], left_open: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Return the outcome, and why it is unknown or milder than the findings alone say.

    Parameters:
        left_open: why rules found nothing.
    """
    outcome, reasons = _outcome(job, findings, left_open)
    if outcome == "hang" and job.progress is not None and job.progress.state == Progress.SLOW:
        # Before the stall threshold no view calls it a hang; findings are reported all the same.
        outcome = "slow" if {finding.kind for finding in findings} <= WAITS else "risk"
        reasons = (*reasons, job.progress.words)
    if job.asleep_s is not None:
        outcome = "unknown" if outcome == "healthy" else outcome
        # Where the ranks slept says more of a stop than how long they were quiet.
        reasons = (*(reasons if job.stop is None else ()), _asleep_words(job, job.asleep_s))
    return outcome, reasons


def words_on_unexplained(job: JobState, unexplained: Mapping[int, Operation]) -> tuple[str, ...]:
    """Say for each operation who waits in it, where no finding explains why."""
    places: dict[str, list[int]] = {}
    for rank, operation in unexplained.items():
        places.setdefault(operation_words(job, operation), []).append(rank)
    return tuple(f"{wait_words(ranks)} in {words}, and no finding explains it" for words, ranks in places.items())


def words_on_source(job: JobState, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Say which files of lines that findings name were changed since: their source tells nothing of what ran."""
    sites = (site for f in findings for site in (*f.call_sites.values(), *f.culprit_call_sites.values()))
    files = dict.fromkeys(site.file for site in sites)
    return tuple(
        f"{file} was changed after the job had started: its lines may be others now, and nothing is read from it"
        for file in files
        if job.was_changed is not None and job.was_changed(file)
    )


def words_on_lost(job: JobState, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Say which ranks left nothing that no finding names."""
    lost = [rank for rank in job.lost if all(rank not in finding.culprit_ranks for finding in findings)]
    return (
        (
            f"{list_ranks(lost)} left no {job.evidence_name}: ended, killed, or not given here; what "
            f"{'they' if len(lost) > 1 else 'it'} did is not known",
        )
        if lost
        else ()
    )


def _outcome(job: JobState, findings: Sequence[Finding], left_open: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    faults = [finding for finding in findings if finding.severity != "info"]
    # A log shows no ranks that go on: whether the job hung follows from the timeouts that it names.
    if faults and job.sources == ("log",):
        hung = job.timed_out is not False or faults[0].kind in ("rank-stuck", "rank-never-joined")
        nobody = not (faults[0].culprit_ranks or faults[0].leaves_open)
        reasons = ("which rank began it is not in the log",) if nobody else ()
        return "hang" if hung and faults[0].kind not in CRASHES else "crash", reasons
    if faults:
        kinds = {finding.kind for finding in faults}
        if kinds <= SLOW:
            return "slow", ()
        # Faults that nobody waits for, in a job that went on, may still hang or spoil a later one.
        went_on = not job.went_wrong or _was_stopped(job)
        # Who waits for something slow goes on.
        is_waited_for = any(finding.waiting_ranks for finding in faults if finding.kind not in SLOW)
        if went_on and not kinds & CRASHES and not is_waited_for:
            return "risk", ()
        failed = _failed(job) or any(r.signal_name in NATIVE_CRASHES for r in job.ranks.values())
        # A job that was stopped because it hung fails, too: that is no crash.
        hung = job.stopped_on_hang_ns is not None or bool(job.timed_out)
        is_crash = faults[0].kind in CRASHES or (failed and not hung)
        return ("crash" if is_crash else "hang"), ()
    status = job.manifest.exit_status
    if job.sources == ("log",) and job.log is not None:
        return ("hang" if job.timed_out else "unknown"), (*left_open, *_log_words(job.log, is_reported=bool(left_open)))
    if not job.ranks:
        ended = f"the command exited with status {status}, and " if status else ""
        return "unknown", (f"{ended}no rank left a record: there is nothing to diagnose",)
    if status not in (None, 0):
        stopped = [rank.rank for rank in job.ranks.values() if rank.stopped_politely]
        lost = [rank for rank in job.ranks.values() if rank.transport_exception is not None]
        if lost and job.stop is None:
            return "unknown", tuple(_lost_words(rank) for rank in lost[:3])
        if job.stop is not None or stopped or is_stop(status):
            return "unknown", (_stop_words(job),)
        return "unknown", (f"the job ended with exit status {status}, and no record shows why",)
    if job.stalled:
        return "unknown", (_unknown_wait(job),)
    # The launcher has recorded no end either, so nobody saw how these ranks exited.
    if not job.manifest.ended_realtime_ns and (gone := _without_exit_record(job)):
        return "unknown", (
            f"{list_ranks(gone)} {EndState.NO_RECORD.value}: killed together with dtprof run, or with the host; "
            "no fault was detected before that",
        )
    return "healthy", ()


def _log_words(job: LoggedJob, *, is_reported: bool) -> Sequence[str]:
    """Say why a log without a finding tells no cause."""
    reasons: list[str] = []
    stopped = job.notes("stopped")
    if stopped:
        reasons.append(f"the job was stopped from outside, and nothing wrong was seen before: {stopped[0].text[:160]}")
    lost = job.victims_unknown or job.notes("peer-lost", "gloo-timeout")
    if lost and not job.victims:
        reasons.append(f"operations failed because a peer was gone or late, and no line names a rank. {NAME_THE_RANKS}")
    if job.notes("barrier-reached", "barrier-waits") and not job.victims:
        reasons.append("monitored barriers point at each other: a connection failed or was late")
    if hints := job.hints:
        reasons.append(f"the log says {hints[0].type}: {hints[0].message[:120]}, without a traceback or a rank")
    if reasons or is_reported:
        return reasons
    if failed := [end.rank for end in job.exits.values() if end.status != 0]:
        return [f"{list_ranks(failed)} failed, and no line tells why"]
    if job.notes("failed", "system-error", "native-crash"):
        return ["the job failed, and no line tells why: keep the output of every rank"]
    return ["nothing in the log tells of a failure; a log does not show whether a job that still runs hangs"]


def _was_stopped(job: JobState) -> bool:
    """Say whether the job made progress until somebody stopped it."""
    ranks = job.ranks.values()
    asked = is_stop(job.manifest.exit_status) or any(rank.stopped_politely for rank in ranks)
    return not job.stalled and (job.stop is not None or (asked and not _failed(job)))


def _failed(job: JobState) -> bool:
    """Say whether a rank ended by an exception; one that was interrupted has not, nor one that lost it as its peer."""
    ranks = job.ranks.values()
    interrupted = any(rank.interruption is not None for rank in ranks)
    return any(
        rank.exceptions and rank.interruption is None and not (interrupted and rank.transport_exception is not None)
        for rank in ranks
    )


def _without_exit_record(job: JobState) -> tuple[int, ...]:
    """Return the ranks that are gone and did not end in order, where none is left."""
    ranks = job.ranks.values()
    gone = tuple(sorted(rank.rank for rank in ranks if rank.alive is False and rank.exit is None and not rank.finished))
    return gone if all(rank.rank in gone or rank.finished for rank in ranks) else ()


def _stop_words(job: JobState) -> str:
    stop = job.stop
    if stop is None or stop.quiet_ns <= SLOW_AFTER_NS:
        return f"{_stopped(stop)}; no fault was detected before that"
    quiet = f"{_stopped(stop)} when nothing had been recorded for {stop.quiet_ns / 1e9:.0f} s"
    if stop.had_stalled:
        return f"{quiet}: it had stalled; {_unknown_wait(job)}"
    return (
        f"{quiet}, which is no longer than it may take (a rank once issued nothing for {stop.usual_ns / 1e9:.0f} s): "
        f"it may have stalled. {_places(job)}"
    )


def _stopped(stop: Stop | None) -> str:
    signals = "SIGKILL of all ranks together" if stop is not None and stop.by_kill else "SIGINT, SIGTERM or SIGHUP"
    return f"the job was stopped from outside ({signals})"


def _lost_words(rank: RankState) -> str:
    error = rank.transport_exception
    text = f"{error.type}: {' '.join(error.message.split())[:200]}{at_line(error.frame)}" if error is not None else ""
    return f"rank {rank.rank} lost a peer ({text}), and the records do not show what happened to that one"


def _unknown_wait(job: JobState) -> str:
    if job.missing:
        return (
            f"{_wait_words(job)}, perhaps for {list_ranks(job.missing)}, of which there is no {job.evidence_name} "
            f"here: {job.how_to_complete}"
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


def _wait_words(job: JobState) -> str:
    """Say who waits in the operation that was issued first, where only operations of some ranks are known."""
    if all(rank.sees_program for rank in job.ranks.values()):
        return "ranks wait"
    open_collectives = find_open_collectives(job)
    if open_collectives:
        waiting = open_collectives[0].waiting
        return f"{wait_words(tuple(sorted(waiting)))} in {operation_words(job, next(iter(waiting.values())))}"
    messages = ((rank.rank, o) for rank in job.ranks.values() for o in rank.open_operations)
    return next((f"rank {rank} waits in {operation_words(job, o)}" for rank, o in messages), "ranks wait")


def _asleep_words(job: JobState, asleep_s: float) -> str:
    ended = job.stop is not None
    return (
        f"{f'{_stopped(job.stop)} after ' if ended else ''}"
        f"nothing was recorded for {asleep_s:.0f} s and every rank {'slept' if ended else 'sleeps'} outside any "
        f"collective: {_places(job)}. They {'waited' if ended else 'wait'} for input, a file, a lock or another "
        f"process{'' if ended else ', which may yet come'}"
    )


def _places(job: JobState) -> str:
    """Say where ranks are, or were at their end."""
    ranks = sorted(job.ranks.values(), key=lambda rank: rank.rank)
    shown = "; ".join(f"rank {rank.rank}{_asleep_place(rank)}" for rank in ranks[:MAX_PLACES])
    return shown + (f"; and {len(ranks) - MAX_PLACES} more" if len(ranks) > MAX_PLACES else "")


def _asleep_place(rank: RankState) -> str:
    state = rank.stack.state if rank.stack is not None else ""
    frozen = f" (process state {state})" if state in FROZEN else ""
    return f"{at_line(rank.place) or ' at an unknown line'}{frozen}"
