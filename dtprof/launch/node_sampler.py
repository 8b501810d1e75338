"""Sample this node once a second while a job runs: host, cores, GPUs, ranks; in a thread of the launcher."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from dtprof import fence
from dtprof.launch import gpu_sampler
from dtprof.launch.launcher_thread import LauncherThread
from dtprof.launch.link_counters import LinkCounters, own_addresses, queued_bytes
from dtprof.launch.memory_cgroup import MemoryCgroup, find_memory_cgroup
from dtprof.records import writer
from dtprof.records.nodes.node_samples import HOST, Sample, SampleFile, Value

PERIOD_S = 1.0
STOP_S = 2.0
"""How long the end of a job waits for a sample that a driver delays."""


class Sampler:
    """Samples this node until it is stopped; a driver that does not answer delays samples only."""

    def __init__(self, node_folder: Path, pids: Callable[[], Iterable[int]]) -> None:
        """Start at once. `pids` returns the processes of the ranks known on this host."""
        self._folder = node_folder
        self._pids = pids
        self._processes: dict[int, psutil.Process] = {}
        self._links = LinkCounters()
        self._cgroup = find_memory_cgroup()
        self.description: dict[str, object] = {}
        self.newest: Sample | None = None
        """None where this launcher takes no samples."""
        self._thread = LauncherThread(self._work, "sampler")
        self._thread.start()

    def stop(self) -> None:
        """Take the last sample and stop."""
        self._thread.stop(STOP_S)

    @fence.fenced("the node", "is no longer sampled")
    def _work(self) -> None:
        devices, reason = gpu_sampler.open_gpus(os.getpid())
        self.description = {
            "boot_id": writer.boot_id(),
            "period_s": PERIOD_S,
            "addresses": own_addresses(),
            "memory_bytes": psutil.virtual_memory().total,
            "cgroup_limit_bytes": self._cgroup.limit_bytes() if self._cgroup is not None else None,
            "swap_bytes": psutil.swap_memory().total,
            "gpus": devices.describe() if devices is not None else [],
            "no_gpus_reason": reason,
            "gpu_problems": devices.problems if devices is not None else [],
            "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        ended = self._thread.ended
        try:
            file = SampleFile(self._folder, self.description)
            while True:
                sample = self._sample(devices)
                file.append(sample)
                self.newest = sample
                if ended.is_set():
                    break
                ended.wait(PERIOD_S - time.time() % PERIOD_S)  # on all nodes at once: ranks wait for the slowest
        except OSError:
            self.newest = None  # the disk is full, or the run was deleted: the watcher reports it
        finally:
            if devices is not None:
                devices.close()

    def _sample(self, devices: gpu_sampler.Gpus | None) -> Sample:
        cores = [_busy_s(core) for core in psutil.cpu_times(percpu=True)]
        return Sample(
            t_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
            host=_host_values(self._cgroup, busy_s=sum(cores)),
            cores=cores,
            gpus=devices.sample() if devices is not None else {},
            processes=self._process_values(),
            links=self._links.sample(self._pids()),
        )

    def _process_values(self) -> dict[int, list[Value]]:
        values: dict[int, list[Value]] = {}
        for pid in self._pids():
            try:
                process = self._processes.get(pid) or psutil.Process(pid)
                self._processes[pid] = process
                with process.oneshot():
                    values[pid] = _values_of(process)
            except psutil.Error:
                continue  # it has ended
        return values


def _busy_s(times: Any) -> float:
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _host_values(cgroup: MemoryCgroup | None, *, busy_s: float) -> list[Value]:
    """Return the values of the host, in the order of the table `HOST`."""
    times, memory, swap = psutil.cpu_times(), psutil.virtual_memory(), psutil.swap_memory()
    disks, interfaces = psutil.disk_io_counters(), psutil.net_io_counters(pernic=True)
    outward = [counters for name, counters in interfaces.items() if name != "lo"]
    values: dict[str, Value] = {
        "cpu_busy_s": busy_s,
        "cpu_system_s": times.system,
        "cpu_iowait_s": times.iowait,
        "cpu_steal_s": times.steal,
        "load": os.getloadavg()[0],
        "memory_used_bytes": memory.total - memory.available,
        "swap_used_bytes": swap.used,
        "swapped_in_bytes": swap.sin,
        "swapped_out_bytes": swap.sout,
        "disk_read_bytes": disks.read_bytes if disks else None,
        "disk_written_bytes": disks.write_bytes if disks else None,
        "net_sent_bytes": sum(counters.bytes_sent for counters in outward),
        "net_received_bytes": sum(counters.bytes_recv for counters in outward),
        "loopback_bytes": interfaces["lo"].bytes_sent if "lo" in interfaces else None,
        "cgroup_memory_bytes": cgroup.charged_bytes() if cgroup is not None else None,
        "cgroup_reclaimable_bytes": cgroup.reclaimable_bytes() if cgroup is not None else None,
        "net_queued_bytes": queued_bytes(),
    }
    return [values[field.name] for field in HOST]


def _values_of(process: psutil.Process) -> list[Value]:
    """Return the values of a process, in the order of the table `PROCESS`."""
    times, switches = process.cpu_times(), process.num_ctx_switches()
    read: int | None
    try:
        counters = process.io_counters()
        read, written = counters.read_bytes, counters.write_bytes
    except (psutil.AccessDenied, NotImplementedError, ValueError):
        read = written = None
    return [
        process.memory_info().rss,
        times.user,
        times.system,
        switches.voluntary,
        switches.involuntary,
        process.num_threads(),
        read,
        written,
    ]
