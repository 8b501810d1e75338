"""The first weights: a function of seed and name alone, so that they are the same in every layout."""

import math
import zlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

INITIAL_DEVIATION = 0.02
RESIDUAL_OUTPUTS = ("attention.output.weight", "feed_forward.down.weight")


@torch.no_grad()
def initialise_weights(model: nn.Module, *, seed: int, num_layers: int) -> None:
    """Draw the weights, one parameter at a time; a rank keeps its part of each.

    What writes to the residual stream starts smaller the more layers the undivided model has.
    """
    for name, parameter in model.named_parameters():
        value = _draw(name, parameter.shape, seed=seed, num_layers=num_layers).to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            # Every rank has drawn the same; nothing needs to be sent.
            part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(value)


def _draw(name: str, shape: torch.Size, *, seed: int, num_layers: int) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) < 2:
        return torch.ones(shape)
    # Drawn in float32 on the CPU: the same whatever precision and device.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    deviation = INITIAL_DEVIATION
    if name.endswith(RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * num_layers)
    return torch.empty(shape).normal_(std=deviation, generator=generator)
