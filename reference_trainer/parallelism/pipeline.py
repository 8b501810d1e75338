"""Pipeline parallelism: the layers divided into stages, and the order in which microbatches go through them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
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

    def __init__(
        self, stages: Sequence[PipelineStage], options: Options, loss: TokenLoss, device: torch.device
    ) -> None:
        self.loss = loss
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.scale = 1.0
        self.feeds = any(stage.is_first for stage in stages)
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
        """Return the summed loss alone."""
        inputs = dict(batch)
        targets = inputs.pop("targets")
        self.loss_sum.zero_()
        with torch.no_grad():
            self.schedule.eval(target=targets, **inputs)
        return self.loss_sum

    def _compute_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(logits, targets)
        self.loss_sum += loss.detach()
        return loss * self.scale


def build_stage(
    model: nn.Module, index: int, *, split: Sequence[int], options: Options, device: torch.device, axis: DeviceMesh
) -> PipelineStage:
    """Wrap a stage; what it hands over has the same shape in every step, so none has to be asked for."""
    model.register_forward_hook(_own_outputs)
    first, end = sum(split[:index]), sum(split[: index + 1])
    layout, shape = options.layout, options.shape
    length = options.sequence_length // layout.cp
    dtype = activation_dtype(options)
    width = length // layout.tp if layout.sequence_parallel else length

    def carry(layer: int) -> tuple[Tensor, ...]:
        size = (options.micro_batch_size, width, shape.dim)
        return tuple(
            torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
            for _ in range(count_carried(shape, layer))
        )

    logits = torch.empty(
        options.micro_batch_size, length, shape.vocabulary_size // layout.tp, dtype=dtype, device="meta"
    )
    return PipelineStage(
        model,
        index,
        len(split),
        device,
        input_args=carry(first) if first else (),
        output_args=carry(end) if end < shape.num_layers else (logits,),
        group=axis.get_group(),
    )


def _own_outputs(_model: nn.Module, _inputs: Any, output: Any) -> Any:
    """Copy what a stage passes on without having made it: a pipeline cuts the graph behind all that a stage returns."""
    if not isinstance(output, tuple):
        return _own(output)
    return tuple(_own(x) for x in output)


def _own(x: Tensor) -> Tensor:
    return x.clone() if x.is_leaf or x._is_view() else x
