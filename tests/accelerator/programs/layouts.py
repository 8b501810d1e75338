"""Train one small transformer as DDP, FSDP2, two pipeline stages and tensor parallel, on the device and on the CPU over
gloo; print the losses of both as JSON.
"""

import copy
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.accelerator import simulated_device as sim

STEPS, VOCABULARY, WIDTH, BATCH, LENGTH = 3, 50, 32, 4, 8


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend causally, then transform each position."""
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 4, WIDTH // 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """Two blocks between embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Average over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(device: str, *, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw on the CPU what both devices train on."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=generator)
    return [(x[:, :-1].contiguous().to(device), x[:, 1:].contiguous().to(device)) for x in drawn]


def train(model: nn.Module, device: str, *, seed: int, foreach: bool = True) -> list[float]:
    """Return the loss of each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach), []
    for x, y in batches(device, seed=seed):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def ddp(model: Transformer, device: str, _mesh: DeviceMesh) -> list[float]:
    """Replicate."""
    return train(DistributedDataParallel(model), device, seed=dist.get_rank())


def fsdp2(model: Transformer, device: str, mesh: DeviceMesh) -> list[float]:
    """Shard every block, and the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, device, seed=dist.get_rank())


def tensor_parallel(model: Transformer, device: str, mesh: DeviceMesh) -> list[float]:
    """Split the feed-forward parts by columns and rows."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, device, seed=0, foreach=False)  # which refuses sharded and whole parameters together


def pipeline(model: Transformer, device: str, _mesh: DeviceMesh) -> list[float]:
    """Give each rank a block; two microbatches under 1F1B. The last rank has the losses."""
    rank = dist.get_rank()
    part = nn.Sequential(model.embed, model.blocks[0]) if rank == 0 else nn.Sequential(model.blocks[1], model.head)
    stage = PipelineStage(part, rank, 2, torch.device(device))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    means = []
    for x, y in batches(device, seed=0):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            means.append(torch.stack(losses).mean().detach())
        optimizer.step()
    return [mean.item() for mean in means]


LAYOUTS: dict[str, Callable[[Transformer, str, DeviceMesh], list[float]]] = {
    layout.__name__: layout for layout in (ddp, fsdp2, pipeline, tensor_parallel)
}


def main() -> None:
    """Train each layout twice."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,sim:simccl")
    sim.set_device(0)
    torch.manual_seed(0)
    initial = Transformer()
    for name in LAYOUTS:
        losses = {
            device: LAYOUTS[name](copy.deepcopy(initial).to(device), device, init_device_mesh(device, (2,)))
            for device in ("cpu", "sim")
        }
        blocking = sim.counters()["blocking_operators"]
        print(json.dumps({"rank": dist.get_rank(), "layout": name, "blocking": blocking, **losses}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
