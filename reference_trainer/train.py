"""The training loop, from top to bottom. Read this file first."""

import math
import time
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, distributed

from reference_trainer.batches import Batches
from reference_trainer.checkpoint import Checkpoints
from reference_trainer.errors import UsageError
from reference_trainer.faults import Fault, Scene
from reference_trainer.interfaces import IGNORED_TARGET
from reference_trainer.metrics import measure_rate
from reference_trainer.models import count_parameters
from reference_trainer.optimization import MAX_GRADIENT_NORM, find_learning_rate, set_learning_rate
from reference_trainer.options import Options
from reference_trainer.parallelism.axes import Axes, build_axes
from reference_trainer.parallelism.build import Training, build_training
from reference_trainer.parallelism.context import take_columns
from reference_trainer.parallelism.devices import choose_device, join_job, leave_job, share_cores
from reference_trainer.parameter_server import train_with_server
from reference_trainer.placement import Placement
from reference_trainer.precision import activation_dtype
from reference_trainer.progress import Journal
from reference_trainer.random_numbers import seed_rank
from reference_trainer.token_file import TokenFile


def train(options: Options, tokens: TokenFile, placement: Placement) -> None:
    """Train from the first step to the last on this rank, together with all others."""
    share_cores(placement)
    device = choose_device(options, placement)
    join_job(device, placement)
    if options.layout.dp_mode == "ps":
        description = describe_run(options, tokens, device)
        train_with_server(options, tokens, device, description=description, rank=placement.rank)
    else:
        train_layout(options, tokens, device, rank=placement.rank)
    leave_job()  # only here, where nothing is left of what was trained: it holds groups


def train_layout(options: Options, tokens: TokenFile, device: torch.device, *, rank: int) -> None:
    """Train all ranks as the layout says: data, tensor, pipeline, context parallel, or several of them."""
    axes = build_axes(options.layout, options.precision, device)
    seed_rank(options.seed, rank)

    training = build_training(options, axes, device)
    batches = Batches(
        tokens, options, data_rank=axes.rank("dp_replicate", "dp_shard"), pin_memory=device.type == "cuda"
    )
    checkpoints = Checkpoints(options, tokens, training.parts, batches)
    num_done = checkpoints.load()
    fault = options.fault or Fault(rank=0)
    fault.attach(Scene.find(training, batches, axes, rank=rank))

    rate = None
    if options.mfu:
        dtype = activation_dtype(options)
        rate = measure_rate(options.shape, sequence_length=options.sequence_length, dtype=dtype, device=device)
    with Journal(options, rank=rank, clock=time.perf_counter, num_done=num_done, rate=rate) as journal:
        journal.announce(describe_run(options, tokens, device))
        for step, rows in zip(range(num_done + 1, options.steps + 1), batches, strict=False):
            fault.before_step(step)
            batch = load(rows, axes, device)
            num_tokens = axes.sum_over_data((batch["targets"] != IGNORED_TARGET).sum()).item()
            # Gradients are averaged over the ranks that see other tokens, but are of the mean over all tokens.
            loss_sum = training.run_pass(batch, scale=axes.num_data_ranks / num_tokens)

            training.gradients.complete()
            grad_norm = training.gradients.clip(MAX_GRADIENT_NORM)
            lr = find_learning_rate(step, options)
            for part in training.parts:
                set_learning_rate(part.optimizer, lr)
                part.optimizer.step()
                part.optimizer.zero_grad()

            loss = average_loss(fault.before_loss_average(step, loss_sum), num_tokens, axes)
            fault.after_step(step)
            if not math.isfinite(loss):
                leave_job()  # every rank has the same loss and comes here
                raise UsageError(f"the loss is {loss} at step {step}; lower --learning-rate {options.learning_rate}")
            journal.record_step(step, loss=loss, lr=lr, grad_norm=grad_norm.item())
            checkpoints.after_step(step)
            if options.data.evaluate_every and step % options.data.evaluate_every == 0:
                journal.record_evaluation(step, loss=evaluate(training, batches, axes, device))

        checkpoints.finish()
        journal.summarise()


def evaluate(training: Training, batches: Batches, axes: Axes, device: torch.device) -> float:
    """Return the mean loss of a held-out token; every rank must call this."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for rows in batches.read_held_out():
        batch = load(rows, axes, device)
        totals[0] += training.run_pass.evaluate(batch)
        totals[1] += (batch["targets"] != IGNORED_TARGET).sum()
    num_tokens = axes.sum_over_data(totals[1].clone()).item()
    return average_loss(totals[0], num_tokens, axes)


def load(batch: Mapping[str, object], axes: Axes, device: torch.device) -> dict[str, Tensor]:
    """Bring this rank's rows and columns of a step to its device."""
    columns = take_columns(cast(dict[str, Tensor], batch), axes.find("cp"))
    return {name: tensor.to(device, non_blocking=True) for name, tensor in columns.items()}


def average_loss(loss_sum: Tensor, num_tokens: float, axes: Axes) -> float:
    """Return the mean loss of a token over all ranks; every rank must call this."""
    if axes.loss_group is not None:
        distributed.all_reduce(loss_sum, group=axes.loss_group)
    # Tensor-parallel ranks have counted the same tokens.
    return loss_sum.item() / axes.size("tp") / num_tokens


def describe_run(options: Options, tokens: TokenFile, device: torch.device) -> str:
    """Say what is trained, on what, and where."""
    layout, name = options.layout, "decoder" if options.model == "gpt" else "BART"
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''} on {device.type}"
    backend = f" with {distributed.get_backend()}" if distributed.is_initialized() else ""
    return (
        f"model   {name}, {count_parameters(options.shape) / 1e6:.2f} M parameters, {options.precision}\n"
        f"corpus  {tokens.describe()}\n"
        f"layout  {ranks}{backend}{layout.describe()}; a step is {options.batch_size} sequences of "
        f"{options.sequence_length} tokens"
    )
