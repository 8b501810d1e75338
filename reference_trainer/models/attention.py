"""What both models attend with; the two swaps by which a sequence is sharded over ranks are here."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class AttentionCore(nn.Module):
    """Mix the values by the scores of queries and keys: the one place where positions meet."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, key_mask: Tensor | None = None
    ) -> Tensor:
        """Map (batch, heads, length, head_dim) to the same; `key_mask` (batch, keys) is true where a key is seen."""
        mask = None if key_mask is None else key_mask[:, None, None, :]
        grouped = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )


class Positions:
    """Number the positions of a sequence that this device holds from its start to its end."""

    def __call__(self, length: int, device: torch.device) -> Tensor:
        """Return the position of every column of `length` columns."""
        return torch.arange(length, device=device)


class MultiHeadAttention(nn.Module):
    """Project to heads, attend, and project back; several query heads may share one key-value head."""

    def __init__(self, *, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, num_kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.core = AttentionCore()

    def split_heads(self, x: Tensor) -> Tensor:
        """Turn (batch, length, heads x head_dim) into (batch, heads, length, head_dim)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def join_heads(self, x: Tensor) -> Tensor:
        """Undo `split_heads` and project to the width of the residual stream."""
        return cast(Tensor, self.output(x.transpose(1, 2).flatten(2)))
