"""Traces of torch.profiler as a GPU job writes them, made up, with figures that can be worked out by hand.

Every step launches layers of kernels from the host; an all-reduce of each layer runs on a stream of its own beside the
next layer. Times in us, whole numbers.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCH_US = 5
KERNEL_US = 90
GAP_US = 10
BEHIND_US = 200
"""The device runs a kernel this long after the host launched it."""

_SHAPES = {
    "Concrete Inputs": ["", "", "1"],
    "Input type": ["float", "float", "Scalar"],
    "Input Strides": [[1024, 1], [1024, 1], []],
    "Input Dims": [[512, 1024], [512, 1024], []],
    "Sequence number": 4711,
    "Fwd thread id": 0,
}
"""What record_shapes=True adds to an operator."""
_GRID = {
    "queued": 0,
    "context": 1,
    "registers per thread": 32,
    "shared memory": 0,
    "blocks per SM": 7.75,
    "warps per SM": 31.03,
    "grid": [1024, 1, 1],
    "block": [128, 1, 1],
    "est. achieved occupancy %": 48,
}
"""What Kineto tells of a kernel."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the traces are."""

    ranks: int = 2
    steps: int = 4
    layers: int = 4
    kernels: int = 3  # of a layer
    operators: int = 4  # of each kernel, nested

    @property
    def layer_us(self) -> int:
        """How long a layer takes on the device."""
        return self.kernels * (KERNEL_US + GAP_US)


def write_traces(folder: Path, shape: Shape) -> list[Path]:
    """Write a trace for each rank; the communication of rank 0 begins 40 us before that of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(shape.ranks):
        path = folder / f"rank{rank}.json"
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": rank, "name": "GPU"}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": shape.ranks,
                "pg_config": [
                    {"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(shape.ranks)), "pg_size": shape.ranks}
                ],
            },
            "host_name": "node",
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        }
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(head, indent=1)[:-2] + ',\n"traceEvents": [\n')
            for number, event in enumerate(_events(rank, shape)):
                file.write((",\n" if number else "") + json.dumps(event, indent=1))
            file.write('\n],\n"traceName": "made-up.json"\n}\n')
        paths.append(path)
    return paths


def _events(rank: int, shape: Shape) -> Iterator[dict[str, Any]]:
    correlation, external = 1, 1
    step_us = shape.layers * shape.layer_us + 1000
    for step in range(shape.steps):
        begin = 1_000_000 + step * step_us
        yield _event("user_annotation", f"ProfilerStep#{step + 5}", begin, step_us, rank, {"External id": external})
        for layer in range(shape.layers):
            for kernel in range(shape.kernels):
                at = begin + layer * shape.layer_us + kernel * (KERNEL_US + GAP_US)
                for depth in range(shape.operators):
                    external += 1
                    arguments = {"External id": external, "Record function id": 0, **_SHAPES, "Ev Idx": external}
                    yield _event("cpu_op", f"aten::op{depth}", at + depth, 40 - 2 * depth, rank, arguments)
                launch = {"correlation": correlation, "cbid": 211, "External id": external}
                yield _event("cuda_runtime", "cudaLaunchKernel", at + 20, LAUNCH_US, rank, launch)
                run = {"External id": external, **_GRID, "device": rank, "stream": 7, "correlation": correlation}
                name = "void at::native::vectorized_elementwise_kernel<4>"
                yield _event("kernel", name, at + BEHIND_US, KERNEL_US, rank, run, thread=7)
                correlation += 1
            yield from _all_reduce(rank, begin + layer * shape.layer_us, shape, correlation)
            correlation += 1


def _all_reduce(rank: int, at: int, shape: Shape, correlation: int) -> Iterator[dict[str, Any]]:
    """Yield the reduction of a layer: from the end of the layer, but on rank 0 40 us later, to 150 us after it."""
    end = at + BEHIND_US + shape.layer_us
    begin = end + (0 if rank == 0 else 40)
    launch = {"correlation": correlation, "cbid": 211}
    yield _event("cuda_runtime", "cudaLaunchKernelExC", at + shape.layer_us - 20, LAUNCH_US, rank, launch)
    arguments = {
        "correlation": correlation,
        "stream": 20,
        "device": rank,
        "Collective name": "allreduce",
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 20,
        "Group size": shape.ranks,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(range(shape.ranks))),
    }
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    yield _event("kernel", name, begin, end + 150 - begin, rank, arguments, thread=20)


def _event(
    category: str, name: str, begin: int, length: int, rank: int, arguments: dict[str, Any], *, thread: int = 100
) -> dict[str, Any]:
    process = rank if category == "kernel" else 1000 + rank
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": arguments,
    }
