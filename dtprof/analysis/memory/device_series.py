"""Processors, memories and GPUs of the nodes over the run, from the samples of their launchers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.columns import known_medians
from dtprof.intervals import Column, Floats
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.tables import Array

MAX_SAMPLES = 400
"""Of one node."""
MAX_OF_ALL = 20_000
"""Of all nodes together."""
POINTS = 200
"""Of the time that devices share where they are summed up."""


@dataclass(frozen=True, kw_only=True)
class DeviceSeries:
    """One device over time; quantities that were not sampled have no column."""

    host: str
    device: str  # "host", "gpu 0"
    t_ns: Column  # since the first sample of the node
    values: Mapping[str, Floats]  # busy: share; memory: bytes; traffic: bytes/s; power: W; clock: MHz; temperature: C


@dataclass(frozen=True, kw_only=True)
class NodeSeries:
    """All nodes that were sampled."""

    devices: tuple[DeviceSeries, ...] = ()
    no_gpus: Mapping[str, str] = field(default_factory=dict)  # the reason, by host


def samples_each(num_nodes: int) -> int:
    """Return how many samples of each node are worth reading."""
    return max(20, min(MAX_SAMPLES, MAX_OF_ALL // max(1, num_nodes)))


def follow_devices(nodes: Iterable[NodeSamples]) -> NodeSeries:
    """Return the time series of every device: of each node the host's, then those of its GPUs."""
    devices: list[DeviceSeries] = []
    reasons: dict[str, str] = {}
    for node in nodes:
        if len(node.host) > 1:
            origin = int(node.host["t_ns"][0])
            devices.append(_follow_host(node, origin))
            devices += (_follow_gpu(node.node, number, rows, origin) for number, rows in node.gpus.items() if len(rows))
        if not node.gpus:
            reasons[node.node] = node.no_gpus_reason or "none was found"
    return NodeSeries(devices=tuple(devices), no_gpus=reasons)


def _follow_host(node: NodeSamples, origin: int) -> DeviceSeries:
    """Return the quantity between two samples at the time of the later one."""
    rows = node.host
    seconds = np.diff(rows["t_ns"]) / 1e9
    sent = np.nan_to_num(rows["net_sent_bytes"]) + np.nan_to_num(rows["loopback_bytes"])
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {
            "busy": np.clip(np.diff(rows["cpu_busy_s"]) / seconds / max(1, len(node.cores)), 0, 1),
            "memory": rows["memory_used_bytes"][1:],
            "traffic": np.diff(sent) / seconds,
        }
    return _series(node.node, "host", rows["t_ns"][1:] - origin, values)


def _follow_gpu(host: str, number: int, rows: Array, origin: int) -> DeviceSeries:
    values = {
        "busy": rows["utilisation"],
        "memory": rows["memory_used_bytes"],
        "power": rows["power_w"],
        "clock": rows["sm_clock_mhz"],
        "temperature": rows["temperature_c"],
    }
    return _series(host, f"gpu {number}", rows["t_ns"] - origin, values)


def _series(host: str, device: str, t_ns: Column, values: Mapping[str, Floats]) -> DeviceSeries:
    known = {name: column for name, column in values.items() if np.isfinite(column).any()}
    return DeviceSeries(host=host, device=device, t_ns=t_ns, values=known)


def spread_of(devices: Sequence[DeviceSeries]) -> dict[str, tuple[Floats, dict[str, Floats]]]:
    """Return the least, the median and the most of devices over time: times in ns, values; empty without devices."""
    if not devices:
        return {}
    t_ns = np.linspace(0, max(float(device.t_ns[-1]) for device in devices), POINTS)
    columns: dict[str, list[Floats]] = {}
    for device in devices:
        for name, column in device.values.items():
            known = np.isfinite(column)
            at = device.t_ns[known]
            columns.setdefault(name, []).append(np.interp(t_ns, at, column[known], left=np.nan, right=np.nan))
    return {
        "least": (t_ns, {name: np.fmin.reduce(values) for name, values in columns.items()}),
        "median": (t_ns, {name: known_medians(np.array(values)) for name, values in columns.items()}),
        "most": (t_ns, {name: np.fmax.reduce(values) for name, values in columns.items()}),
    }


def extremes_of(column: Floats) -> tuple[float, float, float]:
    """Return minimum, mean and maximum of the known values."""
    return float(np.nanmin(column)), float(np.nanmean(column)), float(np.nanmax(column))


def mean_busy(devices: Sequence[DeviceSeries]) -> float | None:
    """Return the share of time in which devices were busy, on average; None where that was not sampled."""
    busy = [extremes_of(column)[1] for device in devices if (column := device.values.get("busy")) is not None]
    return sum(busy) / len(busy) if busy else None
