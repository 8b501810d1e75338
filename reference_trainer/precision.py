"""Which number formats a precision stands for."""

import torch

from reference_trainer.options import Options


def weight_dtype(options: Options) -> torch.dtype:
    """Return the format of weights, gradients and optimizer: bf16 trains weights of fp32."""
    return torch.float64 if options.precision == "fp64" else torch.float32


def activation_dtype(options: Options) -> torch.dtype:
    """Return the format in which layers compute, and hand over to each other."""
    return torch.bfloat16 if options.precision == "bf16" else weight_dtype(options)
