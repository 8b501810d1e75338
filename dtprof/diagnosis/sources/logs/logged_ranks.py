"""From the logs of a job to the state that rules read.

A log tells exceptions, exits and timeouts, in an order within each file and at no time that could be compared with
anything. It does not tell what a rank does outside them, nor which groups there are: all this is unknown to the rules.
"""

from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.sources.logs.log_facts import MAX_RANK, Exit, Facts, Order, Trace
from dtprof.diagnosis.sources.logs.logged_job import ABORTED, LoggedJob, ranks_by_process, simple_type, view
from dtprof.formatting import plural
from dtprof.job.world_size import resolve_world_size
from dtprof.records.manifest import Manifest
from dtprof.records.nodes.exit_records import BY_SHELL, is_stop
from dtprof.records.tables import UNKNOWN_NS, ExceptionRecord, ProcessExit

TIMED_OUT = (
    *("gloo-timeout", "barrier-missed", "barrier-waits", "store-key", "store-barrier", "store-clients", "stuck"),
    *("dump-signal", "store-unreachable", "rendezvous", "stalled-tensor"),
)
LINES_A_FILE = 1 << 40
SIGNALS = (1, 2, 6, 7, 9, 11, 15)


def gather_attempt(facts: Facts, problems: tuple[str, ...] = ()) -> JobState:
    """Return the job state that the logs of one attempt show."""
    job = view(facts)
    in_calls = set(ranks_by_process([*facts.communicators.values()]).values())
    seen = set(facts.ranks_named) | set(job.victims) | set(job.own) | in_calls
    seen |= set(job.exits) | job.left_in_order(job.known)
    ranks = sorted(rank for rank in seen if rank < MAX_RANK)
    if facts.left_out:
        problems = (*problems, f"{plural(facts.left_out, 'more line')} of these kinds not kept")
    if job.notes("folded"):
        problems = (*problems, "Ray folded lines of several ranks into one: set RAY_DEDUP_LOGS=0 next time")
    size = resolve_world_size([facts.world_size], job.known)
    return JobState(
        ranks={rank: _rank_state(rank, job) for rank in ranks},
        world_size=min(size, MAX_RANK),
        manifest=Manifest(exit_status=1 if facts.failed else None),
        stalled=False,
        stopped_on_hang_ns=None,
        timed_out=_has_timed_out(job),
        unnamed=(
            *(_unnamed(trace, lost_peer=False) for trace in job.own_unknown),
            *(_unnamed(trace, lost_peer=True) for trace in job.victims_unknown),
        ),
        log=job,
        problems=problems,
        sources=("log",),
        evidence_name="line of a log",
        how_to_complete="give the logs of all ranks",
    )


def _has_timed_out(job: LoggedJob) -> bool | None:
    """Say whether the job waited until a limit ended it; None where no end is seen, as in NCCL's log of calls."""
    if job.facts.fingerprints:
        return False
    if job.facts.timeouts or job.notes(*TIMED_OUT):
        return True
    return None if job.facts.communicators and not (job.exits or job.facts.traces) else False


def _rank_state(rank: int, job: LoggedJob) -> RankState:
    own, lost = job.own.get(rank), job.victims.get(rank)
    end = job.exits.get(rank)
    # Watchdogs abort their processes at the same time, and not all of them come to write why.
    late = rank in job.waited_for() or (end is not None and end.status == ABORTED and bool(job.facts.timeouts))
    errors = [_exception(trace) for trace in (lost, own) if trace is not None]
    if late and not errors:
        errors = [_watchdog_error(rank, job)]
    return RankState(
        rank=rank,
        attempt=0,
        pid=0,
        host=job.exits[rank].host if rank in job.exits else "",
        call_sites=tuple(error.frame for error in errors if error.frame is not None),
        exceptions=tuple(errors),
        lost_peer=own is None if errors else None,
        exit=_exit_of(rank, job, errors),
        last_ns=LINES_A_FILE * LINES_A_FILE,  # an end that no line stands beside comes after all that do
        steps=None,
        sees_program=False,
    )


def _exit_of(rank: int, job: LoggedJob, errors: list[ExceptionRecord]) -> ProcessExit | None:
    """Return how a process ended, as its launcher or torch's hook for uncaught exceptions tells."""
    cancelled = any("CANCELLED" in note.text for note in job.notes("stopped")) and not job.has_table
    if (end := job.exits.get(rank)) is not None:
        status = _status(end)
        stopped = cancelled and status < 0 and not end.out_of_memory
        return None if stopped else ProcessExit(pid=end.pid, status=status, t_ns=UNKNOWN_NS)
    own = job.own.get(rank)
    if own is not None and own.fatal:
        return ProcessExit(pid=0, status=1, t_ns=UNKNOWN_NS)
    in_order = not errors and job.left_in_order({rank})
    return ProcessExit(pid=0, status=0, t_ns=UNKNOWN_NS) if in_order else None


def _status(end: Exit) -> int:
    by_signal = end.status - BY_SHELL in SIGNALS and not is_stop(end.status)
    return BY_SHELL - end.status if by_signal else end.status


def _unnamed(trace: Trace, *, lost_peer: bool) -> RankState:
    return RankState(
        rank=-1,
        attempt=0,
        pid=0,
        host="",
        exceptions=(_exception(trace),),
        lost_peer=lost_peer,
        last_ns=_moment(trace.order),
        steps=None,
        sees_program=False,
    )


def _exception(trace: Trace) -> ExceptionRecord:
    return ExceptionRecord(
        t_ns=_moment(trace.order), type=simple_type(trace), message=trace.message, traceback="", frame=trace.site
    )


def _watchdog_error(rank: int, job: LoggedJob) -> ExceptionRecord:
    """Return the exception of NCCL's watchdog when it gives an operation up: it ends the process."""
    timeouts = job.facts.timeouts
    late = next((timeout for timeout in timeouts if timeout.rank == rank), timeouts[0])
    number = "" if late.seq is None else f" #{late.seq}"
    return ExceptionRecord(
        t_ns=_moment(late.order),
        type="DistBackendError",
        message=f"Watchdog caught collective operation timeout: {late.op}{number}",
        traceback="",
        frame=None,
    )


def _moment(order: Order) -> int:
    """Return an ordinal in place of a time: lines of one file are in the order of time."""
    return order.file * LINES_A_FILE + order.line
