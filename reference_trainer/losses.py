"""Cross-entropy in nats, summed over targets; also where each rank has a part of the vocabulary."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from reference_trainer.interfaces import IGNORED_TARGET


class TokenLoss:
    """Add up the cross-entropy of all targets that count."""

    def __init__(self, vocabulary_group: distributed.ProcessGroup | None) -> None:
        self.vocabulary_group = vocabulary_group

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map (batch, length, vocabulary) logits, or this rank's columns of them, and targets to one number."""
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if logits.dtype != torch.float64:
            logits = logits.float()
        if self.vocabulary_group is None:
            return functional.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET, reduction="sum")
        losses: Tensor = DividedCrossEntropy.apply(logits, targets, self.vocabulary_group)  # type: ignore[no-untyped-call]
        return losses.sum()


class DividedCrossEntropy(torch.autograd.Function):
    """Take the cross-entropy of each row without ever gathering the logits: three numbers a row are exchanged."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: distributed.ProcessGroup) -> Tensor:
        """Map (rows, columns of this rank) and (rows) to (rows)."""
        num_columns = logits.shape[1]
        largest = logits.amax(dim=1)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        exponentials = shifted.exp()

        column = targets - group.rank() * num_columns
        is_own = (column >= 0) & (column < num_columns)
        column = column.where(is_own, 0)
        picked = shifted.gather(1, column[:, None])[:, 0] * is_own
        sums = torch.stack((exponentials.sum(dim=1), picked))
        distributed.all_reduce(sums, group=group)

        counts = targets != IGNORED_TARGET
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), column, is_own, counts)
        return (sums[0].log() - sums[1]) * counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return softmax minus one at the target, for this rank's columns."""
        probabilities, column, is_own, counts = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(1, column[:, None], -is_own.to(result.dtype)[:, None])
        return result * (grad * counts)[:, None], None, None
