"""The documents of `dtprof doctor`: what one rank of a launch found out, and what all measured together.

A probe writes its document again at each stage, so that a rank that gets no further leaves what it knows. Standard
library only: written inside the job. Times in ns, sizes in bytes, rates in GB/s (1e9 bytes a second).
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtprof.records import writer

STAGES = ("started", "facts", "rendezvous", "joining", "measuring", "done")
"""How far a rank came; in this order."""
PREFIX = "probe-rank-"
JOINT = "probe-all-"


@dataclass(kw_only=True)
class Interface:
    """A network interface with its IPv4 address."""

    name: str
    address: str | None = None
    is_up: bool = True
    is_loopback: bool = False
    megabits_per_s: int | None = None  # as negotiated; None: the driver does not say


@dataclass(kw_only=True)
class Link:
    """What one rank measured towards another: bytes go from `sender` to `receiver`."""

    sender: int
    receiver: int
    gb_per_s: list[float] = field(default_factory=list)  # one for each repetition
    latency_ns: list[float] = field(default_factory=list)  # half a round trip of 8 bytes
    backend: str = "gloo"


@dataclass(kw_only=True)
class CollectiveTimes:
    """One collective of one size: the time of the slowest rank in each repetition."""

    group: str  # "0": all ranks; a host's name: the ranks of that host
    ranks: list[int]
    op: str
    nbytes: int  # S of nccl-tests
    times_ns: list[float] = field(default_factory=list)
    backend: str = "gloo"


@dataclass(kw_only=True)
class RankProbe:
    """What one rank found out; None where it could not."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    host: str = ""
    pid: int = 0
    stage: str = "started"
    error: str | None = None  # why it came no further
    launcher: str = ""  # torchrun, mpirun, srun, env, none
    launcher_pid: int = 0
    variables: dict[str, str] = field(default_factory=dict)  # of launchers
    master: str | None = None  # address and port of the rendezvous, as given
    master_port: int | None = None
    master_addresses: list[str] = field(default_factory=list)  # that the name resolves to here
    master_error: str | None = None
    own_addresses: list[str] = field(default_factory=list)  # that this host's own name resolves to
    own_error: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # variables of NCCL, gloo, OpenMP and torch
    interfaces: list[Interface] = field(default_factory=list)
    has_infiniband: bool = False
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    open_files: int | None = None  # soft limits; -1: none
    locked_memory_bytes: int | None = None
    processes: int | None = None
    user_threads: int | None = None  # that this user runs already
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None
    cores: list[int] = field(default_factory=list)
    core_quota: float | None = None  # of the control group, in cores
    threads: int | None = None  # that torch computes with
    disk_path: str = ""
    disk_kind: str = ""
    disk_free_bytes: int | None = None
    disk_mb_per_s: float | None = None
    disk_sync_ns: float | None = None
    disk_error: str | None = None
    devices: list[str] = field(default_factory=list)  # unique ids, as torch counts them in this rank
    gpus: list[dict[str, Any]] = field(default_factory=list)  # of NVML, from one rank of a host
    gpu_error: str | None = None
    listens_at: str | None = None
    unreachable: dict[str, str] = field(default_factory=dict)  # address by host that did not answer
    joined_ns: float | None = None
    clock_offset_ns: float | None = None  # CLOCK_MONOTONIC of rank 0's host minus that of this one
    clock_error_ns: float | None = None
    clock_drift_ppm: float | None = None
    clock_drift_error_ppm: float | None = None
    wall_offset_ns: float | None = None  # wall clock of rank 0's host minus that of this one
    clock_reason: str | None = None


@dataclass(kw_only=True)
class JointProbe:
    """What the ranks found out together, as one rank of a host saw it."""

    rank: int
    probes: list[RankProbe] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    collectives: list[CollectiveTimes] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)  # sentences


def to_json(document: RankProbe | JointProbe) -> str:
    """Return a document as one line of JSON."""
    return json.dumps(dataclasses.asdict(document), separators=(",", ":"))


def write_probe(folder: Path, probe: RankProbe) -> None:
    """Write what a rank knows so far.

    Raises:
        OSError: the folder cannot be written to.
    """
    writer.write_json(folder / f"{PREFIX}{probe.rank}-{probe.host}-{probe.pid}.json", dataclasses.asdict(probe))


def write_joint(folder: Path, joint: JointProbe) -> None:
    """Write what the ranks found out together.

    Raises:
        OSError: the folder cannot be written to.
    """
    writer.write_json(folder / f"{JOINT}{joint.rank}.json", dataclasses.asdict(joint))


def parse_probe(fields: Mapping[str, Any]) -> RankProbe:
    """Return a rank's document; fields of a newer dtprof are passed over.

    Raises:
        TypeError, KeyError, ValueError: it is none.
    """
    known = _known(RankProbe, fields)
    known["interfaces"] = [Interface(**_known(Interface, interface)) for interface in known.get("interfaces", ())]
    return RankProbe(**known)


def parse_link(fields: Mapping[str, Any]) -> Link:
    """Return a link; see `parse_probe`."""
    return Link(**_known(Link, fields))


def parse_collective(fields: Mapping[str, Any]) -> CollectiveTimes:
    """Return the times of a collective; see `parse_probe`."""
    return CollectiveTimes(**_known(CollectiveTimes, fields))


def parse_joint(fields: Mapping[str, Any]) -> JointProbe:
    """Return a joint document; see `parse_probe`."""
    return JointProbe(
        rank=int(fields["rank"]),
        probes=[parse_probe(probe) for probe in fields.get("probes", ())],
        links=[parse_link(link) for link in fields.get("links", ())],
        collectives=[parse_collective(collective) for collective in fields.get("collectives", ())],
        unmeasured=[str(text) for text in fields.get("unmeasured", ())],
    )


def add_measured(joint: JointProbe, other: JointProbe) -> None:
    """Add what another rank measured; of collectives, which all ranks of a group time, the first is kept."""
    joint.links += other.links
    known = {(row.backend, row.group, row.op, row.nbytes) for row in joint.collectives}
    joint.collectives += [row for row in other.collectives if (row.backend, row.group, row.op, row.nbytes) not in known]
    joint.unmeasured += [text for text in other.unmeasured if text not in joint.unmeasured]


def read_probes(folder: Path) -> JointProbe:
    """Return what the ranks left in a folder, put together: of each rank the document that got furthest."""
    probes: dict[tuple[int, str, int], RankProbe] = {}
    joint = JointProbe(rank=-1)
    for file in sorted(folder.glob(f"{JOINT}*.json")):
        try:
            found = parse_joint(_read(file))
        except (TypeError, KeyError, ValueError):
            continue  # a half one, of a disk that is full
        for probe in found.probes:
            _keep_further(probes, probe)
        if len(found.links) + len(found.collectives) >= len(joint.links) + len(joint.collectives):
            joint.links, joint.collectives, joint.unmeasured = found.links, found.collectives, found.unmeasured
    for file in sorted(folder.glob(f"{PREFIX}*.json")):
        try:
            _keep_further(probes, parse_probe(_read(file)))
        except (TypeError, KeyError, ValueError):
            continue
    joint.probes = [probes[key] for key in sorted(probes)]
    return joint


def _keep_further(probes: dict[tuple[int, str, int], RankProbe], probe: RankProbe) -> None:
    key = (probe.rank, probe.host, probe.pid)
    known = probes.get(key)
    if known is None or STAGES.index(probe.stage) >= STAGES.index(known.stage):
        probes[key] = probe


def _known(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in fields.items() if name in names}


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
