"""Train with FSDP1, sharded over pairs of ranks and replicated over two of them, on a mesh with names of its own."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

VOCABULARY, LENGTH, WIDTH = 64, 16, 64


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.layers(values)


def main() -> None:
    """Train 12 steps of 4 sequences a rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, VOCABULARY))
    wrap = functools.partial(
        FullyShardedDataParallel,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    sharded = wrap(model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    for _ in range(12):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH))
        nn.functional.cross_entropy(sharded(ids).flatten(0, 1), ids.flatten()).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
