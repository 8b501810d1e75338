"""Context parallelism around a ring: keys and values go from rank to rank, and no rank ever holds all of them.

Each rank attends from its queries to one rank's keys and values at a time, while the next ones are on their way, and
merges what came out by the sums of exponentials (online softmax; Liu et al. 2023, Ring Attention). Backward the same
keys and values go round again, and their gradients with them, until these are home.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from reference_trainer.models.attention import AttentionCore
from reference_trainer.parallelism.context import DividedPositions


class RingCore(AttentionCore):
    """Attend from this rank's queries to the keys and values of all ranks, those of one rank at a time."""

    def __init__(self, group: distributed.ProcessGroup, positions: DividedPositions) -> None:
        super().__init__()
        self.ring = Ring(group)
        self.positions = positions

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code sends no messages
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, key_mask: Tensor | None = None
    ) -> Tensor:
        """Do as the core of one device does, for a part of the queries."""
        masks = [self._mask(rank, query, key, causal=causal, key_mask=key_mask) for rank in range(self.positions.size)]
        # Query heads that share a key-value head stand behind each other in a dimension of their own.
        grouped = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
        result: Tensor = RingAttention.apply(grouped, key, value, masks, self.ring)  # type: ignore[no-untyped-call]
        return result.flatten(1, 2)

    def _mask(self, rank: int, query: Tensor, key: Tensor, *, causal: bool, key_mask: Tensor | None) -> Tensor | None:
        """Return which keys of a rank each query sees, broadcast to (batch, heads, group, queries, keys)."""
        columns = self.positions.of_rank(rank, key.shape[2], key.device)
        mask = None if key_mask is None else key_mask[:, None, None, None, columns]
        if causal:
            visible = self.positions(query.shape[2], query.device)[:, None] >= columns[None, :]
            mask = visible if mask is None else mask & visible
        return mask


class Ring:
    """Send to the next rank of a group what the one before sends here."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.next = distributed.get_global_rank(group, (self.rank + 1) % self.size)
        self.before = distributed.get_global_rank(group, (self.rank - 1) % self.size)

    def send(self, x: Tensor) -> tuple[Tensor, list[distributed.Work]]:
        """Begin to send a tensor; return the one that arrives, and what to wait for before it is read."""
        arriving = torch.empty_like(x)
        messages = [
            distributed.P2POp(distributed.isend, x, self.next, self.group),
            distributed.P2POp(distributed.irecv, arriving, self.before, self.group),
        ]
        return arriving, distributed.batch_isend_irecv(messages)

    def turn(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor of each rank with that rank, one's own first, the next on its way meanwhile."""
        for step in range(self.size):
            arriving, works = self.send(x) if step + 1 < self.size else (x, [])
            yield (self.rank - step) % self.size, x
            for work in works:
                work.wait()
            x = arriving


class RingAttention(torch.autograd.Function):
    """Attention of (batch, heads, group, queries, head_dim) over keys and values (batch, heads, keys, head_dim)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor | None], ring: Ring) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        mixed = torch.zeros_like(query, dtype=exact)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=exact, device=query.device)
        for rank, pair in ring.turn(torch.stack((key, value))):
            scores = _score(query, pair[0], masks[rank]).to(exact)
            part = scores.logsumexp(-1)
            both = torch.logaddexp(total, part)
            # A query that has seen no key yet has no share in anything: its sum is 0, not unknown.
            known = torch.where(both.isfinite(), both, 0)
            weights = (scores - known[..., None]).exp()
            mixed = mixed * (total - known).exp()[..., None] + weights @ pair[1].unsqueeze(2).to(exact)
            total = both
        result = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.masks, ctx.ring = masks, ring
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Let gradients of keys and values go round with them: after as many steps as ranks they are home."""
        query, key, value, result, total = ctx.saved_tensors
        exact, ring = total.dtype, ctx.ring
        grad = grad.to(exact)
        own = (grad * result.to(exact)).sum(-1, keepdim=True)
        query_grad = torch.zeros_like(query, dtype=exact)
        pair_grad = torch.zeros((2, *key.shape), dtype=exact, device=key.device)
        works: list[distributed.Work] = []
        for rank, pair in ring.turn(torch.stack((key, value))):
            keys, values = pair.unsqueeze(3).to(exact)
            weights = (_score(query, pair[0], ctx.masks[rank]).to(exact) - total[..., None]).exp()
            scores_grad = weights * (grad @ values.mT - own) * _scale(query)
            query_grad += scores_grad @ keys
            part = torch.stack((scores_grad.mT @ query.to(exact), weights.mT @ grad)).sum(3)
            for work in works:
                work.wait()
            pair_grad, works = ring.send(pair_grad + part)
        for work in works:
            work.wait()
        key_grad, value_grad = pair_grad.to(key.dtype)
        return query_grad.to(query.dtype), key_grad, value_grad, None, None


def _score(query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    scores = query @ keys.unsqueeze(2).mT * _scale(query)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _scale(query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5)
