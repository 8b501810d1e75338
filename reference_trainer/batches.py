"""Which rank trains on which windows of the corpus at which step, and how they become a batch.

Samples are numbered over the whole run: step times global batch size, plus the place in the batch. The number alone,
with the seed, says which window it is and how it is damaged. So neither the number of ranks nor a restart changes what
the model sees.
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from reference_trainer.denoising import damage
from reference_trainer.interfaces import Batch
from reference_trainer.options import Options
from reference_trainer.token_file import TokenFile
from reference_trainer.windows import Windows

EVALUATED_BATCHES = 8
# Damage of held-out windows is drawn from numbers that no sample of the training reaches.
FIRST_HELD_OUT_SAMPLE = 2**62


class RowsOfRank(Dataset[Batch]):
    """Make the rows of one data-parallel rank, given the number of the first sample of a global batch."""

    def __init__(self, file: TokenFile, options: Options, *, data_rank: int) -> None:
        self.windows = Windows(file, sequence_length=options.sequence_length, seed=options.seed)
        self.vocabulary = file.vocabulary
        self.marks = file.marks
        self.denoises = options.model == "bart"
        self.seed = options.seed
        self.first_row = data_rank * options.rank_batch_size
        self.num_rows = options.rank_batch_size

    def __getitem__(self, first_sample: int) -> Batch:
        samples = range(first_sample + self.first_row, first_sample + self.first_row + self.num_rows)
        if first_sample >= FIRST_HELD_OUT_SAMPLE:
            rows = [self.windows.read_held_out(sample - FIRST_HELD_OUT_SAMPLE) for sample in samples]
        else:
            rows = [self.windows.read(sample) for sample in samples]
        return self._denoise(rows, samples) if self.denoises else _continue(rows)

    def _denoise(self, rows: Sequence[NDArray[np.int64]], samples: Sequence[int]) -> Batch:
        """Let the model rebuild each window from its damaged copy."""
        length = self.windows.sequence_length
        targets = np.stack([row[:length] for row in rows])
        inputs = np.empty_like(targets)
        inputs[:, 0] = self.vocabulary.begin
        inputs[:, 1:] = targets[:, :-1]
        encoder_inputs = np.full_like(targets, self.vocabulary.padding)
        encoder_mask = np.zeros(targets.shape, dtype=bool)
        for place, (row, sample) in enumerate(zip(targets, samples, strict=True)):
            random = np.random.default_rng([self.seed, sample])
            damaged = damage(row, mask=self.vocabulary.mask, marks=self.marks, random=random)[:length]
            encoder_inputs[place, : len(damaged)] = damaged
            encoder_mask[place, : len(damaged)] = True
        return Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            encoder_inputs=torch.from_numpy(encoder_inputs),
            encoder_mask=torch.from_numpy(encoder_mask),
        )


def _continue(rows: Sequence[NDArray[np.int64]]) -> Batch:
    """Let the model guess each token from those before it."""
    tokens = torch.from_numpy(np.stack(rows))
    return Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:])


class Batches:
    """Yield the rows of one data-parallel rank, step after step, from any position on."""

    def __init__(self, file: TokenFile, options: Options, *, data_rank: int, pin_memory: bool = False) -> None:
        self.rows = RowsOfRank(file, options, data_rank=data_rank)
        self.options = options
        self.pin_memory = pin_memory
        self.num_samples = 0
        self.num_steps: int | None = None
        self.stopped = False
        self.loader: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.stopped:
            raise StopIteration
        if self.loader is None:
            samples = count(self.num_samples, self.options.batch_size)
            self.loader = iter(self._load(samples if self.num_steps is None else islice(samples, self.num_steps)))
        batch = next(self.loader)
        self.num_samples += self.options.batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples that all ranks together have been given."""
        return {"num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind so many samples."""
        self.num_samples = int(state["num_samples"])
        self.loader = None

    def end_behind(self, num_steps: int) -> None:
        """Have no more data than for so many steps: a fault."""
        self.num_steps = num_steps

    def stop(self) -> None:
        """Yield nothing any more, though there is data: a fault."""
        self.stopped = True

    def read_held_out(self) -> Iterator[Batch]:
        """Yield the rows of this rank for one evaluation: always the same, and as many on every rank."""
        num_batches = min(EVALUATED_BATCHES, self.rows.windows.num_held_out // self.options.batch_size)
        last = FIRST_HELD_OUT_SAMPLE + num_batches * self.options.batch_size
        return iter(self._load(range(FIRST_HELD_OUT_SAMPLE, last, self.options.batch_size)))

    def _load(self, first_samples: Iterator[int] | range) -> "DataLoader[Batch]":
        """Read ahead in other processes where asked to; the loader's iterator is what profilers look for."""
        return DataLoader(
            self.rows,
            batch_size=None,
            sampler=cast(Any, first_samples),
            num_workers=self.options.data.num_workers if isinstance(first_samples, Iterator) else 0,
            pin_memory=self.pin_memory,
        )
