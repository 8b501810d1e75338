"""Pipeline parallelism: the layers divided into stages, and the order in which microbatches go through them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from reference_trainer.losses import TokenLoss
from reference_trainer.options import Options
from reference_trainer.parallelism.rows import split_rows
from reference_trainer.parallelism.stages import count_carried
from reference_trainer.precision import activation_dtype

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class PipelinePass:
    """Run one step's forward and backward passes through the stages of this rank."""

    def __init__(self, built: Sequence["BuiltStage"], options: Options, loss: TokenLoss, device: torch.device) -> None:
        stages = [stage.stage for stage in built]
        self.built = sorted(built, key=lambda stage: stage.stage.stage_index)
        self.microbatches = options.layout.microbatches
        self.loss = loss
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.scale = 1.0
        make = SCHEDULES[options.layout.schedule]
        single = options.layout.stages_per_rank == 1 and options.layout.schedule in ("gpipe", "1f1b")
        self.schedule = make(
            stages[0] if single else list(stages),
            options.layout.microbatches,
            loss_fn=self._compute_loss,
            scale_grads=False,
        )

    def __call__(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
        """Leave gradients of `scale` times the summed loss; return the loss that is known here: on the last stage."""
        inputs = dict(batch)
        targets = inputs.pop("targets")
        self.scale = scale
        self.loss_sum.zero_()
        self.schedule.step(target=targets, return_outputs=False, **inputs)
        return self.loss_sum

    def evaluate(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the summed loss alone, where it is known.

        One microbatch goes through all stages, then the next: torch's own `eval` fails where two stages that follow
        each other are on one rank.
        """
        self.loss_sum.zero_()
        with torch.no_grad():
            for microbatch in split_rows(batch, self.microbatches):
                targets = microbatch.pop("targets")
                carried: tuple[Tensor, ...] = ()
                for stage in self.built:
                    carried = stage.forward(carried, microbatch)
                    if stage.stage.is_last:
                        self.loss_sum += self.loss(carried[0], targets)
        return self.loss_sum

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(logits, targets)
        self.loss_sum += loss.detach()
        return loss * self.scale


@dataclass(frozen=True, kw_only=True)
class BuiltStage:
    """Hold a stage, and what tensors it takes from the one before."""

    stage: PipelineStage
    takes: tuple[Tensor, ...]
    group: distributed.ProcessGroup
    device: torch.device

    def forward(self, carried: tuple[Tensor, ...], inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Run a microbatch alone; `carried` comes from the stage before where that is on this rank too."""
        index, ranks = self.stage.stage_index, self.stage.stage_index_to_group_rank
        if index and ranks[index - 1] != self.group.rank():
            carried = tuple(torch.empty_like(x, device=self.device) for x in self.takes)
            for x in carried:
                distributed.recv(x, group=self.group, group_src=ranks[index - 1])
        output = self.stage.submod(*carried, **inputs)
        outputs = output if isinstance(output, tuple) else (output,)
        if not self.stage.is_last and ranks[index + 1] != self.group.rank():
            for x in outputs:
                distributed.send(x.contiguous(), group=self.group, group_dst=ranks[index + 1])
        return outputs


def build_stage(
    model: nn.Module, index: int, *, split: Sequence[int], options: Options, device: torch.device, axis: DeviceMesh
) -> BuiltStage:
    """Wrap a stage; what it hands over has the same shape in every step, so none has to be asked for."""
    model.register_forward_hook(_own_outputs)
    first, end = sum(split[:index]), sum(split[: index + 1])
    layout, shape = options.layout, options.shape
    length = options.sequence_length // layout.cp
    dtype = activation_dtype(options)
    width = length // layout.tp if layout.sequence_parallel else length

    def carry(layer: int) -> tuple[Tensor, ...]:
        size = (options.microbatch_size, width, shape.dim)
        return tuple(
            torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
            for _ in range(count_carried(shape, layer))
        )

    logits = torch.empty(
        options.microbatch_size, length, shape.vocabulary_size // layout.tp, dtype=dtype, device="meta"
    )
    takes = carry(first) if first else ()
    stage = PipelineStage(
        model,
        index,
        len(split),
        device,
        input_args=takes,
        output_args=carry(end) if end < shape.num_layers else (logits,),
        group=axis.get_group(),
    )
    return BuiltStage(stage=stage, takes=takes, group=axis.get_group(), device=device)


def _own_outputs(_model: nn.Module, _inputs: Any, output: Any) -> Any:
    """Copy what a stage passes on without having made it: a pipeline cuts the graph behind all that a stage returns."""
    if not isinstance(output, tuple):
        return _own(output)
    return tuple(_own(x) for x in output)


def _own(x: Tensor) -> Tensor:
    return x.clone() if x.is_leaf or x._is_view() else x
