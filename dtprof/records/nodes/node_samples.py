"""Samples of a node, one a second, in `node-HOST/samples.jsonl`: their values, writer and size limit.

The first line describes the node; each other line is one sample: `t` (host time, ns), `host`, `cores`, `gpus`,
`processes`, `links`, values in the order of the tables below, null where unknown. Totals count up; only their
differences mean something, and they survive thinning. Standard library only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtprof.records import paths, writer

FORMAT = 1
MAX_BYTES = 8 * 1024 * 1024
"""Beyond this size, every second sample of the older half is dropped."""

Value = float | None


@dataclass(frozen=True, kw_only=True)
class SampleField:
    """One value of a sample."""

    name: str
    unit: str
    total: bool  # counts up since boot (processes: since their start); else the level at that moment
    meaning: str


def _fields(rows: Sequence[tuple[str, str, bool, str]]) -> tuple[SampleField, ...]:
    return tuple(SampleField(name=name, unit=unit, total=total, meaning=text) for name, unit, total, text in rows)


HOST = _fields(
    [
        ("cpu_busy_s", "s", True, "processor time used by anything, all cores; time stolen by other machines left out"),
        ("cpu_system_s", "s", True, "of that, in the kernel"),
        ("cpu_iowait_s", "s", True, "cores idle while something waited for a disk"),
        ("cpu_steal_s", "s", True, "time that the hypervisor gave to other machines"),
        ("load", "", False, "load average over one minute"),
        ("memory_used_bytes", "bytes", False, "memory that cannot be given to a program: total less available"),
        ("swap_used_bytes", "bytes", False, "swap in use"),
        ("swapped_in_bytes", "bytes", True, "read back from swap"),
        ("swapped_out_bytes", "bytes", True, "written to swap"),
        ("disk_read_bytes", "bytes", True, "read from disks"),
        ("disk_written_bytes", "bytes", True, "written to disks"),
        ("net_sent_bytes", "bytes", True, "sent on all interfaces but the loopback"),
        ("net_received_bytes", "bytes", True, "received on them"),
        ("loopback_bytes", "bytes", True, "sent on the loopback interface: gloo between ranks of one host"),
        ("cgroup_memory_bytes", "bytes", False, "charged to the control group that limits the job, else the outermost"),
        ("cgroup_reclaimable_bytes", "bytes", False, "of that, page cache that was not used lately"),
        ("net_queued_bytes", "bytes", False, "in the queues of its interfaces: the network does not take them yet"),
    ]
)
CORE = _fields([("busy_s", "s", True, "processor time used on the core")])
GPU = _fields(
    [
        ("utilisation", "share", False, "of the last moments, time in which some kernel ran"),
        ("memory_utilisation", "share", False, "of the last moments, time in which device memory was read or written"),
        ("memory_used_bytes", "bytes", False, "device memory in use by any process"),
        ("memory_of_job_bytes", "bytes", False, "of that, by processes of this job"),
        ("memory_of_others_bytes", "bytes", False, "of that, by processes that are not of this job"),
        ("power_w", "W", False, "power drawn"),
        ("energy_j", "J", True, "energy used since the driver was loaded"),
        ("temperature_c", "C", False, "temperature of the chip"),
        ("sm_clock_mhz", "MHz", False, "clock of the multiprocessors"),
        ("memory_clock_mhz", "MHz", False, "clock of the memory"),
        ("throttle_reasons", "bits", False, "why clocks are held down, by NVML: 4, 128 power; 32, 64 heat; 8 hardware"),
        ("pcie_sent_bytes", "bytes", True, "sent over PCIe, where the device counts"),
        ("pcie_received_bytes", "bytes", True, "received over PCIe, where the device counts"),
        ("pcie_sent_bytes_per_s", "bytes/s", False, "the same over some 20 ms, where it does not count"),
        ("pcie_received_bytes_per_s", "bytes/s", False, "the same, received"),
        ("nvlink_sent_bytes", "bytes", True, "payload sent over all NVLinks"),
        ("nvlink_received_bytes", "bytes", True, "payload received over all NVLinks"),
        ("ecc_corrected", "count", True, "memory errors corrected since the driver was loaded"),
        ("ecc_uncorrected", "count", True, "memory errors that could not be corrected"),
        ("xid_errors", "count", True, "critical XID events since the launcher started"),
        ("last_xid", "code", False, "XID code of the newest of them"),
        ("lost", "flag", False, "1: the driver reaches the device no longer, and all else is unknown"),
    ]
)  # fmt: skip
THROTTLE_REASONS = {
    0x2: "clocks that were set for it",
    0x4: "the power cap",
    0x8: "its hardware",
    0x20: "heat",
    0x40: "heat of its hardware",
    0x80: "the power brake",
}
"""Bits of `throttle_reasons` and their meaning; an idle device (1) is not throttled."""
PROCESS = _fields(
    [
        ("rss_bytes", "bytes", False, "resident memory, shared pages included"),
        ("user_s", "s", True, "processor time outside the kernel"),
        ("system_s", "s", True, "processor time in the kernel"),
        ("voluntary_switches", "count", True, "times a thread gave up its core to wait"),
        ("involuntary_switches", "count", True, "times a thread was taken off its core"),
        ("threads", "count", False, "threads"),
        ("read_bytes", "bytes", True, "read from disks"),
        ("written_bytes", "bytes", True, "written to disks"),
    ]
)
LINK = _fields(
    [
        ("acked_bytes", "bytes", True, "sent to that host by TCP and acknowledged by it"),
        ("busy_s", "s", True, "time in which data to it was under way, less that in which it had no room for more"),
        ("segments", "count", True, "segments with data that were sent to it"),
        ("retransmitted", "count", True, "segments that were sent to it again"),
        ("rtt_s", "s", False, "smoothed round trip of the connection that sent most since the last sample"),
        ("min_rtt_s", "s", False, "shortest round trip of that connection within some minutes"),
    ]
)
TABLES = {"host": HOST, "cores": CORE, "gpus": GPU, "processes": PROCESS, "links": LINK}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample, values in the order of the fields."""

    t_ns: int
    host: Sequence[Value]
    cores: Sequence[Value]
    gpus: Mapping[int, Sequence[Value]]  # by NVML's index
    processes: Mapping[int, Sequence[Value]]  # by pid: the ranks of this host
    links: Mapping[str, Sequence[Value]] = field(default_factory=dict)  # by address: hosts that its ranks send to


class SampleFile:
    """The file of a node, within its size limit."""

    def __init__(self, node_folder: Path, description: Mapping[str, object], *, max_bytes: int = MAX_BYTES) -> None:
        """Begin the file with the description of the node.

        Raises:
            OSError: it cannot be written, or another launcher of this host is writing it.
        """
        self._path = node_folder / paths.SAMPLES
        self._max_bytes = max_bytes
        self._path.touch(exist_ok=False)  # one launcher samples a host
        writer.append_line(self._path, {"format": FORMAT, **description})

    def append(self, sample: Sample) -> None:
        """Append a sample; thin the older half of a file beyond its limit.

        Raises:
            OSError: it cannot be written.
        """
        size = writer.append_line(
            self._path,
            {
                "t": sample.t_ns,
                "host": _short(sample.host),
                "cores": _short(sample.cores),
                "gpus": {str(number): _short(values) for number, values in sample.gpus.items()},
                "processes": {str(pid): _short(values) for pid, values in sample.processes.items()},
                **({"links": {to: _exact(values) for to, values in sample.links.items()}} if sample.links else {}),
            },
        )
        if size > self._max_bytes:
            thinned = thin(self._path.read_bytes().splitlines(keepends=True))
            writer.write_whole(self._path, b"".join(thinned))


def thin(lines: Sequence[bytes]) -> list[bytes]:
    """Drop every second sample of the older half; the first sample and descriptions stay."""
    half = len(lines) // 2
    older: list[bytes] = []
    drop = False
    for line in lines[:half]:
        if not line.startswith(b'{"t":'):
            older.append(line)
            continue
        if not drop:
            older.append(line)
        drop = not drop
    return [*older, *lines[half:]]


def _exact(values: Sequence[Value]) -> list[Value]:
    """Return the values rounded to a microsecond: round trips are short."""
    return [round(value, 6) if isinstance(value, float) else value for value in values]


def _short(values: Sequence[Value]) -> list[Value]:
    """Return the values rounded to three decimals."""
    return [round(value, 3) if isinstance(value, float) else value for value in values]
