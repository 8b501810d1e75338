import pytest
import torch
from torch import nn

from reference_trainer.optimization import build_optimizer, compute_learning_rate, set_learning_rate
from reference_trainer.options import parse_options
from reference_trainer.parallelism.axes import Axes
from reference_trainer.parallelism.gradients import Gradients
from reference_trainer.placement import Placement

ALONE = Axes(mesh=None, loss_group=None)


def rate(step: int) -> float:
    return compute_learning_rate(step, peak=1.0, warmup_steps=4, steps=12)


def test_learning_rate_rises_in_a_line_to_the_peak() -> None:
    assert [rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_learning_rate_falls_along_a_cosine_to_a_tenth() -> None:
    # Half way from step 4 to step 12 the cosine is half way from 1.0 to 0.1.
    assert rate(8) == pytest.approx(0.55)
    assert rate(12) == pytest.approx(0.1)


def test_run_shorter_than_its_warm_up_ends_while_rising() -> None:
    assert compute_learning_rate(3, peak=1.0, warmup_steps=10, steps=3) == pytest.approx(0.3)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.RMSNorm(2))
    optimizer = build_optimizer(model, parse_options([], Placement()), ALONE)
    set_learning_rate(optimizer, 0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Without a gradient only decay moves a weight: by the factor 1 - 0.5 x 0.1.
    matrix, gains = (parameter.detach() for parameter in model.parameters())
    torch.testing.assert_close(matrix, before[0] * 0.95)
    torch.testing.assert_close(gains, before[1])


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_is_that_of_torch(max_norm: float) -> None:
    models = [nn.Linear(3, 4).double(), nn.Linear(3, 4).double()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(5, 3, dtype=torch.float64)
    for model in models:
        model(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(models[0].parameters(), max_norm)
    norm = Gradients(models[1:], ALONE, synchronised=True).clip(max_norm)
    torch.testing.assert_close(norm, expected)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
