"""Named sizes: what a preset sets when the command line does not; free of torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Size a decoder; `dim` is the width of the residual stream."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocabulary_size: int = 256

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.dim // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Give every default of a run; `batch_size` counts the sequences of one step over all ranks."""

    shape: DecoderShape
    batch_size: int
    sequence_length: int
    steps: int
    warmup_steps: int
    learning_rate: float
    precision: str
    corpus_limit_bytes: int
    needs_cuda: bool = False


PRESETS = {
    "tiny": Preset(
        shape=DecoderShape(num_layers=4, dim=128, num_heads=4, num_kv_heads=2, hidden_dim=352),
        batch_size=24,
        sequence_length=160,
        steps=60,
        warmup_steps=5,
        learning_rate=3e-3,
        precision="fp32",
        corpus_limit_bytes=4_000_000,
    ),
    "small": Preset(
        shape=DecoderShape(num_layers=6, dim=256, num_heads=8, num_kv_heads=4, hidden_dim=704),
        batch_size=24,
        sequence_length=128,
        steps=100,
        warmup_steps=10,
        learning_rate=2e-3,
        precision="fp32",
        corpus_limit_bytes=8_000_000,
    ),
    "gpu": Preset(
        shape=DecoderShape(num_layers=16, dim=1024, num_heads=16, num_kv_heads=4, hidden_dim=2816),
        batch_size=48,
        sequence_length=1024,
        steps=200,
        warmup_steps=20,
        learning_rate=6e-4,
        precision="bf16",
        corpus_limit_bytes=256_000_000,
        needs_cuda=True,
    ),
}
