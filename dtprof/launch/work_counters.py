"""Work counters of a process from the kernel: two readings show whether it worked in between."""

from dataclasses import dataclass
from pathlib import Path

import psutil

POLLING_THREADS = ("TP_", "NCCL ")
"""What names of threads begin with that poll for messages without end, whether or not any come: those of TensorPipe,
which serve RPC (its TP_SHM_reactor takes half a core in a job that is stuck), and NCCL's proxies of the network."""


@dataclass(frozen=True, kw_only=True)
class WorkCounters:
    """Totals since the process started; None where the kernel does not tell."""

    cpu_s: float | None = None  # of its threads, without those that poll
    children_cpu_s: float | None = None  # of its descendants that live: loader workers, compilers, tools
    io_bytes: int | None = None  # read and written, through caches too
    page_faults: int | None = None
    delayed_s: float | None = None  # its main thread was ready to run, and had no core


def read_work_counters(pid: int) -> WorkCounters:
    """Return the counters of a process; all unknown where it has ended or belongs to somebody else."""
    try:
        process = psutil.Process(pid)
        return WorkCounters(
            cpu_s=_cpu_s(process) - _polling_s(process),
            children_cpu_s=sum(map(_cpu_s, process.children(recursive=True))),
            io_bytes=_io_bytes(process),
            page_faults=_page_faults(pid),
            delayed_s=_delayed_s(pid),
        )
    except psutil.Error:
        return WorkCounters()


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # a child that has just ended
    return float(times.user + times.system)


def _polling_s(process: psutil.Process) -> float:
    """Return the CPU time of the threads that poll; 0 where the kernel does not name threads."""
    polling_s = 0.0
    for thread in process.threads():
        try:
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has just ended
        if name.startswith(POLLING_THREADS):
            polling_s += float(thread.user_time + thread.system_time)
    return polling_s


def _io_bytes(process: psutil.Process) -> int | None:
    try:
        counters = process.io_counters()
    except (psutil.AccessDenied, NotImplementedError, ValueError):
        return None
    return int(counters.read_chars + counters.write_chars)


def _page_faults(pid: int) -> int | None:
    """Return minor and major page faults, from /proc/PID/stat (proc(5), fields 10 and 12)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name of the program, before it, may hold spaces and parentheses
        return int(fields[7]) + int(fields[9])
    except (OSError, ValueError, IndexError):
        return None


def _delayed_s(pid: int) -> float | None:
    """Return the second field of /proc/PID/schedstat, ns (the kernel's Documentation/scheduler/sched-stats.rst)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
