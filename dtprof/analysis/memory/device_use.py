"""How GPUs worked over the run by NVML: load, clock and what held it down, heat, errors, traffic over NVLink."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from dtprof.analysis.results import GpuUse
from dtprof.analysis.stragglers.device_clocks import BUSY
from dtprof.intervals import Floats
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.nodes.node_samples import THROTTLE_REASONS
from dtprof.records.tables import Array


def measure_use(
    nodes: Iterable[NodeSamples], ranks_of: Mapping[tuple[str, str], tuple[int, ...]]
) -> tuple[GpuUse, ...]:
    """Return how each sampled GPU worked, those of a node by NVML's index.

    Parameters:
        nodes: the samples of the nodes.
        ranks_of: the ranks that compute on a device, by boot of the host and UUID of the device.
    """
    return tuple(
        _measure(node, index, rows, ranks_of)
        for node in nodes
        for index, rows in sorted(node.gpus.items())
        if len(rows)
    )


def _measure(node: NodeSamples, index: int, rows: Array, ranks_of: Mapping[tuple[str, str], tuple[int, ...]]) -> GpuUse:
    described = node.described_gpus.get(index, {})
    busy = rows[rows["utilisation"] >= BUSY]
    bits = busy["throttle_reasons"]
    bits = bits[np.isfinite(bits)].astype(np.int64)
    held = {name: float(((bits & mask) != 0).mean()) for mask, name in THROTTLE_REASONS.items() if len(bits)}
    return GpuUse(
        host=node.node,
        device=f"gpu {index}",
        name=str(described.get("name") or "") or None,
        ranks=ranks_of.get((node.boot_id, str(described.get("uuid") or "")), ()),
        utilisation=_reduced(rows["utilisation"], np.mean),
        sm_clock_mhz=_reduced(busy["sm_clock_mhz"], np.median),
        held_down={name: share for name, share in held.items() if share > 0} if len(bits) else None,
        power_w=_reduced(rows["power_w"], np.mean),
        temperature_c=_reduced(rows["temperature_c"], np.max),
        nvlink_bytes_per_s=_rate(rows, "nvlink_sent_bytes"),
        ecc_corrected=_growth(rows["ecc_corrected"]),
        ecc_uncorrected=_growth(rows["ecc_uncorrected"]),
        xid_errors=_count(_reduced(rows["xid_errors"], np.max)),
        last_xid=_count(_last(rows["last_xid"])),
        lost=bool((rows["lost"] == 1).any()) if np.isfinite(rows["lost"]).any() else None,
    )


def _known(column: Floats) -> Floats:
    return column[np.isfinite(column)]


def _reduced(column: Floats, reduce: Callable[[Floats], float]) -> float | None:
    known = _known(column)
    return float(reduce(known)) if len(known) else None


def _last(column: Floats) -> float | None:
    known = _known(column)
    return float(known[-1]) if len(known) else None


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)


def _growth(column: Floats) -> int | None:
    """Return by how much a counter grew between the first sample that has it and the last."""
    known = _known(column)
    return round(float(known[-1] - known[0])) if len(known) else None


def _rate(rows: Array, name: str) -> float | None:
    known = rows[np.isfinite(rows[name])]
    if len(known) < 2 or known["t_ns"][-1] <= known["t_ns"][0]:
        return None
    return float(known[name][-1] - known[name][0]) / float(known["t_ns"][-1] - known["t_ns"][0]) * 1e9
