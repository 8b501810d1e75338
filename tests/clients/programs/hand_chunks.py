"""Train a pipeline by hand with two stages a rank: `hand_chunks.py looped|vee [mesh]`; stages take known times."""

import sys

import torch
import torch.distributed as dist
from hand_pipeline import BATCH, LENGTH, VOCABULARY, WIDTH, Stage
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MICROBATCHES, CHUNKS, STEPS = 6, 2, 12


class Chunks:
    """The stages of one rank, and the messages between stages on different ranks."""

    def __init__(self, rank: int, size: int, placement: str, group: dist.ProcessGroup | None) -> None:
        """Make stages 0, 1, ... lie on ranks 0, 1, 0, 1 (looped) or 0, 1, 1, 0 (vee)."""
        self.rank, self.num_stages, self.group = rank, CHUNKS * size, group
        looped = [number % size for number in range(self.num_stages)]
        vee = [min(number, self.num_stages - 1 - number) for number in range(self.num_stages)]
        self.rank_of = looped if placement == "looped" else vee
        self.stages = nn.ModuleDict(
            {
                str(number): Stage(is_first=number == 0, is_last=number == self.num_stages - 1)
                for number, owner in enumerate(self.rank_of)
                if owner == rank
            }
        )
        self.loss = nn.CrossEntropyLoss()
        self.open: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.given: dict[tuple[int, int], torch.Tensor] = {}
        self.sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def give(self, values: torch.Tensor, stage: int, microbatch: int, tag: int) -> None:
        """Give values to a stage: by a message, where it lies on another rank."""
        if self.rank_of[stage] == self.rank:
            self.given[tag, microbatch] = values
        else:
            self.sent.append((dist.isend(values, self.rank_of[stage], self.group, tag * 1000 + microbatch), values))

    def take(self, like: torch.Tensor, source: int, microbatch: int, tag: int) -> torch.Tensor:
        """Take what another stage gave."""
        if self.rank_of[source] == self.rank:
            return self.given.pop((tag, microbatch))
        dist.recv(like, self.rank_of[source], self.group, tag * 1000 + microbatch)
        return like

    def forward(self, stage: int, microbatch: int, ids: torch.Tensor) -> None:
        """Run a microbatch through a stage."""
        received = None
        if stage > 0:
            received = self.take(torch.empty(BATCH, LENGTH, WIDTH), stage - 1, microbatch, 2 * stage)
            received = received.detach().requires_grad_()
        output = self.stages[str(stage)](ids if received is None else received)
        if stage < self.num_stages - 1:
            self.give(output.detach(), stage + 1, microbatch, 2 * stage + 2)
        else:
            output = self.loss(output.flatten(0, 1), ids.flatten())
        self.open[stage, microbatch] = received, output

    def backward(self, stage: int, microbatch: int) -> None:
        """Run a microbatch back through a stage."""
        received, output = self.open.pop((stage, microbatch))
        gradient = None
        if stage < self.num_stages - 1:
            gradient = self.take(torch.empty_like(output), stage + 1, microbatch, 2 * stage + 1)
        output.backward(gradient)
        if received is not None:
            self.give(received.grad, stage - 1, microbatch, 2 * stage - 1)

    def finish(self) -> None:
        """Wait until all is sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def main() -> None:
    """Train 12 steps of 6 microbatches of 2 sequences of 8 tokens, breadth first."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    group = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)).get_group() if sys.argv[2:] else None
    chunks = Chunks(rank, size, sys.argv[1], group)
    own = [int(name) for name in chunks.stages]
    optimizer = torch.optim.AdamW(chunks.stages.parameters(), lr=1e-3)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randint(0, VOCABULARY, (MICROBATCHES, BATCH, LENGTH), generator=generator)
        # A stage that gives to one on the same rank is followed by that one.
        if sys.argv[1] == "looped":
            order = [(stage, number) for stage in own for number in range(MICROBATCHES)]
        else:
            order = [(stage, number) for stage in own for number in range(MICROBATCHES)]
            order.sort(key=lambda item: item[1] if rank == size - 1 else item[0])
        for stage, number in order:
            chunks.forward(stage, number, batches[number])
        back = [(stage, number) for stage in reversed(own) for number in range(MICROBATCHES)]
        if sys.argv[1] == "vee" and rank == size - 1:
            back.sort(key=lambda item: item[1])
        for stage, number in back:
            chunks.backward(stage, number)
        chunks.finish()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
