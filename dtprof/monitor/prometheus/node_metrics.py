"""Facts of a node that its launcher knows, as Prometheus metrics: processors, memory, devices."""

from collections.abc import Iterator

from prometheus_client import Metric

from dtprof.monitor.prometheus import metric_catalogue as c
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.records.nodes.node_samples import GPU, HOST, Value

THROTTLES = {"power": 4 | 128, "heat": 32 | 64, "hardware": 8}
"""Bits of NVML's throttling reasons."""


def list_node_metrics(state: NodeState) -> Iterator[Metric]:
    """Return the metrics of the node and its devices; none where it is not sampled."""
    if state.sample is None:
        return
    host = dict(zip((column.name for column in HOST), state.sample.host, strict=False))
    busy, system = host.get("cpu_busy_s"), host.get("cpu_system_s")
    user = busy - system if busy is not None and system is not None else None
    modes = {"user": user, "system": system, "iowait": host.get("cpu_iowait_s"), "steal": host.get("cpu_steal_s")}
    yield c.NODE_CPU.family({(mode,): value for mode, value in modes.items() if value is not None})
    for metric, value in (
        (c.NODE_MEMORY, host.get("memory_used_bytes")),
        (c.NODE_MEMORY_SIZE, _number(state.description.get("memory_bytes"))),
        (c.NODE_SWAP, host.get("swap_used_bytes")),
    ):
        yield metric.single(value)
    yield from _gpus(state)


def _gpus(state: NodeState) -> Iterator[Metric]:
    assert state.sample is not None
    described = state.description.get("gpus")
    rows = described if isinstance(described, list) else []
    devices = {str(row.get("index")): row for row in rows if isinstance(row, dict)}
    values = {
        str(index): dict(zip((column.name for column in GPU), row, strict=False))
        for index, row in state.sample.gpus.items()
    }
    yield c.GPU_INFO.family(
        {(gpu, str(device.get("name")), str(device.get("uuid"))): 1 for gpu, device in devices.items()}
    )
    sizes = ((gpu, _number(device.get("memory_bytes"))) for gpu, device in devices.items())
    yield c.GPU_MEMORY_SIZE.family({(gpu,): size for gpu, size in sizes if size is not None})
    for metric, name, scale in (
        (c.GPU_UTILISATION, "utilisation", 1.0),
        (c.GPU_MEMORY, "memory_used_bytes", 1.0),
        (c.GPU_POWER, "power_w", 1.0),
        (c.GPU_ENERGY, "energy_j", 1.0),
        (c.GPU_TEMPERATURE, "temperature_c", 1.0),
        (c.GPU_CLOCK, "sm_clock_mhz", 1e6),
        (c.GPU_XID, "xid_errors", 1.0),
    ):
        yield metric.family({(gpu,): value * scale for gpu, own in values.items() if (value := own[name]) is not None})
    yield c.GPU_THROTTLED.family(
        {
            (gpu, reason): int(bool(int(bits) & mask))
            for gpu, own in values.items()
            if (bits := own["throttle_reasons"]) is not None
            for reason, mask in THROTTLES.items()
        }
    )
    yield c.GPU_ECC.family(
        {
            (gpu, kind): value
            for gpu, own in values.items()
            for kind in ("corrected", "uncorrected")
            if (value := own[f"ecc_{kind}"]) is not None
        }
    )


def _number(value: object) -> Value:
    return value if isinstance(value, int | float) else None
