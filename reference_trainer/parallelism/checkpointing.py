"""What each layer does with its activations, and whether it is compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from reference_trainer.models import layer_lists

# What is dear to compute again: matrix products, attention, and what comes over the network.
KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_reduce",
    }
)


def checkpoint_activations(model: nn.Module, mode: str) -> None:
    """Recompute what a layer did in the backward pass: `full` all of it, `selective` all but what is dear."""
    if mode == "none":
        return
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_what_is_dear)
    for layers in layer_lists(model):
        for layer in layers.values():
            # In place of a wrapper, which would change the names of the weights.
            layer.forward = _recomputing(layer.forward, contexts)


def compile_layers(model: nn.Module, *, enabled: bool) -> None:
    """Compile each layer by itself: they are alike, so that one compilation serves all."""
    if enabled:
        for layers in layer_lists(model):
            for layer in layers.values():
                layer.compile()


def _recomputing(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **contexts, **keywords)

    return run


def _keep_what_is_dear(_context: Any, operator: torch._ops.OpOverload, *_: Any, **__: Any) -> CheckpointPolicy:
    name = str(operator.name()).split(".")[0]  # type: ignore[no-untyped-call]
    return CheckpointPolicy.MUST_SAVE if name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
