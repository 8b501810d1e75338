"""Read the samples of the nodes of a run: tables with a column for each value, NaN where it is not known."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.records import node_samples
from dtprof.records.node_samples import SampleField
from dtprof.records.sparse_lines import choose_lines

Table = npt.NDArray[np.void]
NEWEST_BYTES = 1 << 19


def table_type(fields: Sequence[SampleField]) -> np.dtype[np.void]:
    """Return the columns of a table: `t_ns`, then a float for each value."""
    return np.dtype([("t_ns", np.int64), *((one.name, np.float64) for one in fields)])


@dataclass(frozen=True, kw_only=True)
class NodeSamples:
    """What was sampled on one node, by host time; `gpus` by NVML's index, `processes` by pid."""

    node: str  # the name of its folder, less `node-`
    boot_id: str = ""
    description: Mapping[str, Any] = field(default_factory=dict)
    host: Table = field(default_factory=lambda: np.zeros(0, table_type(node_samples.HOST)))
    cores: tuple[Table, ...] = ()
    gpus: Mapping[int, Table] = field(default_factory=dict)
    processes: Mapping[int, Table] = field(default_factory=dict)
    no_gpus_reason: str | None = None  # why there are no samples of GPUs
    problems: tuple[str, ...] = ()


def read_node_samples(run: Path, *, max_samples: int | None = None) -> dict[str, NodeSamples]:
    """Return the samples of every node of a run that has any, by the node's name.

    Parameters:
        max_samples: of one node; of more, those at even distances.
    """
    found = {}
    for file in sorted(run.glob(f"node-*/{node_samples.FILE}")):
        name = file.parent.name.removeprefix("node-")
        found[name] = _read(file, name, max_samples)
    return found


def newest_resident(run: Path) -> dict[tuple[str, int], int]:
    """Return the memory that processes held in RAM, in bytes, by boot id and pid, as each was last sampled alive.

    Of each node only the newest samples are looked at: some ten minutes of eight ranks.
    """
    found: dict[tuple[str, int], int] = {}
    for samples in (
        _read(file, file.parent.name.removeprefix("node-"), newest_only=True)
        for file in sorted(run.glob(f"node-*/{node_samples.FILE}"))
    ):
        for pid, table in samples.processes.items():
            alive = table["rss_bytes"][table["rss_bytes"] > 0]  # of a process that has ended nothing is left
            if len(alive):
                found[samples.boot_id, pid] = int(alive[-1])
    return found


def newest_samples(run: Path) -> dict[str, int]:
    """Return when each node of a run was last sampled, in ns of its monotonic clock, by boot id."""
    found: dict[str, int] = {}
    for file in run.glob(f"node-*/{node_samples.FILE}"):
        samples = _read(file, file.parent.name.removeprefix("node-"), newest_only=True)
        if len(samples.host):
            found[samples.boot_id] = max(int(samples.host["t_ns"][-1]), found.get(samples.boot_id, 0))
    return found


def rate(table: Table, name: str) -> npt.NDArray[np.float64]:
    """Return the increase a second of a total between samples; one value fewer than samples, NaN where unknown."""
    seconds = np.diff(table["t_ns"]) / 1e9
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(seconds > 0, np.diff(table[name]) / seconds, np.nan)


def _read(file: Path, name: str, max_samples: int | None = None, *, newest_only: bool = False) -> NodeSamples:
    problems: list[str] = []
    description: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    damaged = 0
    try:
        if newest_only:
            lines = _newest_lines(file)
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
        no_gpus_reason=description.get("no_gpus_reason"),
        problems=tuple(problems),
    )


def _newest_lines(file: Path) -> list[bytes]:
    """Return the first line, which describes the node, and the whole ones among the last bytes."""
    with file.open("rb") as opened:
        first = opened.readline()
        begin = max(opened.tell(), file.stat().st_size - NEWEST_BYTES)
        opened.seek(begin)
        lines = opened.read(NEWEST_BYTES).split(b"\n")[:-1]
    return [first, *(lines if begin == len(first) else lines[1:])]


def _check(row: dict[str, Any]) -> None:
    """Refuse a row that is not a sample."""
    values = [
        *row["host"],
        *row["cores"],
        *(v for key in ("gpus", "processes") for vs in row[key].values() for v in vs),
    ]
    [int(key) for name in ("gpus", "processes") for key in row[name]]
    if not isinstance(row["t"], int) or not all(v is None or isinstance(v, int | float) for v in values):
        raise ValueError(row["t"])


def _keyed(fields: Sequence[SampleField], rows: Sequence[dict[str, Any]], name: str) -> dict[int, Table]:
    keys = sorted({int(key) for row in rows for key in row[name]})
    return {key: _table(fields, ((r["t"], r[name][str(key)]) for r in rows if str(key) in r[name])) for key in keys}


def _table(fields: Sequence[SampleField], rows: Iterable[tuple[int, Sequence[float | None]]]) -> Table:
    """Return a table; values that an older or newer dtprof lacks are unknown, those it has more are left out."""
    width = len(fields)
    unknown = float("nan")
    filled = []
    for t_ns, values in rows:
        known = [unknown if value is None else float(value) for value in values[:width]]
        filled.append((t_ns, *known, *[unknown] * (width - len(known))))
    return np.array(filled, table_type(fields))
