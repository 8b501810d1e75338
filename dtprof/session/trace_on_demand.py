"""Ask the ranks of a running job on this host for a window or a snapshot, and wait until they have answered."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprof.errors import OutputError, UsageError
from dtprof.records import trace_requests, writer
from dtprof.records.rank_log.strings import read_strings
from dtprof.records.rank_processes import find_processes
from dtprof.records.reader import Run
from dtprof.records.tables import Snapshot, Window
from dtprof.records.trace_requests import TraceRequest
from dtprof.session.process_liveness import is_alive

POLLING_INTERVAL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Taken:
    """How the ranks answered."""

    request: str
    failures: tuple[str, ...]  # of ranks that did not take what was asked, a sentence each


@dataclass(kw_only=True)
class _Asked:
    rank: int
    pid: int
    folder: Path


def take_now(run: Run, ranks: Sequence[int], *, steps: int, memory: bool, timeout_s: float) -> Taken:
    """Ask these ranks, and wait for their files.

    Raises:
        UsageError: none of them runs on this host.
        OutputError: their folders cannot be written to.
    """
    asked = _running(run, ranks)
    request = TraceRequest(id=uuid.uuid4().hex[:12], steps=steps, memory=memory)
    try:
        for rank in asked:
            trace_requests.put(rank.folder, request)
    except OSError as error:
        _withdraw(asked)
        raise OutputError(
            f"{asked[0].folder} cannot be written to ({error.strerror}): run as the job's user"
        ) from error
    deadline_s = time.monotonic() + timeout_s
    left, failures = list(asked), []
    try:
        while left and time.monotonic() < deadline_s:
            # In this order: what a rank wrote before it ended is seen.
            ended = {rank.rank for rank in left if not is_alive(rank.pid, run.path)}
            left = [rank for rank in left if not _has_answered(rank.folder, request)]
            failures += [f"rank {rank.rank} ended before it answered" for rank in left if rank.rank in ended]
            left = [rank for rank in left if rank.rank not in ended]
            if left:
                time.sleep(POLLING_INTERVAL_S)
    finally:
        waiting = _withdraw(left)
    for rank in left:
        if rank.rank in waiting:
            failures.append(
                f"rank {rank.rank} ended no step in {timeout_s:g} s; `dtprof stacks {run.name}` says what it does"
            )
        else:
            failures.append(
                f"rank {rank.rank} has begun and not ended within {timeout_s:g} s: `dtprof trace {run.name}` later"
            )
    failures += [reason for rank in asked if (reason := _failure(rank, request))]
    return Taken(request=request.id, failures=tuple(failures))


def _running(run: Run, ranks: Sequence[int]) -> list[_Asked]:
    asked = [
        _Asked(rank=process.rank, pid=process.pid, folder=max(run.folders[process.rank])[1])
        for process in find_processes(run.folders)
        if process.rank in ranks and process.boot_id == writer.boot_id() and is_alive(process.pid, run.path)
    ]
    if not asked:
        raise UsageError(
            f"{run.name}: none of its ranks runs on this host, so none can be asked; expected a job that runs. "
            "`dtprof run --trace-steps A:B` takes a window of one that is to run"
        )
    return asked


def _withdraw(asked: Sequence[_Asked]) -> set[int]:
    """Withdraw requests that are not yet taken; return their ranks."""
    return {rank.rank for rank in asked if trace_requests.withdraw(rank.folder)}


def _has_answered(folder: Path, request: TraceRequest) -> bool:
    strings = read_strings(folder, [])
    windows = [window for window in strings.windows.values() if window.request == request.id]
    snapshots = [snapshot for snapshot in strings.snapshots if snapshot.request == request.id]
    return (not request.steps or any(window.state != "begun" for window in windows)) and (
        not request.memory or bool(snapshots)
    )


def _failure(rank: _Asked, request: TraceRequest) -> str:
    strings = read_strings(rank.folder, [])
    answers: list[Window | Snapshot] = [*strings.windows.values(), *strings.snapshots]
    failed = [answer.reason for answer in answers if answer.request == request.id and answer.state == "failed"]
    return f"rank {rank.rank}: {failed[0]}" if failed else ""
