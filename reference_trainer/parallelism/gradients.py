"""What happens to gradients between backward pass and optimizer: completed, measured, clipped; on any layout."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Replicate

from reference_trainer.models import Bart
from reference_trainer.parallelism.axes import Axes


class Gradients:
    """Know all weights of this rank, and on how many ranks each of their numbers is held."""

    def __init__(self, models: Sequence[nn.Module], axes: Axes, *, synchronised: bool) -> None:
        self.parameters = [parameter for model in models for parameter in model.parameters()]
        self.world_size = distributed.get_world_size() if distributed.is_initialized() else 1
        self.num_stage_ranks = self.world_size // axes.size("pp")
        self.synchronised = synchronised
        self.tied = [model.embedding.weight for model in models if isinstance(model, Bart) and model.embedding]
        self.tied_group, num_tied = meet_tied_stages(len(self.tied), axes)
        self.copies = {id(weight): num_tied for weight in self.tied}

    def complete(self) -> None:
        """Add up what is still in parts: sums over tensor-parallel ranks, and over the stages that share weights."""
        for parameter in self.parameters:
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        if not self.tied:
            return
        parts = [_local(weight.grad) for weight in self.tied if weight.grad is not None]
        for part in parts[1:]:
            parts[0] += part
        if self.tied_group is not None:
            distributed.all_reduce(parts[0], group=self.tied_group)
        for part in parts[1:]:
            part.copy_(parts[0])

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; return it as it was.

        Each rank adds up the squares that it holds, each divided by the number of ranks that hold the same: one
        number is exchanged, whatever the layout, and none where all ranks hold all.
        """
        grads = [(_local(parameter.grad), self._count_holders(parameter)) for parameter in self._with_gradient()]
        local = [grad for grad, _ in grads]
        squares = torch.stack(torch._foreach_norm(local)).square()
        if self.synchronised and any(count != self.world_size for _, count in grads):
            total = (squares / squares.new_tensor([count for _, count in grads])).sum()
            distributed.all_reduce(total)
        else:
            total = squares.sum()
        norm = total.sqrt()
        torch._foreach_mul_(local, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _with_gradient(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.parameters if parameter.grad is not None)

    def _count_holders(self, parameter: nn.Parameter) -> int:
        """Count the ranks that hold the same numbers as this one; a copy on the same rank counts as one more."""
        holders = self.num_stage_ranks * self.copies.get(id(parameter), 1)
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                holders //= 1 if isinstance(placement, Replicate) else size
        return holders


def meet_tied_stages(num_copies: int, axes: Axes) -> tuple[distributed.ProcessGroup | None, int]:
    """Return the group of the pipeline ranks that hold copies of the tied weights, and the number of copies.

    Every rank must call this, and makes all groups, also those that it is not in.
    """
    pipeline = axes.find("pp")
    if pipeline is None:
        return None, max(num_copies, 1)
    counts: list[int | None] = [None] * pipeline.size()
    distributed.all_gather_object(counts, num_copies, group=pipeline.get_group())
    holders = [rank for rank, count in enumerate(counts) if count]
    own_group = None
    if len(holders) > 1:
        columns: list[list[int] | None] = [None] * distributed.get_world_size()
        ranks = distributed.get_process_group_ranks(pipeline.get_group())
        distributed.all_gather_object(columns, [ranks[holder] for holder in holders])
        every = sorted({tuple(column or ()) for column in columns})
        own_group, _ = distributed.new_subgroups_by_enumeration(every)  # type: ignore[no-untyped-call]
    return (own_group if num_copies else None), sum(filter(None, counts)) or 1


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
