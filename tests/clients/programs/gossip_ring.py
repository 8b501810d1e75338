"""Train decentralised: ranks average parameters with their neighbours on a ring: `gossip_ring.py batched|blocking`."""

import sys

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 4, 12


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32), nn.Linear(32, VOCABULARY))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(ids)


def exchange(flat: torch.Tensor, rank: int, size: int, how: str) -> list[torch.Tensor]:
    """Send to both neighbours, and return what they sent."""
    neighbours = [(rank - 1) % size, (rank + 1) % size]
    received = [torch.empty_like(flat) for _ in neighbours]
    if how == "blocking":
        for to, source, into in zip(neighbours, reversed(neighbours), received, strict=True):
            work = dist.isend(flat, to)
            dist.recv(into, source)
            work.wait()
        return received
    operations = [dist.P2POp(dist.isend, flat, neighbour) for neighbour in neighbours]
    operations += [dist.P2POp(dist.irecv, into, source) for into, source in zip(received, neighbours, strict=True)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def main() -> None:
    """Train 12 steps of 4 sequences a rank."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(model.parameters())
            left, right = exchange(flat, rank, size, sys.argv[1])
            nn.utils.vector_to_parameters((flat + left + right) / 3, model.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
