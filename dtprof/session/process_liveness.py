"""Which processes of a run are alive on this host now, from /proc."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dtprof import settings
from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.formatting import format_age, list_ranks
from dtprof.launch.run_processes import is_of_run
from dtprof.records import writer
from dtprof.records.nodes.node_reader import silent_hosts
from dtprof.records.rank_processes import find_processes
from dtprof.records.reader import Run

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary


def is_alive(pid: int, run_path: Path) -> bool:
    """Say whether the process still runs and belongs to this run, not to one that took over its id."""
    try:
        environment = psutil.Process(pid).environ()
        if settings.ENV_RUN_DIR in environment:
            return is_of_run(run_path, environment)
        # It joined the run after its start (`import dtprof.auto`, a cleared environment): it maps its log all the same.
        return os.fsencode(run_path.resolve()) + b"/" in Path(f"/proc/{pid}/maps").read_bytes()
    except (psutil.AccessDenied, PermissionError):
        return True
    except (psutil.Error, OSError):
        return False


def is_recorded(run: Run) -> bool:
    """Say whether processes of this host still write the run."""
    if run.manifest.ended_realtime_ns:
        return False
    here = [row for row in run.processes if row.get("boot_id") == writer.boot_id() and isinstance(row.get("pid"), int)]
    return any(is_alive(row["pid"], run.path) for row in here)


def confirm_running(summary: "Summary", run: Run) -> "Summary":
    """Return the summary with ranks of this host that are gone marked as such, and with those of silent hosts named.

    From the files alone, a rank without an exit record runs. Where dtprof was killed with the job, it is gone; where
    nothing is heard of its host though others are heard of, it may be.
    """
    running = {rank.rank for rank in summary.ranks if rank.ended.is_running}
    if not running:
        return summary
    from dtprof.analysis.results import Caveat

    processes = find_processes(run.folders)
    here = [process for process in processes if process.boot_id == writer.boot_id()]
    gone = {process.rank for process in here if not is_alive(process.pid, run.path)} & running
    ranks = [replace(rank, ended=RankEnd(EndState.NO_RECORD)) if rank.rank in gone else rank for rank in summary.ranks]
    of_host: dict[str, set[int]] = {}
    for process in processes:
        of_host.setdefault(process.host, set()).add(process.rank)
    quiet_s = silent_hosts(run.path, of_host, {host for host, own in of_host.items() if own & (running - gone)})
    caveats = [
        Caveat(
            "ended",
            f"{list_ranks(sorted(of_host[host] & running))} may have ended: nothing was heard of host {host} for "
            f"{format_age(seconds)} while others were",
        )
        for host, seconds in sorted(quiet_s.items())
    ]
    return replace(summary, ranks=tuple(ranks), cannot_tell=(*summary.cannot_tell, *caveats))
