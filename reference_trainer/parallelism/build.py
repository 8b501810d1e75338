"""Put everything together: from a model for one device to what this rank trains, in the order in which it has to be."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reference_trainer.interfaces import Part
from reference_trainer.losses import TokenLoss
from reference_trainer.models import build_model, initialise_weights
from reference_trainer.optimization import build_optimizer
from reference_trainer.options import Options
from reference_trainer.parallelism.axes import Axes
from reference_trainer.parallelism.checkpointing import checkpoint_activations, compile_layers
from reference_trainer.parallelism.context import GatheringCore, divide_context
from reference_trainer.parallelism.data import apply_data_parallelism, synchronise_gradients
from reference_trainer.parallelism.gradients import Gradients
from reference_trainer.parallelism.joining import join_layer_inputs
from reference_trainer.parallelism.offload import offload_activations
from reference_trainer.parallelism.pipeline import PipelinePass, build_stage
from reference_trainer.parallelism.ring import RingCore
from reference_trainer.parallelism.rows import split_rows
from reference_trainer.parallelism.stages import divide_layers, find_stages_of_rank
from reference_trainer.parallelism.tensor import divide_tensors
from reference_trainer.precision import weight_dtype

Pass = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hold what this rank trains, and how it runs a step of it."""

    parts: list[Part]
    run_pass: "PlainPass | PipelinePass"
    gradients: Gradients

    @property
    def pipeline(self) -> PipelinePass | None:
        """Return the pass where it is one through stages."""
        return self.run_pass if isinstance(self.run_pass, PipelinePass) else None


class PlainPass:
    """Run one step's forward and backward passes, one microbatch after the other."""

    def __init__(self, model: nn.Module, options: Options, loss: TokenLoss, device: torch.device) -> None:
        self.model = model
        self.loss = loss
        self.accumulate = options.layout.accumulate
        # Where FSDP holds the weights, it also casts them.
        casts = options.precision == "bf16" and options.layout.has_plain_parameters
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=casts)

    def __call__(self, batch: dict[str, Tensor], *, scale: float) -> Tensor:
        """Leave gradients of `scale` times the summed loss; return the summed loss."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=batch["targets"].device)
        microbatches = split_rows(batch, self.accumulate)
        for index, microbatch in enumerate(microbatches, start=1):
            with synchronise_gradients(self.model, enabled=index == len(microbatches)):
                loss = self._compute_loss(microbatch)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
        return loss_sum

    def evaluate(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the summed loss alone."""
        with torch.no_grad():
            losses = [self._compute_loss(microbatch) for microbatch in split_rows(batch, self.accumulate)]
        return torch.stack(losses).sum()

    def _compute_loss(self, microbatch: dict[str, Tensor]) -> Tensor:
        inputs = dict(microbatch)
        targets = inputs.pop("targets")
        with self.autocast:
            return self.loss(self.model(**inputs), targets)


def build_training(options: Options, axes: Axes, device: torch.device) -> Training:
    """Parallelize the model as the layout says; every rank must call this."""
    layout = options.layout
    loss = TokenLoss(axes.group("tp"))
    pipeline = axes.find("pp")
    if pipeline is None:
        model = build_part(options, axes, device, first=0, end=options.shape.num_layers)
        models = [model]
        run_pass: PlainPass | PipelinePass = PlainPass(model, options, loss, device)
    else:
        split = divide_layers(options, device)
        indexes = find_stages_of_rank(layout, pipeline.get_local_rank())
        models = [
            build_part(options, axes, device, first=sum(split[:index]), end=sum(split[: index + 1]))
            for index in indexes
        ]
        stages = [
            build_stage(model, index, split=split, options=options, device=device, axis=pipeline)
            for index, model in zip(indexes, models, strict=True)
        ]
        run_pass = PipelinePass(stages, options, loss, device)
    return Training(
        parts=[Part(module=model, optimizer=build_optimizer(model, options, axes)) for model in models],
        run_pass=run_pass,
        gradients=Gradients(models, axes, synchronised=not layout.local_sgd),
    )


def build_part(options: Options, axes: Axes, device: torch.device, *, first: int, end: int) -> nn.Module:
    """Build some layers of the model, with this rank's part of each.

    The shape of the weights is known long before their numbers: no rank ever holds what it does not train.
    """
    layout = options.layout
    with torch.device("meta"):
        model = build_model(options.shape).to(weight_dtype(options))
    model.keep_layers(first, end)
    divide_tensors(model, axes.find("tp"), sequence_parallel=layout.sequence_parallel)
    divide_context(model, axes.find("cp"), RingCore if layout.cp_attention == "ring" else GatheringCore)
    if layout.splits_backward:
        join_layer_inputs(model)
    checkpoint_activations(model, layout.activation_checkpointing)
    offload_activations(model, enabled=layout.offloads_activations)
    compile_layers(model, enabled=layout.compile)
    if layout.has_plain_parameters:
        fill(model, options, device)
        return apply_data_parallelism(model, options, axes, device)
    parallel_model = apply_data_parallelism(model, options, axes, device)
    fill(parallel_model, options, device)
    return parallel_model


def fill(model: nn.Module, options: Options, device: torch.device) -> None:
    """Give the weights memory and their first numbers."""
    model.to_empty(device=device)
    initialise_weights(model, seed=options.seed, num_layers=options.shape.num_layers)
