"""Train a pipeline written by hand over messages: `hand_pipeline.py gpipe|1f1b [GROUP]`; stages take known times."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH, MICROBATCHES = 32, 16, 8, 2, 6
FORWARD_S, BACKWARD_S = 0.01, 0.02


class Slow(torch.autograd.Function):
    """Takes known times and changes nothing."""

    @staticmethod
    def forward(_, values):
        time.sleep(FORWARD_S)
        return values * 1.0

    @staticmethod
    def backward(_, gradient):
        time.sleep(BACKWARD_S)
        return gradient


class Stage(nn.Module):
    """Some layers of a language model: the first embeds, the last gives logits."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.inputs = nn.Embedding(VOCABULARY, WIDTH) if is_first else nn.Identity()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.outputs = nn.Linear(WIDTH, VOCABULARY) if is_last else nn.Identity()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.outputs(Slow.apply(torch.relu(self.layer(self.inputs(values)))))


class Pipeline:
    """One stage of a pipeline, and the messages that it exchanges with its neighbours."""

    def __init__(self, stage: nn.Module, rank: int, size: int) -> None:
        self.stage, self.rank, self.size = stage, rank, size
        self.loss = nn.CrossEntropyLoss()
        self.open: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        self.sent: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Begin to send: neighbours that both send before they receive would wait for each other."""
        self.sent.append((dist.isend(values, rank), values))

    def finish(self) -> None:
        """Wait until all is sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def forward(self, ids: torch.Tensor) -> None:
        """Run the next microbatch through the stage, and send what it gives."""
        received = None
        if self.rank > 0:
            received = torch.empty(BATCH, LENGTH, WIDTH)
            dist.recv(received, self.rank - 1)
            received.requires_grad_()
        output = self.stage(ids if received is None else received)
        if self.rank < self.size - 1:
            self.send(output.detach(), self.rank + 1)
        else:
            output = self.loss(output.flatten(0, 1), ids.flatten())
        self.open.append((received, output))

    def backward(self) -> None:
        """Run the oldest microbatch back, and send the gradient of what it received."""
        received, output = self.open.pop(0)
        gradient = None
        if self.rank < self.size - 1:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + 1)
        output.backward(gradient)
        if received is not None:
            self.send(received.grad, self.rank - 1)


def main() -> None:
    """Train 12 steps of 6 microbatches of 2 sequences of 8 tokens."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stage = Stage(is_first=rank == 0, is_last=rank == size - 1)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    pipeline = Pipeline(stage, rank, size)
    ahead = MICROBATCHES if sys.argv[1] == "gpipe" else min(MICROBATCHES, size - 1 - rank)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randint(0, VOCABULARY, (MICROBATCHES, BATCH, LENGTH), generator=generator)
        for ids in batches[:ahead]:
            pipeline.forward(ids)
        for ids in batches[ahead:]:
            pipeline.forward(ids)
            pipeline.backward()
        for _ in range(ahead):
            pipeline.backward()
        pipeline.finish()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
