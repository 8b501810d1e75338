"""Fixed-length windows of the corpus, and which rank trains on which of them at which step."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from reference_trainer.options import Options
from reference_trainer.placement import Placement


class Windows(Dataset[Tensor]):
    """Cut text into windows of `sequence_length` inputs and one more token, the last target."""

    def __init__(self, text: bytes, *, sequence_length: int) -> None:
        # bytearray: torch warns about memory that it must not write to.
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].long()


class MicroBatchSampler(Sampler[list[int]]):
    """Yield, without end, this rank's micro-batches: an equal slice of every global batch.

    The order of the windows is drawn from seed and epoch alone. A global batch therefore holds the same windows
    whatever the number of ranks and micro-batches is. The windows that do not fill the last global batch of an
    epoch are left out of that epoch.
    """

    def __init__(self, *, num_windows: int, options: Options, rank: int) -> None:
        self.num_windows = num_windows
        self.batch_size = options.batch_size
        self.micro_batch_size = options.micro_batch_size
        self.seed = options.seed
        self.first = rank * options.accumulate * options.micro_batch_size
        self.last = self.first + options.accumulate * options.micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            order = torch.randperm(self.num_windows, generator=_seed_generator(self.seed, epoch)).tolist()
            for start in range(0, self.num_windows - self.batch_size + 1, self.batch_size):
                for micro_start in range(start + self.first, start + self.last, self.micro_batch_size):
                    yield order[micro_start : micro_start + self.micro_batch_size]
            epoch += 1


def build_loader(text: bytes, *, options: Options, placement: Placement, pin_memory: bool) -> DataLoader[Tensor]:
    """Build the loader of one rank; its batches are (micro-batch, sequence_length + 1) token numbers."""
    windows = Windows(text, sequence_length=options.sequence_length)
    sampler = MicroBatchSampler(num_windows=len(windows), options=options, rank=placement.rank)
    return DataLoader(windows, batch_sampler=sampler, pin_memory=pin_memory)


def _seed_generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)
