"""Read the samples of the nodes of a run: tables with a column for each value, NaN where it is not known."""

import json
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dtprof.records import paths
from dtprof.records.nodes import node_samples
from dtprof.records.nodes.node_samples import SampleField

Table = npt.NDArray[np.void]
NEWEST_BYTES = 1 << 19
MAX_LINE_BYTES = 1 << 20
FEW_BYTES = 1 << 10
"""A file with fewer bytes per requested line is read whole."""
SILENT_AFTER_S = 10.0
"""After which a host counts as silent: it samples every second, and a launcher sends every other."""


def table_type(fields: Sequence[SampleField]) -> np.dtype[np.void]:
    """Return the columns of a table: `t_ns`, then a float for each value."""
    return np.dtype([("t_ns", np.int64), *((field.name, np.float64) for field in fields)])


@dataclass(frozen=True, kw_only=True)
class NodeSamples:
    """The samples of a node by host time; `gpus` by NVML's index, `processes` by pid."""

    node: str  # the name of its folder, less `node-`
    boot_id: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)
    host: Table = field(default_factory=lambda: np.zeros(0, table_type(node_samples.HOST)))
    cores: tuple[Table, ...] = ()
    gpus: Mapping[int, Table] = field(default_factory=dict)
    processes: Mapping[int, Table] = field(default_factory=dict)
    links: Mapping[str, Table] = field(default_factory=dict)  # by address of the other host
    no_gpus_reason: str | None = None  # why there are no samples of GPUs
    gpu_problems: tuple[str, ...] = ()  # what of some GPUs is not sampled, a sentence each
    problems: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the host, without those of the loopback."""
        known = self.description.get("addresses")
        return tuple(map(str, known)) if isinstance(known, list) else ()

    @property
    def described_gpus(self) -> dict[int, dict[str, Any]]:
        """Return what is known of each GPU besides its samples, by NVML's index: `name`, `uuid`, `memory_bytes`."""
        described = self.description.get("gpus")
        rows = [row for row in described if isinstance(row, dict)] if isinstance(described, list) else []
        return {row["index"]: row for row in rows if isinstance(row.get("index"), int)}


def read_node_samples(run: Path, *, max_samples: int | None = None) -> dict[str, NodeSamples]:
    """Return the samples of every sampled node of a run, by the node's name.

    Parameters:
        max_samples: most samples of one node, at even distances.
    """
    samples_by_node = {}
    for file in paths.node_files(run, paths.SAMPLES):
        name = paths.node_of(file.parent.name)
        samples_by_node[name] = _read(file, name, max_samples)
    return samples_by_node


def newest_by_node(run: Path, *, nbytes: int | None = None) -> list[NodeSamples]:
    """Return the newest samples of each node: some ten minutes of eight ranks where not fewer bytes are asked for."""
    files = paths.node_files(run, paths.SAMPLES)
    return [_read(file, paths.node_of(file.parent.name), newest_bytes=nbytes or NEWEST_BYTES) for file in files]


def newest_resident(run: Path) -> dict[tuple[str, int], int]:
    """Return the resident memory of processes in bytes, by boot id and pid, in their last sample alive."""
    resident: dict[tuple[str, int], int] = {}
    for samples in newest_by_node(run):
        for pid, table in samples.processes.items():
            alive = table["rss_bytes"][table["rss_bytes"] > 0]  # a process that has ended holds 0
            if len(alive):
                resident[samples.boot_id, pid] = int(alive[-1])
    return resident


def memory_shares(run: Path) -> dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """Return the share of the memory of each node in use, or of its control group's limit where that is fuller.

    By boot id: times of the newest samples (ns, CLOCK_MONOTONIC), and the shares at them.
    """
    shares = {}
    for samples in newest_by_node(run):
        host = samples.host
        charged = host["cgroup_memory_bytes"] - host["cgroup_reclaimable_bytes"]
        known = [
            used / limit
            for used, total in ((host["memory_used_bytes"], "memory_bytes"), (charged, "cgroup_limit_bytes"))
            if isinstance(limit := samples.description.get(total), int) and limit > 0
        ]
        if len(host) and known:
            shares[samples.boot_id] = host["t_ns"], np.fmax.reduce([np.where(share >= 0, share, 0) for share in known])
    return shares


def newest_samples(run: Path) -> dict[str, int]:
    """Return the time of the newest sample of each node, in ns of its monotonic clock, by boot id."""
    newest: dict[str, int] = {}
    for samples in newest_by_node(run):
        if len(samples.host):
            newest[samples.boot_id] = max(int(samples.host["t_ns"][-1]), newest.get(samples.boot_id, 0))
    return newest


def last_heard_s(run: Path) -> dict[str, float]:
    """Return when the samples of each host were last written to, by the clock of the file system, by name of the host.

    That is the clock of where the run lies, the same for all hosts: of a collector or a shared disk.
    """
    heard = {}
    for file in paths.node_files(run, paths.SAMPLES):
        with suppress(OSError):
            heard[paths.node_of(file.parent.name)] = file.stat().st_mtime
    return heard


def silent_hosts(run: Path, hosts: Collection[str], running: Container[str]) -> dict[str, float]:
    """Return of the hosts of a run those of which nothing is heard though others are, and for how long, in seconds.

    Parameters:
        hosts: all hosts with ranks.
        running: those whose ranks have not all ended: the others have nothing more to say.
    """
    if len(hosts) < 2:
        return {}
    heard_s = last_heard_s(run)
    places = {host: paths.node_name(host) for host in hosts}
    newest_s = max((heard_s[place] for place in places.values() if place in heard_s), default=0.0)
    quiet_s = {host: newest_s - heard_s[place] for host, place in places.items() if place in heard_s}
    return {host: quiet for host, quiet in quiet_s.items() if host in running and quiet >= SILENT_AFTER_S}


def rate(table: Table, name: str) -> npt.NDArray[np.float64]:
    """Return the increase a second of a total between samples; one value fewer than samples, NaN where unknown."""
    seconds = np.diff(table["t_ns"]) / 1e9
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(seconds > 0, np.diff(table[name]) / seconds, np.nan)


def _read(file: Path, name: str, max_samples: int | None = None, *, newest_bytes: int = 0) -> NodeSamples:
    problems: list[str] = []
    description: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    damaged = 0
    try:
        if newest_bytes:
            lines = _newest_lines(file, newest_bytes)
        elif max_samples is None:
            lines = file.read_bytes().split(b"\n")[:-1]  # the last one may have been cut off
        else:
            with file.open("rb") as opened:
                chosen = choose_lines(opened, file.stat().st_size, max_samples)
                lines = [line for line in dict.fromkeys(chosen) if line.endswith(b"\n")]
    except OSError as error:
        return NodeSamples(node=name, problems=(f"{file.parent.name}/{file.name} cannot be read ({error.strerror})",))
    for line in lines:
        try:
            row = json.loads(line)
            if "format" in row:
                description = row
            else:
                _check(row)
                rows.append(row)
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged += 1
    if damaged:
        problems.append(f"{file.parent.name}/{file.name} holds {damaged} damaged lines, left out")
    rows.sort(key=lambda row: int(row["t"]))
    num_cores = max((len(row["cores"]) for row in rows), default=0)
    return NodeSamples(
        node=name,
        boot_id=str(description.get("boot_id", "")),
        description=description,
        host=_table(node_samples.HOST, ((row["t"], row["host"]) for row in rows)),
        cores=tuple(
            _table(node_samples.CORE, ((row["t"], [row["cores"][n]]) for row in rows if n < len(row["cores"])))
            for n in range(num_cores)
        ),
        gpus=_keyed(node_samples.GPU, rows, "gpus"),
        processes=_keyed(node_samples.PROCESS, rows, "processes"),
        links=_by_address(rows),
        no_gpus_reason=description.get("no_gpus_reason"),
        gpu_problems=tuple(map(str, description.get("gpu_problems") or ())),
        problems=tuple(problems),
    )


def choose_lines(opened: BinaryIO, size: int, num_lines: int) -> Iterator[bytes]:
    """Yield the first line, then whole lines at even distances, all of them where they are few.

    The cost does not grow with the file.
    """
    yield opened.readline(MAX_LINE_BYTES)
    if size <= num_lines * FEW_BYTES:
        yield from opened
        return
    begin = opened.tell()
    for number in range(num_lines):
        opened.seek(begin + (size - begin) * number // num_lines)
        opened.readline(MAX_LINE_BYTES)  # the rest of the line that this place lies in
        yield opened.readline(MAX_LINE_BYTES)


def _newest_lines(file: Path, nbytes: int) -> list[bytes]:
    """Return the first line, which describes the node, and the whole ones among the last bytes."""
    with file.open("rb") as opened:
        first = opened.readline()
        begin = max(opened.tell(), file.stat().st_size - nbytes)
        opened.seek(begin)
        lines = opened.read(nbytes).split(b"\n")[:-1]
    return [first, *(lines if begin == len(first) else lines[1:])]


def _check(row: dict[str, Any]) -> None:
    """Refuse a row that is not a sample."""
    values = [
        *row["host"],
        *row["cores"],
        *(v for key in ("gpus", "processes") for vs in row[key].values() for v in vs),
        *(v for vs in row.get("links", {}).values() for v in vs),
    ]
    [int(key) for name in ("gpus", "processes") for key in row[name]]
    if not isinstance(row["t"], int) or not all(v is None or isinstance(v, int | float) for v in values):
        raise ValueError(row["t"])


def _keyed(fields: Sequence[SampleField], rows: Sequence[dict[str, Any]], name: str) -> dict[int, Table]:
    keys = sorted({int(key) for row in rows for key in row[name]})
    return {key: _table(fields, ((r["t"], r[name][str(key)]) for r in rows if str(key) in r[name])) for key in keys}


def _by_address(rows: Sequence[dict[str, Any]]) -> dict[str, Table]:
    """Return the tables of links; older versions of dtprof sampled none."""
    links = [(row["t"], row.get("links", {})) for row in rows]
    addresses = sorted({str(address) for _, by_address in links for address in by_address})
    return {to: _table(node_samples.LINK, ((t_ns, of[to]) for t_ns, of in links if to in of)) for to in addresses}


def _table(fields: Sequence[SampleField], rows: Iterable[tuple[int, Sequence[float | None]]]) -> Table:
    """Return a table; values that another version of dtprof did not sample are NaN, further ones are omitted."""
    width = len(fields)
    unknown = float("nan")
    filled = []
    for t_ns, values in rows:
        known = [unknown if value is None else float(value) for value in values[:width]]
        filled.append((t_ns, *known, *[unknown] * (width - len(known))))
    return np.array(filled, table_type(fields))
