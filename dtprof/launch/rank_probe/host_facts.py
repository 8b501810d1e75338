"""What a rank finds out by itself: versions, variables, interfaces, limits, memory, cores, disk, devices.

Each part is taken by itself: one that cannot be read is left unknown. Standard library, torch where it is passed.
"""

import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtprof import __version__, fence, launchers
from dtprof.launch import memory_cgroup, storage
from dtprof.records import writer
from dtprof.records.rank_probes import Interface, RankProbe

SETTINGS = re.compile(
    r"(NCCL|RCCL|GLOO|TORCH|TORCHELASTIC|OMP|MKL|KMP|GOMP|CUDA|PYTORCH|UCX|FI|OFI|TP|MALLOC)_\w+|PYTHON(UNBUFFERED|HASHSEED)"
)
OF_ONE_RANK = re.compile(
    r"(TORCHELASTIC_\w+|CUDA_VISIBLE_DEVICES|TORCH_NCCL_ENABLE_TIMING|TORCH_SHOW_CPP_STACKTRACES|\w*RANK\w*)"
)
"""Variables that differ between ranks in a sound job, or that dtprof sets."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL")
SIOCGIFADDR = 0x8915
IFF_UP, IFF_LOOPBACK = 0x1, 0x8
NETWORKS = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
WRITTEN_BYTES = 16 << 20
WRITE_LIMIT_S = 2.0


def place_of_rank(environment: dict[str, str]) -> RankProbe:
    """Return the document of this rank as it begins: its place, and the variables of its launcher."""
    place = launchers.read_rank_place(environment)
    port = environment.get("MASTER_PORT", "")
    return RankProbe(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        launcher=place.launcher,
        launcher_pid=os.getppid(),
        host=writer.host_name(),
        pid=os.getpid(),
        variables=launchers.select_variables(environment),
        settings={
            name: text
            for name, text in environment.items()
            if SETTINGS.fullmatch(name) and not OF_ONE_RANK.fullmatch(name) and not SECRET.search(name)
        },
        master=environment.get("MASTER_ADDR"),
        master_port=int(port) if port.isdecimal() else None,
    )


def fill_host_facts(probe: RankProbe, folder: Path, torch: Any) -> None:
    """Fill in what this rank can say without the others."""
    for part in (_versions, _cores, _devices):
        fence.fenced(f"a part of the probe ({part.__name__})", "is left out")(part)(probe, torch)
    for other in (_names, _interfaces, _limits, _memory):
        fence.fenced(f"a part of the probe ({other.__name__})", "is left out")(other)(probe)
    if not probe.local_rank:  # the first of its host, or of unknown place
        fill_disk(probe, folder)
        fence.fenced(f"a part of the probe ({_gpus.__name__})", "is left out")(_gpus)(probe)


def _versions(probe: RankProbe, torch: Any) -> None:
    cuda = getattr(torch.version, "cuda", None)
    probe.versions = {"python": platform.python_version(), "torch": str(torch.__version__), "dtprof": __version__}
    if cuda:
        probe.versions["cuda"] = str(cuda)
    if torch.cuda.is_available():
        with suppress(Exception):
            probe.versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))


def _cores(probe: RankProbe, torch: Any) -> None:
    probe.cores = sorted(os.sched_getaffinity(0))
    probe.threads = int(torch.get_num_threads())
    with suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            probe.core_quota = int(quota) / int(period)


def _devices(probe: RankProbe, torch: Any) -> None:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            probe.devices.append(str(getattr(properties, "uuid", "") or index))


def _names(probe: RankProbe) -> None:
    if probe.master is not None:
        probe.master_addresses, probe.master_error = _resolve(probe.master)
    probe.own_addresses, probe.own_error = _resolve(socket.gethostname())


def _resolve(name: str) -> tuple[list[str], str | None]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(getattr(error, "strerror", None) or error)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found)), None


def _interfaces(probe: RankProbe) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            flags = int(_text(NETWORKS / name / "flags") or "0x1", 16)
            speed = _text(NETWORKS / name / "speed")
            address = None
            with suppress(OSError):
                packed = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(packed[20:24])
            probe.interfaces.append(
                Interface(
                    name=name,
                    address=address,
                    is_up=bool(flags & IFF_UP),
                    is_loopback=bool(flags & IFF_LOOPBACK),
                    megabits_per_s=int(speed) if speed and speed.isdecimal() else None,
                )
            )
    probe.has_infiniband = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def _limits(probe: RankProbe) -> None:
    usage = shutil.disk_usage(SHARED_MEMORY)
    probe.shared_memory_bytes, probe.shared_memory_free_bytes = usage.total, usage.free
    probe.open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    probe.locked_memory_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    probe.processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if not probe.local_rank:
        probe.user_threads = _count_threads(os.getuid())


def _count_threads(user: int) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if entry.stat().st_uid == user:
                    count += len(list((entry / "task").iterdir()))
    return count


def _memory(probe: RankProbe) -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    group = memory_cgroup.find_memory_cgroup()
    limit = group.limit_bytes() if group is not None else None
    probe.memory_limit_bytes = limit
    if group is not None and limit is not None:
        left = limit - (group.charged_bytes() or 0) + (group.reclaimable_bytes() or 0)
        available = left if available is None else min(available, left)
    probe.memory_available_bytes = available


def fill_disk(probe: RankProbe, folder: Path) -> None:
    """Fill in free space and speed of the disk under the run directory: a file is written, synced, and removed."""
    probe.disk_path = str(folder)
    file = folder / f".speed-{probe.host}-{probe.rank}"
    try:
        place = storage.examine(folder)
        probe.disk_kind, probe.disk_free_bytes = place.kind, place.free_bytes
        if place.free_bytes < 4 * WRITTEN_BYTES:
            return
        block = os.urandom(1 << 20)
        written = 0
        began = time.perf_counter()
        with file.open("wb", buffering=0) as stream:
            while written < WRITTEN_BYTES and time.perf_counter() - began < WRITE_LIMIT_S:
                written += stream.write(block) or 0
            before_sync = time.perf_counter()
            os.fsync(stream.fileno())
        ended = time.perf_counter()
        probe.disk_mb_per_s = written / 1e6 / (ended - began)
        probe.disk_sync_ns = (ended - before_sync) * 1e9
    except OSError as error:
        probe.disk_error = error.strerror or str(error)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def _gpus(probe: RankProbe) -> None:
    try:
        from dtprof.launch import gpu_sampler  # needs psutil, which the job's interpreter may lack
    except ImportError as error:
        probe.gpu_error = f"{error.name} is not installed for this interpreter"
        return
    gpus, probe.gpu_error = gpu_sampler.open_gpus(os.getpid())
    if gpus is None:
        return
    from dtprof.records.nodes.node_samples import GPU

    names = [column.name for column in GPU]
    samples = gpus.sample()
    for described in gpus.describe():
        index = int(str(described["index"]))
        probe.gpus.append({**described, **dict(zip(names, samples.get(index, ()), strict=False))})
    gpus.close()
