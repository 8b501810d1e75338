"""Context parallelism: the sequence divided over ranks, attention included.

Each rank holds an early and a late piece of every sequence: under a causal mask all have the same work. The queries
stay; keys and values are gathered for each attention, and their gradients are added up on the way back; or they go from
rank to rank (ring.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from reference_trainer.models.attention import AttentionCore, MultiHeadAttention, Positions

# The mask is over keys, which every rank has gathered: it stays whole.
WHOLE = ("encoder_mask",)


def divide_context(
    model: nn.Module,
    axis: DeviceMesh | None,
    core: "Callable[[distributed.ProcessGroup, DividedPositions], AttentionCore]",
) -> None:
    """Let a model see its part of every sequence: other positions, and attention over all ranks of an axis."""
    if axis is None:
        return
    positions = DividedPositions(axis.get_local_rank(), axis.size())
    model.positions = positions  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.core = core(axis.get_group(), positions)


def take_columns(batch: dict[str, Tensor], axis: DeviceMesh | None) -> dict[str, Tensor]:
    """Cut this rank's pieces out of every sequence of a batch."""
    if axis is None:
        return batch
    rank, size = axis.get_local_rank(), axis.size()

    def cut(x: Tensor) -> Tensor:
        pieces = x.chunk(2 * size, dim=1)
        return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), dim=1)

    return {name: x if name in WHOLE else cut(x) for name, x in batch.items()}


class DividedPositions(Positions):
    """Number the positions of the two pieces that a rank holds."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def __call__(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's columns in the whole sequence."""
        return self.of_rank(self.rank, length, device)

    def of_rank(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Return the positions of the columns of any rank."""
        piece = torch.arange(length // 2, device=device)
        late = 2 * self.size - 1 - rank
        return torch.cat((piece + rank * (length // 2), piece + late * (length // 2)))

    def find_order(self, length: int, device: torch.device) -> Tensor:
        """Return where each position of the whole sequence lies when all ranks' columns stand in a row."""
        every = [self.of_rank(rank, length, device) for rank in range(self.size)]
        return torch.cat(every).argsort()


class GatheringCore(AttentionCore):
    """Attend from this rank's queries to the keys and values of all ranks."""

    def __init__(self, group: distributed.ProcessGroup, positions: DividedPositions) -> None:
        super().__init__()
        self.group = group
        self.positions = positions

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, key_mask: Tensor | None = None
    ) -> Tensor:
        """Do as the core of one device does, for a part of the queries."""
        order = self.positions.find_order(key.shape[2], key.device)
        gathered: Tensor = GatherLength.apply(torch.stack((key, value)), self.group)  # type: ignore[no-untyped-call]
        keys, values = gathered.index_select(3, order).unbind()
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if causal:
            visible = self.positions(query.shape[2], query.device)[:, None] >= torch.arange(len(order))[None, :].to(
                query.device
            )
            mask = visible if mask is None else mask & visible
        grouped = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=grouped)


class GatherLength(torch.autograd.Function):
    """Put the columns of all ranks in a row; backward, add up what each rank says of one's own columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: distributed.ProcessGroup) -> Tensor:
        """Map (2, batch, heads, length, head_dim) to `size` times the length."""
        ctx.group = group
        # The collectives join along the first dimension.
        first = x.movedim(3, 0).contiguous()
        gathered = first.new_empty((group.size() * first.shape[0], *first.shape[1:]))
        distributed.all_gather_into_tensor(gathered, first, group=group)
        return gathered.movedim(0, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's columns."""
        first = grad.movedim(3, 0).contiguous()
        shard = first.new_empty((first.shape[0] // ctx.group.size(), *first.shape[1:]))
        distributed.reduce_scatter_tensor(shard, first, group=ctx.group)
        return shard.movedim(0, 3), None
