"""Models written for one device; nothing in here knows of ranks."""

import torch
from torch import nn

from reference_trainer.models.bart import Bart
from reference_trainer.models.decoder import Decoder
from reference_trainer.models.weights import initialise_weights
from reference_trainer.presets import BartShape, ModelShape

__all__ = ["Bart", "Decoder", "build_model", "count_parameters", "initialise_weights", "layer_lists"]


def build_model(shape: ModelShape) -> Decoder | Bart:
    """Build the model of a shape; its weights are set by `initialise_weights`."""
    return Bart(shape) if isinstance(shape, BartShape) else Decoder(shape)


def layer_lists(model: nn.Module) -> list[nn.ModuleDict]:
    """Return the stacks of layers: one of a decoder, two of BART."""
    return [child for child in model.children() if isinstance(child, nn.ModuleDict)]


def count_parameters(shape: ModelShape) -> int:
    """Count the weights of the undivided model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(shape).parameters())
