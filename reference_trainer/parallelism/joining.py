"""Tensors that a backward pass in two parts has to see as one."""

from typing import Any

import torch
from torch import Tensor, nn

from reference_trainer.models import Bart


def join_layer_inputs(model: nn.Module) -> None:
    """Let the two inputs of each decoder layer of BART pass through one node of the graph.

    A zero-bubble schedule first computes the gradients of a stage's inputs, and holds back those of the weights that
    lie behind. In the stage in which the decoder begins, its embedding and first self-attention do not depend on any
    input of the stage, so that torch finds no one place behind which they lie, and runs through it twice. Behind a
    node that both inputs of a layer share, there is one.
    """
    if isinstance(model, Bart):
        for layer in model.decoder_layers.values():
            layer.register_forward_pre_hook(_join)


class Join(torch.autograd.Function):
    """Return the tensors as they are."""

    @staticmethod
    def forward(_ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return views: what passes is not copied."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients as they are."""
        return grads


def _join(_layer: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, memory, mask = inputs
    x, memory = Join.apply(x, memory)  # type: ignore[no-untyped-call]
    return x, memory, mask
