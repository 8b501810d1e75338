"""Tensor and sequence parallelism: heads, widths, and the vocabulary divided over neighbouring ranks.

A column-parallel layer, whose outputs are divided, is followed by a row-parallel one, whose inputs are: between the two
no rank needs anything of another. `--sequence-parallel` divides the residual stream along the sequence outside of such
pairs, so that the all_reduce behind each becomes a reduce_scatter, and an all_gather before the next.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from reference_trainer.models.bart import Bart

Plan = Mapping[str, ParallelStyle]


def divide_tensors(model: nn.Module, axis: DeviceMesh | None, *, sequence_parallel: bool) -> None:
    """Divide the weights of a model, or of what is left of it in a pipeline stage, over an axis."""
    if axis is None:
        return
    plan = plan_bart(sequence_parallel) if isinstance(model, Bart) else plan_decoder(sequence_parallel)
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        expression = re.compile(pattern.replace(".", r"\.").replace("*", "[0-9]+"))
        for name in filter(expression.fullmatch, names):
            parallelize_module(model, axis, {name: style})


def plan_decoder(sequence_parallel: bool) -> Plan:
    """Say how each module of the decoder is divided."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    norms = ("norm", "layers.*.attention_norm", "layers.*.feed_forward_norm") if sequence_parallel else ()
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        **{name: SequenceParallel(use_local_output=True) for name in norms},
        "layers.*.attention": _gather(stream, None),
        **_divide_attention("layers.*.attention", stream),
        "layers.*.feed_forward": _gather(stream),
        "layers.*.feed_forward.gate": ColwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1)),
    }


def plan_bart(sequence_parallel: bool) -> Plan:
    """Say how each module of BART is divided."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {"embedding": VocabularyParallel(stream)}
    if sequence_parallel:
        for side in ("encoder", "decoder"):
            plan[f"{side}_positions.table"] = PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(0)
            )
            plan[f"{side}_positions.norm"] = SequenceParallel(use_local_output=True)
            for norm in ("attention_norm", "cross_attention_norm", "feed_forward_norm"):
                plan[f"{side}_layers.*.{norm}"] = SequenceParallel(use_local_output=True)
    for side in ("encoder", "decoder"):
        layer = f"{side}_layers.*"
        plan |= {f"{layer}.attention": _gather(stream), **_divide_attention(f"{layer}.attention", stream)}
        plan |= {
            f"{layer}.cross_attention": _gather(stream, stream),
            **_divide_attention(f"{layer}.cross_attention", stream),
        }
        plan |= {
            f"{layer}.feed_forward": _gather(stream),
            f"{layer}.feed_forward.up": ColwiseParallel(),
            f"{layer}.feed_forward.down": RowwiseParallel(output_layouts=stream),
        }
    return plan


class VocabularyParallel(ParallelStyle):
    """Divide the rows of the tied embedding: each rank looks up, and scores, its part of the vocabulary."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            _divide_rows,
            partial(_enter_embedding, self.stream),
            partial(_leave_embedding, self.stream),  # type: ignore[arg-type]
        )


def _divide_rows(_name: str, module: nn.Module, axis: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, axis, [Shard(0)])))


def _enter_embedding(stream: Placement, _module: nn.Module, arguments: tuple[Tensor], axis: DeviceMesh) -> Any:
    (x,) = arguments
    placement = stream if x.is_floating_point() else Replicate()
    return (DTensor.from_local(x, axis, [placement], run_check=False).redistribute(placements=[Replicate()]),)


def _leave_embedding(stream: Placement, module: nn.Module, output: DTensor, _axis: DeviceMesh) -> Tensor:
    is_logits = output.shape[-1] == cast(Tensor, module.weight).shape[0]
    return output.redistribute(placements=[Shard(-1) if is_logits else stream]).to_local()


def _gather(*streams: Placement | None) -> PrepareModuleInput:
    """Give every rank the whole sequence of a module's inputs; None is passed as it is."""
    wanted = tuple(None if stream is None else Replicate() for stream in streams)
    return PrepareModuleInput(input_layouts=streams, desired_input_layouts=wanted)


def _divide_attention(name: str, stream: Placement) -> Plan:
    heads = {f"{name}.{projection}": ColwiseParallel() for projection in ("query", "key", "value")}
    return {**heads, f"{name}.output": RowwiseParallel(output_layouts=stream)}
