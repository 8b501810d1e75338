"""What a host offers to its ranks: interfaces, memory, limits, cores, disk, clock, devices."""

from collections.abc import Iterator, Sequence

from dtprof.analysis.doctor.doctor_case import (
    DoctorCase,
    LaunchFinding,
    finding,
    hosts_of,
    listed,
    ranks_of,
)
from dtprof.formatting import format_bytes, format_ns, list_ranks, plural
from dtprof.records.rank_probes import RankProbe

INTERFACE_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
LITTLE_SHARED_BYTES = 1 << 30
"""Docker gives 64 MiB by default; NCCL takes some 10 MiB a rank and more, loaders a batch for each worker."""
LITTLE_FREE_SHARED_BYTES = 256 << 20
FILES_PER_RANK, FILES_BESIDE = 4, 512
"""Rank 0 holds a connection of every rank in the store, and gloo one to each in every group."""
THREADS_PER_RANK = 64
LITTLE_MEMORY_BYTES = 1 << 30  # of a rank
SLOW_DISK_MB_PER_S = 20.0
WALL_APART_NS = 1e9
COARSE_CLOCK_NS = 1e6
DRIFT_PPM = 200.0
HOT_C = 85
HELD_DOWN = 0x8 | 0x40 | 0x80  # hardware, its heat, the power brake: as NVML counts them
OTHERS_BYTES = 1 << 30


def interfaces(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find interfaces that variables name and that a host lacks, are down, or lead nowhere."""
    missing: dict[tuple[str, str], list[RankProbe]] = {}
    down: dict[tuple[str, str], list[RankProbe]] = {}
    alone: dict[tuple[str, str], list[RankProbe]] = {}
    for probe in case.probes:
        known = {interface.name: interface for interface in probe.interfaces}
        for variable in INTERFACE_SETTINGS:
            text = probe.settings.get(variable, "")
            if not known or not text or text.startswith("^"):
                continue
            is_exact = text.startswith("=") or not variable.startswith("NCCL")
            for name in text.lstrip("=").split(","):
                found = [
                    one for one in known.values() if one.name == name or (not is_exact and one.name.startswith(name))
                ]
                if not found:
                    missing.setdefault((variable, name), []).append(probe)
                elif not any(one.is_up and one.address for one in found):
                    down.setdefault((variable, name), []).append(probe)
                elif all(one.is_loopback for one in found) and len(case.hosts) > 1:
                    alone.setdefault((variable, name), []).append(probe)
    for (variable, name), probes in missing.items():
        others = sorted(
            {
                interface.name
                for interface in probes[0].interfaces
                if interface.is_up and not interface.is_loopback and interface.address
            }
        )
        yield _of_interface(
            probes,
            f"{variable} names {name!r}, which is no interface of {listed(hosts_of(probes))}; there "
            f"is {listed(others) or 'none'}",
            f"Set {variable} to an interface that is there, on each host its own if need be.",
        )
    for (variable, name), probes in down.items():
        yield _of_interface(
            probes,
            f"{variable} names {name!r}, which is down or without an IPv4 address on {listed(hosts_of(probes))}",
            "Bring the interface up, or name another.",
        )
    for (variable, name), probes in alone.items():
        yield _of_interface(
            probes,
            f"{variable} names {name!r} on {listed(hosts_of(probes))}, which reaches no other host",
            "Name the interface of the network between the hosts.",
        )


def _of_interface(probes: list[RankProbe], text: str, advice: str) -> LaunchFinding:
    return finding(
        "error",
        "interface",
        f"{text}.",
        advice,
        of=probes,
    )


def interface_speeds(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find a host whose fastest interface was negotiated slower than that of most hosts."""
    speeds = {
        probe.host: max(
            (interface.megabits_per_s or 0 for interface in probe.interfaces if interface.is_up and interface.address),
            default=0,
        )
        for probe in case.firsts
    }
    known = {host: speed for host, speed in speeds.items() if speed > 0}
    if len(known) < 2:
        return
    usual = sorted(known.values())[len(known) // 2]
    slow = tuple(sorted(host for host, speed in known.items() if speed < usual))
    if slow:
        yield finding(
            "warning",
            "interface-speed",
            f"The fastest interface of {listed(slow)} was negotiated at {known[slow[0]]:,} Mbit/s, that of most hosts "
            f"at {usual:,}.",
            "Look at the cable, the port of the switch and the driver of that host.",
            hosts=slow,
        )


def shared_memory(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts with little /dev/shm."""
    for probe in case.firsts:
        size, free = probe.shared_memory_bytes, probe.shared_memory_free_bytes
        if size is None or free is None:
            continue
        if size < LITTLE_SHARED_BYTES or free < LITTLE_FREE_SHARED_BYTES:
            yield finding(
                "warning",
                "shared-memory",
                f"/dev/shm of {probe.host} has {format_bytes(size)}, {format_bytes(free)} of it free: workers of "
                "DataLoaders and NCCL end with a bus error where it is used up.",
                "Give a container more: docker run --shm-size=16g, or in Kubernetes a volume of medium Memory.",
                hosts=(probe.host,),
            )


def limits(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find limits of the system that the job may run into."""
    needed = FILES_PER_RANK * case.world_size + FILES_BESIDE
    few = [probe for probe in case.probes if probe.open_files is not None and 0 <= probe.open_files < needed]
    if few:
        yield finding(
            "warning",
            "open-files",
            f"A rank may open {few[0].open_files:,} files on {listed(hosts_of(few))}, and may need {needed:,}: "
            f"{FILES_PER_RANK} connections for each of {plural(case.world_size, 'rank')} and {FILES_BESIDE} beside.",
            "Raise it before the launch: ulimit -n 65536",
            of=few,
        )
    locked = [p for p in case.firsts if p.has_infiniband and p.locked_memory_bytes not in (None, -1)]
    if locked:
        yield finding(
            "warning",
            "locked-memory",
            f"{listed(hosts_of(locked))} has InfiniBand, and its ranks may lock "
            f"{format_bytes(locked[0].locked_memory_bytes)} of memory only: NCCL cannot register its buffers beyond.",
            "Set it to unlimited: ulimit -l unlimited; docker run --ulimit memlock=-1",
            hosts=hosts_of(locked),
        )
    for probe in case.firsts:
        wanted = (probe.user_threads or 0) + THREADS_PER_RANK * len(case.hosts[probe.host])
        if probe.processes is not None and probe.user_threads is not None and 0 <= probe.processes < wanted:
            yield finding(
                "warning",
                "process-limit",
                f"{probe.host} allows this user {probe.processes:,} threads, of which {probe.user_threads:,} run; the "
                f"ranks may start {THREADS_PER_RANK} each.",
                "Raise it before the launch: ulimit -u 65536",
                hosts=(probe.host,),
            )


def memory(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts with little memory for each rank."""
    for probe in case.firsts:
        ranks = len(case.hosts[probe.host])
        available = probe.memory_available_bytes
        if available is not None and available < LITTLE_MEMORY_BYTES * ranks:
            limit = probe.memory_limit_bytes
            of = f" of the limit of {format_bytes(limit)} of its control group" if limit is not None else ""
            yield finding(
                "warning",
                "memory",
                f"{probe.host} has {format_bytes(available)} of memory left{of} for {plural(ranks, 'rank')}.",
                "End what else runs there, or give the job more memory.",
                hosts=(probe.host,),
            )


def cores(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts whose ranks compute with more threads than they have cores."""
    for host, probes in case.hosts.items():
        usable = {core for probe in probes for core in probe.cores}
        if not usable:
            continue
        quota = min((probe.core_quota for probe in probes if probe.core_quota is not None), default=None)
        most = min(len(usable), quota) if quota is not None else len(usable)
        threads = sum(probe.threads or 1 for probe in probes)
        if len(probes) > most or threads > most:
            each = max(probe.threads or 1 for probe in probes)
            fit = max(1, int(most // len(probes)))
            yield finding(
                "warning",
                "oversubscribed-cores",
                f"{plural(len(probes), 'rank')} of {host} compute with {plural(each, 'thread')} each, on {most:g} "
                f"core{'s' if most != 1 else ''}: they wait for each other.",
                f"Set OMP_NUM_THREADS={fit}."
                if len(probes) <= most
                else "Start fewer ranks there, or give them more cores.",
                of=probes,
            )


def disk(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find disks under the run directory that are full, slow or cannot be written to."""
    for probe in case.firsts:
        ranks = len(case.hosts[probe.host])
        if probe.disk_error is not None:
            yield finding(
                "warning",
                "disk",
                f"{probe.host} cannot write to {probe.disk_path} ({probe.disk_error}): its ranks would not be "
                "recorded.",
                "Give a directory that every host can write to, with -o DIR.",
                hosts=(probe.host,),
            )
            continue
        wanted = ranks * case.max_log_bytes
        if probe.disk_free_bytes is not None and probe.disk_free_bytes < wanted:
            yield finding(
                "warning",
                "disk",
                f"The disk of {probe.disk_path} on {probe.host} has {format_bytes(probe.disk_free_bytes)} free; "
                f"records of {plural(ranks, 'rank')} may take {format_bytes(wanted)}.",
                "Give a directory on another disk with -o DIR, or less space to records with --max-log-mb N.",
                hosts=(probe.host,),
            )
        if probe.disk_mb_per_s is not None and probe.disk_mb_per_s < SLOW_DISK_MB_PER_S:
            yield finding(
                "warning",
                "disk",
                f"The disk of {probe.disk_path} on {probe.host} takes {probe.disk_mb_per_s:.1f} MB/s, a sync "
                f"{format_ns(probe.disk_sync_ns)}.",
                "Write checkpoints and runs to a faster disk.",
                hosts=(probe.host,),
            )


def clocks(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts whose clocks are far off, drift, or can be compared coarsely only."""
    for probe in case.firsts:
        offset, error = probe.wall_offset_ns, probe.clock_error_ns or 0.0
        if offset is not None and abs(offset) - error > WALL_APART_NS:
            yield finding(
                "warning",
                "clock-offset",
                f"The wall clock of {probe.host} is {format_ns(abs(offset))} {'behind' if offset > 0 else 'ahead of'} "
                f"that of rank 0's host (within {format_ns(error)}): times in logs cannot be compared.",
                "Start chronyd or another NTP service there; dtprof's own figures are corrected.",
                hosts=(probe.host,),
            )
        drift, drift_error = probe.clock_drift_ppm, probe.clock_drift_error_ppm
        if drift is not None and drift_error is not None and abs(drift) - drift_error > DRIFT_PPM:
            yield finding(
                "warning",
                "clock-drift",
                f"The clock of {probe.host} drifts by {drift:+.0f} millionths against that of rank 0's host (within "
                f"{drift_error:.0f}).",
                "Look at the clock source of that host (/sys/devices/system/clocksource) and its NTP service.",
                hosts=(probe.host,),
            )
        if error > COARSE_CLOCK_NS:
            yield finding(
                "warning",
                "clock-error",
                f"The clock of {probe.host} is known to {format_ns(error)} only: shorter waits between hosts are "
                "unknown.",
                "Packets take that long between the hosts: look at the network, or at the load of the host.",
                hosts=(probe.host,),
            )


def gpus(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find GPUs that the driver lost, with memory errors, held down, hot or in use by others."""
    for probe in case.firsts:
        for gpu in probe.gpus:
            for severity, text, advice in _gpu_faults(gpu):
                yield finding(
                    severity,
                    "gpu-health",
                    f"GPU {gpu.get('index')} of {probe.host} {text}.",
                    advice,
                    hosts=(probe.host,),
                    ranks=tuple(one.rank for one in case.hosts[probe.host] if one.local_rank == gpu.get("index")),
                )
    counts = {probe.host: len(probe.gpus) for probe in case.firsts if probe.gpus}
    if len(set(counts.values())) > 1:
        most = max(counts.values())
        fewer = tuple(sorted(host for host, count in counts.items() if count < most))
        yield finding(
            "error",
            "gpu-health",
            f"{listed(fewer)} shows {plural(counts[fewer[0]], 'GPU')}, other hosts {most}.",
            "Look for a GPU that fell off the bus: nvidia-smi, and Xid in the kernel's log.",
            hosts=fewer,
        )


def _gpu_faults(gpu: dict[str, object]) -> Sequence[tuple[str, str, str]]:
    def number(name: str) -> float:
        value = gpu.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    found = []
    if number("lost"):
        found.append(("error", "is no longer reached by its driver", "Reset the GPU or restart the host."))
    if number("ecc_uncorrected"):
        count = int(number("ecc_uncorrected"))
        found.append(
            ("error", f"has {count} memory errors that could not be corrected", "Take the host out of service.")
        )
    if int(number("throttle_reasons")) & HELD_DOWN:
        found.append(("warning", "is held down by its hardware, heat or the power brake", "Look at cooling and power."))
    if number("temperature_c") >= HOT_C:
        found.append(("warning", f"has {number('temperature_c'):.0f} C before the job", "Look at cooling."))
    if number("memory_used_bytes") >= OTHERS_BYTES:
        size = format_bytes(number("memory_used_bytes"))
        found.append(("warning", f"has {size} of memory in use before the job", "End what runs there: nvidia-smi"))
    return found


def devices(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find ranks without a device of their own."""
    for host, probes in case.hosts.items():
        chosen: dict[str, list[RankProbe]] = {}
        without = []
        for probe in probes:
            if not probe.devices:
                continue
            local = probe.local_rank if probe.local_rank is not None else 0
            if len(probe.devices) == 1:
                chosen.setdefault(probe.devices[0], []).append(probe)
            elif local >= len(probe.devices):
                without.append(probe)
            else:
                chosen.setdefault(probe.devices[local], []).append(probe)
        if without:
            yield finding(
                "error",
                "device-mapping",
                f"{list_ranks(ranks_of(without)).capitalize()} of {host} have a LOCAL_RANK beyond the "
                f"{plural(len(without[0].devices), 'device')} there.",
                "Start one rank for each device: --nproc-per-node gpu",
                of=without,
            )
        for shared in chosen.values():
            if len(shared) > 1:
                yield finding(
                    "error",
                    "device-mapping",
                    f"{list_ranks(ranks_of(shared)).capitalize()} of {host} use one device between them.",
                    "Start one rank for each device, and call torch.cuda.set_device(LOCAL_RANK).",
                    of=shared,
                )
