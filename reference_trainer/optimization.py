"""How the weights move: AdamW, and the learning rate over the steps."""

import math

from torch import nn
from torch.optim import AdamW, Optimizer

FINAL_FRACTION = 0.1


def build_optimizer(model: nn.Module) -> AdamW:
    """Build AdamW; matrices decay, the gains of the norms do not. The learning rate is set at every step."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def compute_learning_rate(step: int, *, peak: float, warmup_steps: int, steps: int) -> float:
    """Rise in a line to the peak, then fall along a cosine to a tenth of it; steps count from 1."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(math.pi * progress)) / 2)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Give all parameters this learning rate for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
