"""Rank exits: by an exception, by a signal, together; and their common causes."""

import signal

from dtprof.diagnosis.blocked_ranks import (
    call_sites,
    common_operation,
    failed_in_communication,
    find_followers,
    first_blocking_of,
    victims,
)
from dtprof.diagnosis.findings import Finding, group_words, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.stop_detection import stop_ns
from dtprof.formatting import format_bytes
from dtprof.job.issued_operations import Operation
from dtprof.records.nodes.exit_records import is_stop
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS, ProcessExit

OUTLIVED_NS = 1_000_000_000
"""A signal to the whole job ends its ranks within this time."""
TOO_LATE = "imed out"
"""Parts of messages of backends where no peer was lost and only a timeout passed."""
NATIVE_CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")


def has_crashed(rank: RankState) -> bool:
    """Say whether a rank raised an exception of its own, or left with a status above 0 without one.

    Where a source does not show the program, a status proves nothing: its exception may be in another source.
    """
    if rank.own_exception is not None:
        return rank.interruption is None and not failed_in_communication(rank)
    failed_status = rank.exit is not None and rank.exit.status > 0
    return failed_status and rank.sees_program and not rank.exceptions


def was_killed(rank: RankState, job: JobState) -> bool:
    """Say whether a signal ended this rank, and not the whole job."""
    if rank.signal_name is None or rank.exit is None or rank.exceptions:
        return False  # a rank whose exception came first may well abort afterwards
    if rank.stopped_politely and (rank.exit.t_ns == UNKNOWN_NS or not _stopped_alone(rank.exit, job)):
        return False
    if rank.exit.status == -signal.SIGKILL and _is_last_resort(rank.exit, rank.host, job):
        return False
    stopped = job.stopped_on_hang_ns
    return stopped is None or rank.exit.t_ns < stopped


def _is_last_resort(end: ProcessExit, host: str, job: JobState) -> bool:
    """Say whether a rank was killed as the job was stopped: together with all others, or since it did not end."""
    if job.stop is not None and job.stop.by_kill:
        return True
    asked = [stop_ns(rank) for rank in job.ranks.values() if rank.host == host]
    return any(t_ns is not None and t_ns < end.t_ns - OUTLIVED_NS for t_ns in asked)


def _stopped_alone(end: ProcessExit, job: JobState) -> bool:
    """Say whether a polite signal ended this rank first, and the others lived on: nobody stopped the whole job."""
    others = [rank for rank in job.ranks.values() if rank.pid != end.pid]
    return (
        bool(others) and not is_stop(job.manifest.exit_status) and all(_lived_on(other, end.t_ns) for other in others)
    )


def _lived_on(rank: RankState, t_ns: int) -> bool:
    """Say whether a rank lost its peer by that end: once one has failed by a limit, launchers end the others."""
    error = rank.transport_exception
    if rank.exit is not None and rank.exit.t_ns <= t_ns:
        return False
    if error is not None and error.t_ns >= t_ns - OUTLIVED_NS and TOO_LATE not in error.message:
        return True
    return bool(rank.alive) if rank.exit is None else rank.exit.t_ns > t_ns + OUTLIVED_NS


def find_first_failed(job: JobState) -> RankState | None:
    """Return the rank that raised, or was killed before its program had ended, first; None where there is none."""
    failed = (
        rank
        for rank in (*job.ranks.values(), *job.unnamed)
        if has_crashed(rank) or (was_killed(rank, job) and rank.ended_ns == UNKNOWN_NS)
    )
    return min(failed, key=end_ns, default=None)


def oom_reports(job: JobState) -> tuple[str, ...]:
    """Return the sentences of a log that report the OOM killer."""
    return tuple(note.text for note in job.log.notes("oom-kill")) if job.log is not None else ()


def resident_words(rank: RankState, job: JobState) -> list[str]:
    """Give the RAM of a rank beside that of the other ranks of its host, where it was sampled."""
    held = job.find_resident() if job.find_resident is not None else {}
    if rank.rank not in held:
        return []
    others = sorted(nbytes for r, nbytes in held.items() if r != rank.rank and job.ranks[r].host == rank.host)
    text = f"rank {rank.rank} held {format_bytes(held[rank.rank])} in RAM when last sampled"
    if others:
        low, high = format_bytes(others[0]), format_bytes(others[-1])
        text += f", the other ranks of its host {low if low == high else f'{low} to {high}'}"
    return [text]


def end_ns(rank: RankState) -> int:
    """Return when a rank raised its exception, else when its process ended, else its last record."""
    if rank.own_exception is not None and rank.own_exception.t_ns != UNKNOWN_NS:
        return rank.own_exception.t_ns
    known = rank.exit is not None and rank.exit.t_ns != UNKNOWN_NS
    return rank.exit.t_ns if rank.exit is not None and known else rank.last_ns


def _waiting_words(waiting: dict[int, Operation], job: JobState) -> str:
    operation = common_operation(waiting)
    if operation is None:
        return ""
    inside = [
        r for r, f in waiting.items() if (f.group, f.seq, f.p2p) == (operation.group, operation.seq, operation.p2p)
    ]
    group = group_words(job.group(operation.group)) if operation.group.ranks else "its group"
    return f"; {wait_words(inside)} in {operation.op} #{operation.seq} of {group}"


def _lines_of_loss(job: JobState, ranks: tuple[int, ...]) -> dict[int, Site]:
    """Return the lines at which ranks lost a peer, where the operation is not known."""
    lost = ((job.ranks[r], job.ranks[r].transport_exception) for r in ranks)
    return {r.rank: error.frame for r, error in lost if error is not None and error.frame and not r.sees_program}


def exit_finding(
    kind: str, summary: str, culprits: tuple[int, ...], sites: dict[int, Site], job: JobState, **rest: object
) -> Finding:
    """Return the finding for ranks that ended, with the ranks that their end holds up."""
    blocked = victims(job, set(culprits))
    if culprits:  # ranks may wait in a group of other members, for another cause
        followers = find_followers(job, culprits)
        blocked = tuple(rank for rank in blocked if rank in followers or rank not in job.waits)
    waiting = first_blocking_of(job, blocked)
    operation = common_operation(waiting)
    known = job.group(operation.group) if operation and operation.group.ranks else None
    return Finding(
        kind=kind,
        summary=summary + _waiting_words(waiting, job) + ".",
        culprit_ranks=culprits,
        waiting_ranks=blocked,
        group=known,
        op=operation.op if operation else None,
        seq=operation.seq if operation else None,
        step=job.ranks[culprits[0]].steps if culprits else None,
        call_sites=_lines_of_loss(job, blocked) | call_sites(waiting),
        culprit_call_sites=sites,
        **rest,  # type: ignore[arg-type]
    )
