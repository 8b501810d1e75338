"""BART (Lewis et al. 2019): bidirectional encoder, autoregressive decoder, one embedding for both and for the output.

As in the paper the norms stand behind the residual sums, positions are learned, and the activation is GELU. Left out:
dropout, so that a run is the same on every layout.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference_trainer.models.attention import MultiHeadAttention, Positions
from reference_trainer.presets import BartShape


class TiedEmbedding(nn.Module):
    """Hold the one table that turns tokens into vectors and vectors into logits."""

    def __init__(self, shape: BartShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocabulary_size, shape.dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map token numbers to vectors, and vectors to logits."""
        return functional.linear(x, self.weight) if x.is_floating_point() else functional.embedding(x, self.weight)


class Attention(MultiHeadAttention):
    """Look from `x` at itself, or at `source`, what the encoder made."""

    def __init__(self, shape: BartShape) -> None:
        heads = shape.num_heads
        super().__init__(dim=shape.dim, num_heads=heads, num_kv_heads=heads, head_dim=shape.head_dim, bias=True)

    def forward(
        self, x: Tensor, source: Tensor | None = None, *, causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        source = x if source is None else source
        query, key, value = (
            self.split_heads(projected) for projected in (self.query(x), self.key(source), self.value(source))
        )
        return self.join_heads(self.core(query, key, value, causal=causal, key_mask=key_mask))


class FeedForward(nn.Module):
    """Widen each position, and narrow it again."""

    def __init__(self, shape: BartShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.dim, shape.hidden_dim)
        self.down = nn.Linear(shape.hidden_dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        return cast(Tensor, self.down(functional.gelu(self.up(x))))


class EncoderLayer(nn.Module):
    """Let every position see all others."""

    def __init__(self, shape: BartShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.attention_norm = nn.LayerNorm(shape.dim)
        self.feed_forward = FeedForward(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.dim)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        x = self.attention_norm(x + self.attention(x, key_mask=key_mask))
        return cast(Tensor, self.feed_forward_norm(x + self.feed_forward(x)))


class DecoderLayer(nn.Module):
    """Let every position see those before it, then all that the encoder made."""

    def __init__(self, shape: BartShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.attention_norm = nn.LayerNorm(shape.dim)
        self.cross_attention = Attention(shape)
        self.cross_attention_norm = nn.LayerNorm(shape.dim)
        self.feed_forward = FeedForward(shape)
        self.feed_forward_norm = nn.LayerNorm(shape.dim)

    def forward(self, x: Tensor, memory: Tensor, key_mask: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        x = self.attention_norm(x + self.attention(x, causal=True))
        x = self.cross_attention_norm(x + self.cross_attention(x, memory, key_mask=key_mask))
        return cast(Tensor, self.feed_forward_norm(x + self.feed_forward(x)))


class EmbeddedPositions(nn.Module):
    """Add learned positions to token vectors, and normalise."""

    def __init__(self, shape: BartShape) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.max_length, shape.dim)
        self.norm = nn.LayerNorm(shape.dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map (batch, length, dim) to the same shape."""
        return cast(Tensor, self.norm(x + self.table(positions)))


class Bart(nn.Module):
    """Rebuild a text from a damaged copy of it; its layers are those of the encoder, then those of the decoder."""

    def __init__(self, shape: BartShape) -> None:
        super().__init__()
        self.positions = Positions()
        self.embedding: TiedEmbedding | None = TiedEmbedding(shape)
        self.encoder_positions: EmbeddedPositions | None = EmbeddedPositions(shape)
        self.encoder_layers = nn.ModuleDict({str(i): EncoderLayer(shape) for i in range(shape.num_encoder_layers)})
        self.decoder_positions: EmbeddedPositions | None = EmbeddedPositions(shape)
        self.decoder_layers = nn.ModuleDict({str(i): DecoderLayer(shape) for i in range(shape.num_decoder_layers)})
        self.makes_logits = True

    def forward(
        self,
        x: Tensor | None = None,
        memory: Tensor | None = None,
        *,
        inputs: Tensor,
        encoder_inputs: Tensor,
        encoder_mask: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map two times (batch, length) token numbers to logits.

        What has been cut off is taken from `x`, and from `memory` where the encoder has ended before, or left to
        others: then the result is what they take.
        """
        positions = self.positions(inputs.shape[1], inputs.device)
        if self.encoder_positions is not None:
            assert self.embedding is not None
            x = self.encoder_positions(self.embedding(encoder_inputs), positions)
        for layer in self.encoder_layers.values():
            x = layer(x, encoder_mask)
        if self.decoder_positions is not None:
            assert self.embedding is not None
            memory, x = x, self.decoder_positions(self.embedding(inputs), positions)
        for layer in self.decoder_layers.values():
            x = layer(x, memory, encoder_mask)
        assert x is not None
        if self.makes_logits:
            assert self.embedding is not None
            return cast(Tensor, self.embedding(x))
        return x if memory is None else (x, memory)

    def keep_layers(self, first: int, end: int) -> None:
        """Cut off all but the layers from `first` to before `end`, and the ends of encoder and decoder they touch."""
        num_encoder, num_decoder = len(self.encoder_layers), len(self.decoder_layers)
        if first > 0:
            self.encoder_positions = None
        if not first <= num_encoder < end:
            self.decoder_positions = None
        self.makes_logits = end == num_encoder + num_decoder
        if self.encoder_positions is None and self.decoder_positions is None and not self.makes_logits:
            self.embedding = None
        for index in range(num_encoder + num_decoder):
            if not first <= index < end:
                layers, offset = (self.encoder_layers, 0) if index < num_encoder else (self.decoder_layers, num_encoder)
                del layers[str(index - offset)]
