"""Train steps of known length on 2 ranks, hybrid ones on 4; what the devices really did goes to a file of each rank.

    known_layouts.py FOLDER LAYOUT [polled] [late] [bound] [hook] [compiled]

LAYOUT is ddp, fsdp1, fsdp2, hsdp1, hsdp2, pipeline, ring or tensor_parallel. Layers take 20 ms forward and 40
backward, the optimizer 10. In a ring each layer sends a tensor on and receives one in a batch, while it computes.
`hook`: DDP reduces its buckets by a communication hook in Python. `compiled`: torch.compile traces the model into
graphs, forward and backward, that run the operators they hold.
`polled`: simccl does not give the events of its kernels.
`late`: layers of rank 1 take 10 ms more forward. `bound`: hosts wait for their devices after each step and sleep 40 ms.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import simulated_device as sim
from tests.accelerator.programs.layout_costs import (
    BACKWARD_NS,
    COSTS_NS,
    FORWARD_NS,
    LATE_NS,
    MS,
    OPTIMIZER_NS,
    SLEEP_NS,
)

STEPS, LAYERS, WIDTH, MICROBATCHES = 8, 3, 520, 4


@torch.library.custom_op("known_layouts::spin", mutates_args=())
def spin(x: torch.Tensor, time_ns: int) -> torch.Tensor:
    """Take time on the device; an operator, so that a compiler keeps it in its graph."""
    sim.spin(time_ns)
    return x.clone()


@spin.register_fake
def _shape(x: torch.Tensor, time_ns: int) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG001
    return spin(grad, BACKWARD_NS), None


spin.register_autograd(_backward)


class Layer(nn.Module):
    """A linear layer whose time is known; its gradient is there when its backward pass has ended."""

    def __init__(self, forward_ns: int) -> None:
        super().__init__()
        self.linear, self.forward_ns = nn.Linear(WIDTH, WIDTH, bias=False), forward_ns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return spin(self.linear(x), self.forward_ns)


class RingLayer(Layer):
    """A layer beside whose forward pass a tensor goes round a ring; the transfer takes longer than the pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute while the messages are under way, and wait for them."""
        rank, arriving = dist.get_rank(), torch.empty_like(x)
        messages = [
            dist.P2POp(dist.isend, x.detach().clone(), (rank + 1) % 2),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % 2),
        ]
        works = dist.batch_isend_irecv(messages)
        x = super().forward(x)
        for work in works:
            work.wait()
        return x + 0 * arriving


class Optimizer(torch.optim.SGD):
    """SGD that takes 10 ms."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step."""
        sim.spin(OPTIMIZER_NS)
        super().step(closure)


def start_together() -> None:
    """Let the devices begin at one time, when the hosts have gone ahead."""
    sim.synchronize()
    sim.configure(kernel_ns=0, copy_latency_ns=0, copy_bytes_per_s=1e15, trace=1)
    for name, cost_ns in COSTS_NS.items():
        sim.set_cost(name, cost_ns)
    together = torch.tensor([sim.now()])
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    sim.take_trace()
    sim.spin_until(int(together.item()) + 300 * MS)


def train(layout: str, late_ns: int, *, bound: bool, hook: bool, compiled: bool) -> None:
    """Train; the layers end with this function, before the groups do."""
    rank = dist.get_rank()
    hybrid: dict[str, Any] = {"mesh_shape": (2, 2), "mesh_dim_names": ("replicate", "shard")}
    mesh = init_device_mesh("sim", **(hybrid if layout.startswith("hsdp") else {"mesh_shape": (2,)}))
    kind = RingLayer if layout == "ring" else Layer
    layers = nn.Sequential(*(kind(FORWARD_NS + late_ns) for _ in range(LAYERS))).to("sim")
    x = torch.ones(MICROBATCHES if layout == "pipeline" else 1, WIDTH, device="sim")
    model: nn.Module = layers
    schedule = None
    if layout == "ddp":
        model = DistributedDataParallel(layers, bucket_cap_mb=1)
        if hook:
            model.register_comm_hook(None, allreduce_hook)
    elif layout == "ring":
        pass  # the layers do all of it
    elif layout in {"fsdp1", "hsdp1"}:
        strategy = ShardingStrategy.FULL_SHARD if layout == "fsdp1" else ShardingStrategy.HYBRID_SHARD
        options = {"device_mesh": mesh, "sharding_strategy": strategy, "device_id": torch.device("sim:0")}
        model = FullyShardedDataParallel(
            nn.Sequential(*(FullyShardedDataParallel(layer, **options) for layer in layers)), **options
        )
    elif layout in {"fsdp2", "hsdp2"}:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tensor_parallel":
        model = parallelize_module(layers[:2], mesh, {"0.linear": ColwiseParallel(), "1.linear": RowwiseParallel()})
    else:
        model = layers[rank]
        stage = PipelineStage(model, rank, 2, torch.device("sim"))
        schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=lambda out, _: out.sum())
    if compiled:
        model.compile(backend="aot_eager")
    optimizer = Optimizer(model.parameters(), lr=1e-6, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        if schedule is None:
            model(x).sum().backward()
        elif rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()

    step()
    start_together()
    for _ in range(STEPS):
        step()
        if bound:
            sim.synchronize()
            time.sleep(SLEEP_NS / 1e9)
    sim.synchronize()
    assert not compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"


def main() -> None:
    """Train, and write the trace."""
    folder, layout, *options = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,sim:simccl")
    rank = dist.get_rank()
    sim.set_device(0)
    dist.all_reduce(torch.ones(1, device="sim"))  # from here on the device is followed
    if "polled" not in options:
        sim.give_kernel_events()
    chosen = {option: option in options for option in ("bound", "hook", "compiled")}
    train(layout, LATE_NS if "late" in options and rank == 1 else 0, **chosen)
    Path(folder, f"{rank}.json").write_text(json.dumps([task._asdict() for task in sim.take_trace()]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
