"""A decoder language model: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference_trainer.models.attention import MultiHeadAttention, Positions
from reference_trainer.presets import DecoderShape

ROPE_BASE = 10_000.0

Rotation = tuple[Tensor, Tensor]


class Attention(MultiHeadAttention):
    """Let every position look at itself and at those before it."""

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        query = rotate(self.split_heads(self.query(x)), rotation)
        key = rotate(self.split_heads(self.key(x)), rotation)
        value = self.split_heads(self.value(x))
        return self.join_heads(self.core(query, key, value, causal=True))


class FeedForward(nn.Module):
    """Widen each position, gate it (SwiGLU), and narrow it again."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        return cast(Tensor, self.down(functional.silu(self.gate(x)) * self.up(x)))


class DecoderLayer(nn.Module):
    """Add attention, then the feed-forward part, to the residual stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(
            dim=shape.dim,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            bias=False,
        )
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return cast(Tensor, x + self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """Predict the next token at every position."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.positions = Positions()
        self.embedding: nn.Embedding | None = nn.Embedding(shape.vocabulary_size, shape.dim)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(shape) for index in range(shape.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(shape.dim, eps=1e-5)
        self.output: nn.Linear | None = nn.Linear(shape.dim, shape.vocabulary_size, bias=False)

    def forward(self, x: Tensor | None = None, *, inputs: Tensor) -> Tensor:
        """Map (batch, length) token numbers to logits; what has been cut off is taken from `x`, or left to others."""
        if self.embedding is not None:
            x = self.embedding(inputs)
        assert x is not None
        positions = self.positions(inputs.shape[1], inputs.device)
        rotation = compute_rotation(positions, head_dim=self.head_dim, dtype=x.dtype)
        for layer in self.layers.values():
            x = layer(x, rotation)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return cast(Tensor, x)

    def keep_layers(self, first: int, end: int) -> None:
        """Cut off all but the layers from `first` to before `end`, and the two ends of the model that they touch."""
        num_layers = len(self.layers)
        if first > 0:
            self.embedding = None
        if end < num_layers:
            self.norm = self.output = None
        for index in range(num_layers):
            if not first <= index < end:
                del self.layers[str(index)]


def compute_rotation(positions: Tensor, *, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Return the cosines and sines of RoPE, each (length, head_dim / 2); computed in float64, which is cheap."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = torch.outer(positions.double(), ROPE_BASE**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of (batch, heads, length, head_dim) by the angle of its position."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
