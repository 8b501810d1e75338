"""A decoder language model for one device: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Nothing here knows of ranks. Parallelism is applied from outside, in `parallelism.py`.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference_trainer.presets import DecoderShape

ROPE_BASE = 10_000.0
INITIAL_DEVIATION = 0.02


class Attention(nn.Module):
    """Let every position look at itself and at those before it; several query heads share one key-value head."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.dim, shape.num_heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.num_kv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.num_heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        query = rotate(self._split_heads(self.query(x)), rotation)
        key = rotate(self._split_heads(self.key(x)), rotation)
        value = self._split_heads(self.value(x))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.output(mixed.transpose(1, 2).flatten(2)))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Turn (batch, length, heads x head_dim) into (batch, heads, length, head_dim)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


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
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return cast(Tensor, x + self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """Predict the next token at every position."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.embedding = nn.Embedding(shape.vocabulary_size, shape.dim)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.output = nn.Linear(shape.dim, shape.vocabulary_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) token numbers to (batch, length, vocabulary) logits."""
        x = self.embedding(tokens)
        rotation = compute_rotation(tokens.shape[1], head_dim=self.head_dim, like=x)
        for layer in self.layers:
            x = layer(x, rotation)
        return cast(Tensor, self.output(self.norm(x)))


def compute_rotation(length: int, *, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE, each (length, head_dim / 2); computed in float64, which is cheap."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=like.device) / head_dim
    positions = torch.arange(length, dtype=torch.float64, device=like.device)
    angles = torch.outer(positions, ROPE_BASE**-exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of (batch, heads, length, head_dim) by the angle of its position."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def initialise_weights(model: Decoder) -> None:
    """Draw the weights; what writes to the residual stream starts smaller the more layers write to it."""
    scale = 1 / math.sqrt(2 * len(model.layers))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            writes_to_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            nn.init.normal_(parameter, std=INITIAL_DEVIATION * (scale if writes_to_residual else 1))
