"""How the weights move: AdamW, and the learning rate over the steps."""

import math
from collections import defaultdict
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from reference_trainer.options import Options
from reference_trainer.parallelism.axes import DATA_AXES, Axes
from reference_trainer.parallelism.offload import OffloadedAdamW

MAX_GRADIENT_NORM = 1.0
FINAL_FRACTION = 0.1
WEIGHT_DECAY = 0.1


def build_optimizer(model: nn.Module, options: Options, axes: Axes) -> Optimizer:
    """Build AdamW, or one that shards its state (ZeRO-1) or averages weights (local SGD) around it."""
    groups = group_parameters(model)
    settings: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "fused": True}
    group = axes.group(*DATA_AXES)
    kind = OffloadedAdamW if options.layout.offloads_optimizer else AdamW
    if options.layout.dp_mode == "zero1" and group is not None:
        # Here and below: loading torch.distributed.optim compiles what only these two need.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, kind, process_group=group, **settings)
    optimizer = kind(groups, **settings)
    if options.layout.local_sgd and group is not None:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        averager = PeriodicModelAverager(
            period=options.layout.local_sgd, warmup_steps=options.preset.warmup_steps, process_group=group
        )
        return PostLocalSGDOptimizer(optimizer, averager)
    return optimizer


def group_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """Group weights: matrices decay, gains and biases do not; and one kernel takes only what is divided alike."""
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[parameter.dim() >= 2, mesh].append(parameter)
    return [
        {"params": parameters, "weight_decay": WEIGHT_DECAY if decays else 0.0}
        for (decays, _), parameters in groups.items()
    ]


def find_learning_rate(step: int, options: Options) -> float:
    """Return the learning rate of a step of this run."""
    return compute_learning_rate(
        step, peak=options.learning_rate, warmup_steps=options.preset.warmup_steps, steps=options.steps
    )


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
