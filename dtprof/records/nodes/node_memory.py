"""Read how much memory each node and each of its devices has, and the most that was in use.

Of long files lines at even distances are read, so that the cost does not grow with hours times nodes.
"""

import json
from pathlib import Path
from typing import Any, BinaryIO

from dtprof.records import paths
from dtprof.records.nodes import node_samples
from dtprof.records.nodes.node_reader import choose_lines
from dtprof.records.tables import NodeMemory

MAX_LINES = 1 << 14
"""Lines read of all nodes together."""
LEAST_LINES, MOST_LINES = 16, 1024
"""Lines read of one node."""
_HOST_USED, _CHARGED, _RECLAIMABLE = (
    [column.name for column in node_samples.HOST].index(name)
    for name in ("memory_used_bytes", "cgroup_memory_bytes", "cgroup_reclaimable_bytes")
)
_GPU_USED = [column.name for column in node_samples.GPU].index("memory_used_bytes")


def read_node_memory(run: Path) -> tuple[NodeMemory, ...]:
    """Return the memories of the sampled nodes: of the host, its container and its devices."""
    files = paths.node_files(run, paths.SAMPLES)
    num_lines = min(MOST_LINES, max(LEAST_LINES, MAX_LINES // max(1, len(files))))
    found: list[NodeMemory] = []
    for file in files:
        try:
            with file.open("rb") as opened:
                found += _read(opened, file.stat().st_size, num_lines, paths.node_of(file.parent.name))
        except OSError:
            continue  # `read_node_samples` reports unreadable samples
    return tuple(found)


def _read(opened: BinaryIO, size: int, num_lines: int, node: str) -> list[NodeMemory]:
    description: dict[str, Any] = {}
    most: dict[str, float] = {}
    for line in choose_lines(opened, size, num_lines):
        try:
            row = json.loads(line)
            if "format" in row:
                description = row
                continue
            used = {"host": row["host"][_HOST_USED], "container": _used_by_container(row["host"])}
            used |= {f"gpu {int(number)}": values[_GPU_USED] for number, values in row["gpus"].items()}
            for name, value in used.items():
                if isinstance(value, int | float):
                    most[name] = max(most.get(name, 0.0), value)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            continue
    return [
        NodeMemory(host=node, device=name, capacity_bytes=capacity, most_used_bytes=int(most[name]))
        for name, capacity in _capacities(description).items()
        if name in most
    ]


def _used_by_container(host: list[float | None]) -> float | None:
    """Return the memory charged to the control group of the job, less the part that the kernel can reclaim."""
    charged = host[_CHARGED]
    reclaimable = host[_RECLAIMABLE] if len(host) > _RECLAIMABLE else None  # older runs have no such value
    return None if charged is None else charged - (reclaimable or 0)


def _capacities(description: dict[str, Any]) -> dict[str, int]:
    """Return the known memory sizes of the host, its container and each device.

    The container has the limit of the job, where that is below the memory of the host.
    """
    size, limit = description.get("memory_bytes"), description.get("cgroup_limit_bytes")
    found = {"host": size}
    if isinstance(limit, int) and not (isinstance(size, int) and limit >= size):
        found["container"] = limit
    gpus = description.get("gpus")
    for number, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        if isinstance(gpu, dict):
            found[f"gpu {gpu.get('index', number)}"] = gpu.get("memory_bytes")
    return {name: size for name, size in found.items() if isinstance(size, int) and size > 0}
