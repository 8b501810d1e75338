import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from reference_trainer.metrics import FORWARD_AND_BACKWARD, Rate, StepMetrics, count_flops_per_token, measure_peak
from reference_trainer.models import build_model
from reference_trainer.presets import BartShape, DecoderShape, ModelShape

LENGTH = 16
SHAPES = (
    DecoderShape(num_layers=3, dim=32, num_heads=4, num_kv_heads=2, hidden_dim=88, vocabulary_size=64),
    BartShape(num_encoder_layers=2, num_decoder_layers=3, dim=32, num_heads=4, hidden_dim=64, vocabulary_size=64),
)


@pytest.mark.parametrize("shape", SHAPES, ids=["decoder", "bart"])
def test_products_are_those_that_torch_counts(shape: ModelShape) -> None:
    model = build_model(shape)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    batch = {"inputs": tokens}
    if isinstance(shape, BartShape):
        batch |= {"encoder_inputs": tokens, "encoder_mask": torch.ones_like(tokens, dtype=torch.bool)}
    # Attention written out: torch does not count the fused one of a CPU.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(**batch)
    expected = count_flops_per_token(shape, sequence_length=LENGTH) * LENGTH / FORWARD_AND_BACKWARD
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_utilisation_is_the_share_of_the_peak() -> None:
    rate = Rate(flops_per_token=2e9, peak_flops_per_s=1e12)
    assert rate.measure(100) == pytest.approx(0.2)
    assert rate.describe(100) == "MFU 20.0% of 1 TFLOP/s"


def test_peak_is_that_of_a_machine() -> None:
    assert 1e8 < measure_peak(torch.float32, torch.device("cpu")) < 1e15


def test_what_was_not_measured_is_not_written() -> None:
    metrics = StepMetrics(step=1, loss=2.0, tokens_per_s=3.0, lr=0.1, grad_norm=1.0)
    assert "mfu" not in metrics.fields()
    measured = StepMetrics(step=1, loss=2.0, tokens_per_s=3.0, lr=0.1, grad_norm=1.0, model_flops_share=0.5)
    assert measured.fields()["mfu"] == 0.5
    assert "MFU 50.0%" in measured.describe()
