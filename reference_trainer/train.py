"""The training loop, from top to bottom. Read this file first."""

import math
import time

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from reference_trainer.batches import build_loader
from reference_trainer.corpus import Corpus
from reference_trainer.errors import UsageError
from reference_trainer.faults import Fault
from reference_trainer.model import Decoder, initialise_weights
from reference_trainer.optimization import build_optimizer, compute_learning_rate, set_learning_rate
from reference_trainer.options import Options
from reference_trainer.parallelism import (
    choose_device,
    leave_process_groups,
    replicate,
    share_cores,
    start_process_groups,
    synchronise_gradients,
)
from reference_trainer.placement import Placement
from reference_trainer.progress import Journal

MAX_GRADIENT_NORM = 1.0


def train(options: Options, corpus: Corpus, placement: Placement) -> None:
    """Train from the first step to the last on this rank, together with all others."""
    share_cores(placement)
    device = choose_device(options, placement)
    loss_group = start_process_groups(device, placement)
    fault = options.fault if options.fault and options.fault.rank == placement.rank else Fault(rank=placement.rank)

    model = replicate(build_model(options, device), device)
    optimizer = build_optimizer(model)
    loader = build_loader(corpus.text, options=options, placement=placement, pin_memory=device.type == "cuda")
    batches = iter(loader)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16")

    with Journal(options, rank=placement.rank, clock=time.perf_counter) as journal:
        journal.announce(describe_run(options, corpus, model, device))
        for step in range(1, options.steps + 1):
            fault.before_step(step)
            lr = compute_learning_rate(
                step, peak=options.learning_rate, warmup_steps=options.preset.warmup_steps, steps=options.steps
            )
            set_learning_rate(optimizer, lr)

            loss_sum = torch.zeros((), dtype=torch.float64, device=device)
            num_tokens = 0
            for micro_batch in range(1, options.accumulate + 1):
                tokens = next(batches).to(device, non_blocking=True)
                with synchronise_gradients(model, enabled=micro_batch == options.accumulate):
                    with autocast:
                        micro_loss = compute_loss(model, tokens)
                    (micro_loss / options.accumulate).backward()  # type: ignore[no-untyped-call]
                num_micro_tokens = tokens[:, 1:].numel()
                loss_sum += micro_loss.detach() * num_micro_tokens
                num_tokens += num_micro_tokens

            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()

            if fault.skips_loss_average(step):
                loss = loss_sum.item() / num_tokens
            else:
                loss = average_loss(loss_sum, num_tokens, loss_group)
            if not math.isfinite(loss):
                leave_process_groups()  # every rank has the same loss and comes here
                raise UsageError(f"the loss is {loss} at step {step}; lower --learning-rate {options.learning_rate}")
            journal.record_step(step, loss=loss, lr=lr, grad_norm=grad_norm.item())

        journal.summarise()
    leave_process_groups()


def build_model(options: Options, device: torch.device) -> Decoder:
    """Build the same model on every rank: the weights are drawn on the CPU, from the seed alone."""
    torch.manual_seed(options.seed)
    model = Decoder(options.preset.shape)
    initialise_weights(model)
    return model.to(device, torch.float64 if options.precision == "fp64" else torch.float32)


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of every token given those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def average_loss(loss_sum: Tensor, num_tokens: int, group: distributed.ProcessGroup | None) -> float:
    """Return the mean loss of a token over all ranks; every rank must call this."""
    totals = torch.stack((loss_sum, torch.full_like(loss_sum, num_tokens)))
    if group is not None:
        distributed.all_reduce(totals, group=group)
    return (totals[0] / totals[1]).item()


def describe_run(options: Options, corpus: Corpus, model: nn.Module, device: torch.device) -> str:
    """Say what is trained, on what, and where."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{'the first ' if corpus.cut else ''}{len(corpus.text) / 1e6:.1f} MB in {corpus.num_files} files"
    skipped = f" (left out as not UTF-8 text: {corpus.num_files_skipped})" if corpus.num_files_skipped else ""
    ranks = f"{options.dp} rank{'s' if options.dp > 1 else ''} on {device.type}"
    backend = f" with {distributed.get_backend()}" if distributed.is_initialized() else ""
    return (
        f"model   decoder, {num_parameters / 1e6:.2f} M parameters, {options.precision}\n"
        f"corpus  {size} of {corpus.source}{skipped}\n"
        f"layout  {ranks}{backend}; a step is {options.batch_size} sequences of "
        f"{options.sequence_length} tokens"
    )
