"""What is measured of a step, and the share of the machine's peak that goes into the model."""

import time
from dataclasses import asdict, dataclass

import torch
from torch import distributed

from reference_trainer.presets import BartShape, DecoderShape, ModelShape

FORWARD_AND_BACKWARD = 3  # the backward pass has two products for each one of the forward pass
FLOPS_PER_PRODUCT = 2  # a multiplication and an addition
PEAK_TIME_S = 0.5


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Describe one step over all ranks; the schema of a line of `--metrics`."""

    step: int
    loss: float
    tokens_per_s: float
    lr: float
    grad_norm: float
    model_flops_share: float | None = None

    def fields(self) -> dict[str, float]:
        """Return what is known, by name; the share of the peak is called mfu."""
        values = asdict(self)
        share = values.pop("model_flops_share")
        return values if share is None else {**values, "mfu": share}

    def describe(self) -> str:
        """Say it in a line."""
        share = "" if self.model_flops_share is None else f"  MFU {self.model_flops_share:.1%}"
        return (
            f"loss {self.loss:.3f}  {self.tokens_per_s:,.0f} tokens/s{share}  lr {self.lr:.1e}  "
            f"grad norm {self.grad_norm:.2f}"
        )


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Turn tokens a second into model FLOPs utilisation (MFU): the share of the peak that the model itself needs."""

    flops_per_token: float
    peak_flops_per_s: float

    def measure(self, tokens_per_s: float) -> float:
        """Return the MFU; what is recomputed, padded or waited for is not counted as needed."""
        return tokens_per_s * self.flops_per_token / self.peak_flops_per_s

    def describe(self, tokens_per_s: float) -> str:
        """Say it with the peak that it is a share of."""
        return f"MFU {self.measure(tokens_per_s):.1%} of {self.peak_flops_per_s / 1e12:.3g} TFLOP/s"


def measure_rate(shape: ModelShape, *, sequence_length: int, dtype: torch.dtype, device: torch.device) -> Rate:
    """Measure the peak of all ranks together, at the same time; every rank must call this."""
    peak = torch.tensor([measure_peak(dtype, device)], dtype=torch.float64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(peak)
    return Rate(
        flops_per_token=count_flops_per_token(shape, sequence_length=sequence_length), peak_flops_per_s=peak.item()
    )


def measure_peak(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs a second of a product of large matrices on this device, the best of half a second."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best_s = float("inf")
    end_s = time.perf_counter() + PEAK_TIME_S
    num_runs = 0
    while time.perf_counter() < end_s or num_runs < 3:
        started_s = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
        num_runs += 1
    return FLOPS_PER_PRODUCT * size**3 / best_s


def count_flops_per_token(shape: ModelShape, *, sequence_length: int) -> float:
    """Count what training needs for a token: the products of weights, and those of attention over a whole sequence.

    As is usual, causal attention counts like full attention, and lookups, norms and activations not at all. A token of
    BART is one of its decoder, with one of its encoder.
    """
    products = (
        _count_decoder(shape, sequence_length)
        if isinstance(shape, DecoderShape)
        else _count_bart(shape, sequence_length)
    )
    return FORWARD_AND_BACKWARD * FLOPS_PER_PRODUCT * products


def _count_decoder(shape: DecoderShape, length: int) -> float:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.dim * (2 * queries + 2 * keys) + 2 * queries * length
    layer = attention + 3 * shape.dim * shape.hidden_dim
    return shape.num_layers * layer + shape.dim * shape.vocabulary_size


def _count_bart(shape: BartShape, length: int) -> float:
    attention = 4 * shape.dim**2 + 2 * shape.dim * length
    feed_forward = 2 * shape.dim * shape.hidden_dim
    encoder = shape.num_encoder_layers * (attention + feed_forward)
    decoder = shape.num_decoder_layers * (2 * attention + feed_forward)
    return encoder + decoder + shape.dim * shape.vocabulary_size
