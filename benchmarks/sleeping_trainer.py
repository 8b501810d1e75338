"""The reference trainer with layers whose computation sleeps: `torchrun ... -m benchmarks.sleeping_trainer ...`.

A changed run then takes what it takes on a busy machine, too. The small computation of the layers comes on top.

Environment:
- SLEEP_MS: how long the forward pass of a layer sleeps over 1,000 tokens, as do the gradients of its inputs and, once
  more, those of its weights; tensor-parallel ranks share it.
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
    def forward(ctx: FunctionCtx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s  # type: ignore[attr-defined]
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad, None, None


def sleep_in_layers(per_token_s: float, *, weights_apart: bool) -> None:
    """Let each layer of decoders sleep by its tokens.

    Parameters:
        weights_apart: where schedules do so, sleep for the gradients of weights when these are computed.
    """
    compute = decoder.DecoderLayer.forward

    def forward(self: decoder.DecoderLayer, x: Tensor, rotation: Any) -> Tensor:
        y = compute(self, x, rotation)
        tokens = x.shape[0] * rotation[0].shape[0]  # sequence-parallel ranks have a part of these in x
        seconds = per_token_s * tokens
        if weights_apart:
            # Nobody asks for the gradient of a parameter but who computes gradients of weights.
            weight = _Asleep.apply(self.attention_norm.weight, 0.0, seconds)  # type: ignore[no-untyped-call]
            return _Asleep.apply(y + 0 * weight, seconds, seconds)  # type: ignore[no-any-return, no-untyped-call]
        return _Asleep.apply(y, seconds, 2 * seconds)  # type: ignore[no-any-return, no-untyped-call]

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
    sleep_in_layers(float(os.environ.get("SLEEP_MS", "0")) * slower / tp / 1e6, weights_apart="--pp" in sys.argv)
    late_ms = float(os.environ.get("SLEEP_LATE_MS", "0"))
    if late_ms:
        sleep_in_input(late_ms / 1e3)
    sys.exit(main(sys.argv[1:]))
