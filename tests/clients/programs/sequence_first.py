"""Train a language model whose layers take the sequence before the batch, as torch's examples do: `[recurrent]`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH, BATCH, WIDTH = 64, 35, 4, 32


class Recurrent(nn.Module):
    """Takes ids and the state that the part of the sequence before left."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids), state)[0])


class Transformer(nn.Module):
    """Takes ids alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH), 1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


def main() -> None:
    """Train 12 steps of 35 times 4 ids a rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    recurrent = "recurrent" in sys.argv
    model = DistributedDataParallel(Recurrent() if recurrent else Transformer())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = ((torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH)),) if recurrent else ()
    for _ in range(12):
        ids = torch.randint(0, VOCABULARY, (LENGTH, BATCH))
        nn.functional.cross_entropy(model(ids, *state).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
