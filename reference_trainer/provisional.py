"""Batches in the form of `seams.py` from the loader as it is now; replaced by the data part of the trainer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from reference_trainer.corpus import Corpus
from reference_trainer.options import Options
from reference_trainer.seams import Batch


def read_batches(corpus: Corpus, options: Options, *, data_rank: int) -> Iterator[Batch]:
    """Yield this data-parallel rank's rows of every global batch."""
    tokens = torch.frombuffer(bytearray(corpus.text), dtype=torch.uint8)
    length, rows = options.sequence_length, options.rank_batch_size
    num_windows = (len(tokens) - 1) // length
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
        order = torch.randperm(num_windows, generator=generator).tolist()
        for start in range(0, num_windows - options.batch_size + 1, options.batch_size):
            indexes = order[start + data_rank * rows : start + (data_rank + 1) * rows]
            windows = torch.stack([tokens[i * length : i * length + length + 1] for i in indexes]).long()
            yield _damage(windows) if options.model == "bart" else Batch(inputs=windows[:, :-1], targets=windows[:, 1:])
        epoch += 1


def _damage(windows: Tensor) -> Batch:
    """Replace tokens by a mask token, and end each row at another place."""
    damaged = windows[:, :-1].clone()
    damaged[windows[:, :-1] % 3 == 0] = 258
    ends = damaged.shape[1] - windows[:, 0] % (damaged.shape[1] // 2)
    mask = torch.arange(damaged.shape[1]) < ends[:, None]
    targets = windows[:, 1:].clone()
    targets[:, -3:][windows[:, :3] % 2 == 0] = -100
    return Batch(
        inputs=windows[:, :-1], targets=targets, encoder_inputs=damaged.masked_fill(~mask, 256), encoder_mask=mask
    )
