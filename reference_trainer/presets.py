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
class BartShape:
    """Size BART; `max_length` is the number of learned positions."""

    num_encoder_layers: int
    num_decoder_layers: int
    dim: int
    num_heads: int
    hidden_dim: int
    max_length: int = 1024
    vocabulary_size: int = 264

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.dim // self.num_heads

    @property
    def num_layers(self) -> int:
        """Return the layers of encoder and decoder: what a pipeline divides."""
        return self.num_encoder_layers + self.num_decoder_layers

    @property
    def num_kv_heads(self) -> int:
        """Return the heads of keys and values: as many as of queries."""
        return self.num_heads


ModelShape = DecoderShape | BartShape


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Give every default of a run; `batch_size` counts the sequences of one step over all ranks."""

    gpt: DecoderShape | None = None
    bart: BartShape | None = None
    batch_size: int
    sequence_length: int
    steps: int
    warmup_steps: int
    learning_rate: float
    precision: str
    corpus_limit_bytes: int
    needs_cuda: bool = False

    @property
    def shapes(self) -> dict[str, ModelShape]:
        """Return the models of this size; the first is the default."""
        return {name: shape for name, shape in (("gpt", self.gpt), ("bart", self.bart)) if shape is not None}


PRESETS = {
    "tiny": Preset(
        gpt=DecoderShape(num_layers=4, dim=128, num_heads=4, num_kv_heads=2, hidden_dim=352),
        bart=BartShape(num_encoder_layers=2, num_decoder_layers=2, dim=128, num_heads=4, hidden_dim=512),
        batch_size=24,
        sequence_length=160,
        steps=60,
        warmup_steps=5,
        learning_rate=3e-3,
        precision="fp32",
        corpus_limit_bytes=4_000_000,
    ),
    "small": Preset(
        gpt=DecoderShape(num_layers=6, dim=256, num_heads=8, num_kv_heads=4, hidden_dim=704),
        bart=BartShape(num_encoder_layers=3, num_decoder_layers=3, dim=256, num_heads=8, hidden_dim=1024),
        batch_size=24,
        sequence_length=128,
        steps=100,
        warmup_steps=10,
        learning_rate=2e-3,
        precision="fp32",
        corpus_limit_bytes=8_000_000,
    ),
    # Deep and narrow: enough layers for every pipeline on 8 ranks, in seconds; `reference_trainer.parity` runs it.
    "deep": Preset(
        gpt=DecoderShape(num_layers=8, dim=32, num_heads=8, num_kv_heads=4, hidden_dim=64),
        bart=BartShape(num_encoder_layers=4, num_decoder_layers=4, dim=32, num_heads=8, hidden_dim=64),
        batch_size=16,
        sequence_length=16,
        steps=20,
        warmup_steps=4,
        learning_rate=3e-3,
        precision="fp64",
        corpus_limit_bytes=200_000,
    ),
    "gpu": Preset(
        gpt=DecoderShape(num_layers=16, dim=1024, num_heads=16, num_kv_heads=4, hidden_dim=2816),
        bart=BartShape(num_encoder_layers=8, num_decoder_layers=8, dim=1024, num_heads=16, hidden_dim=4096),
        batch_size=48,
        sequence_length=1024,
        steps=200,
        warmup_steps=20,
        learning_rate=6e-4,
        precision="bf16",
        corpus_limit_bytes=256_000_000,
        needs_cuda=True,
    ),
    "bart-base": Preset(
        bart=BartShape(
            num_encoder_layers=6, num_decoder_layers=6, dim=768, num_heads=12, hidden_dim=3072, vocabulary_size=50_272
        ),
        batch_size=64,
        sequence_length=512,
        steps=1000,
        warmup_steps=100,
        learning_rate=3e-4,
        precision="bf16",
        corpus_limit_bytes=256_000_000,
    ),
    "bart-large": Preset(
        bart=BartShape(
            num_encoder_layers=12,
            num_decoder_layers=12,
            dim=1024,
            num_heads=16,
            hidden_dim=4096,
            vocabulary_size=50_272,
        ),
        batch_size=64,
        sequence_length=1024,
        steps=1000,
        warmup_steps=100,
        learning_rate=2e-4,
        precision="bf16",
        corpus_limit_bytes=256_000_000,
    ),
    "1b": Preset(
        gpt=DecoderShape(
            num_layers=16, dim=2048, num_heads=32, num_kv_heads=8, hidden_dim=8192, vocabulary_size=32_000
        ),
        batch_size=64,
        sequence_length=2048,
        steps=1000,
        warmup_steps=100,
        learning_rate=3e-4,
        precision="bf16",
        corpus_limit_bytes=1_000_000_000,
        needs_cuda=True,
    ),
    "7b": Preset(
        gpt=DecoderShape(
            num_layers=32, dim=4096, num_heads=32, num_kv_heads=8, hidden_dim=14_336, vocabulary_size=32_000
        ),
        batch_size=128,
        sequence_length=4096,
        steps=1000,
        warmup_steps=100,
        learning_rate=3e-4,
        precision="bf16",
        corpus_limit_bytes=1_000_000_000,
        needs_cuda=True,
    ),
}
