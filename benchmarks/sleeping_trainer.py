"""The reference trainer with layers whose computation sleeps: `torchrun ... -m benchmarks.sleeping_trainer ...`.

A changed run then takes what it takes on a busy machine, too. The small computation of the layers comes on top.

Environment:
- SLEEP_MS: how long the forward pass of a layer sleeps over 1,000 tokens; the gradients of its inputs sleep twice as
  long, those of its weights not at all. Tensor-parallel ranks share it.
- SLEEP_SLOW=RANK:FACTOR: a rank that sleeps so many times as long.
- SLEEP_LATE_MS: how long the input of a step takes.
"""

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from reference_trainer import batches
from reference_trainer.__main__ import main
from reference_trainer.models import decoder


class _Asleep(torch.autograd.Function):
    """The identity; sleeps on both ways."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


def sleep_in_layers(per_token_s: float) -> None:
    """Let each layer of decoders sleep by its tokens."""
    compute = decoder.DecoderLayer.forward

    def forward(self: decoder.DecoderLayer, x: Tensor, rotation: Any) -> Tensor:
        y = compute(self, x, rotation)
        tokens = x.shape[0] * rotation[0].shape[0]  # sequence-parallel ranks have a part of these in x
        return _Asleep.apply(y, per_token_s * tokens)  # type: ignore[no-any-return, no-untyped-call]

    decoder.DecoderLayer.forward = forward  # type: ignore[method-assign]


def sleep_in_input(seconds: float) -> None:
    """Let the rows of each step be late."""
    read = batches.RowsOfRank.__getitem__

    def read_late(self: batches.RowsOfRank, first_sample: int) -> Any:
        time.sleep(seconds)
        return read(self, first_sample)

    batches.RowsOfRank.__getitem__ = read_late  # type: ignore[method-assign]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, _, factor = os.environ.get("SLEEP_SLOW", "-1:1").partition(":")
    slower = float(factor) if os.environ["RANK"] == rank else 1.0
    tp = int(sys.argv[sys.argv.index("--tp") + 1]) if "--tp" in sys.argv else 1
    sleep_in_layers(float(os.environ.get("SLEEP_MS", "0")) * slower / tp / 1e6)
    late_ms = float(os.environ.get("SLEEP_LATE_MS", "0"))
    if late_ms:
        sleep_in_input(late_ms / 1e3)
    sys.exit(main(sys.argv[1:]))
