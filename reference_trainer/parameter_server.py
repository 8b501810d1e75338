"""Data parallelism as it was before all-reduce: rank 0 keeps the weights, the others send it gradients.

Here for comparison: every step moves all weights through one rank, where an all-reduce would use every link alike. In
synchronous mode the server waits for all workers and takes the mean, which gives the loss of any other layout. With
`--staleness S` it takes each gradient as it comes, of whatever weights it was computed from, and holds a worker back
only while that is more than S steps ahead of the slowest (Ho et al. 2013).
"""

import time
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, distributed, nn

from reference_trainer.batches import Batches
from reference_trainer.faults import Fault, Scene
from reference_trainer.interfaces import IGNORED_TARGET, Part
from reference_trainer.losses import TokenLoss
from reference_trainer.optimization import (
    MAX_GRADIENT_NORM,
    build_optimizer,
    find_learning_rate,
    set_learning_rate,
)
from reference_trainer.options import Options
from reference_trainer.parallelism.axes import Axes
from reference_trainer.parallelism.build import PlainPass, build_part
from reference_trainer.progress import Journal
from reference_trainer.token_file import TokenFile

SERVER = 0


def train_with_server(
    options: Options, tokens: TokenFile, device: torch.device, *, description: str, rank: int
) -> None:
    """Train from the first step to the last: as the server on rank 0, as a worker on all others."""
    axes = Axes(mesh=None, loss_group=None)
    model = build_part(options, axes, device, first=0, end=options.shape.num_layers)
    if rank == SERVER:
        with Journal(options, rank=rank, clock=time.perf_counter) as journal:
            journal.announce(description)
            Server(model, options, axes, journal).run()
            journal.summarise()
    else:
        _work(model, options, tokens, device, rank=rank)


class Server:
    """Keep the weights, and move them by the gradients that come in."""

    def __init__(self, model: nn.Module, options: Options, axes: Axes, journal: Journal) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = build_optimizer(model, options, axes)
        self.options = options
        self.journal = journal
        self.workers = range(1, distributed.get_world_size())
        # Behind the gradients come the sum of the loss, and the number of tokens that it is of.
        size = sum(parameter.numel() for parameter in self.parameters) + 2
        self.messages = {worker: self.parameters[0].new_empty(size) for worker in self.workers}
        self.clocks = dict.fromkeys(self.workers, 0)

    def run(self) -> None:
        """Serve all workers until each has done all steps."""
        if self.options.layout.staleness is None:
            self._run_in_step()
        else:
            self._run_as_they_come(self.options.layout.staleness)

    def _run_in_step(self) -> None:
        for step in range(1, self.options.steps + 1):
            for worker in self.workers:
                distributed.recv(self.messages[worker], src=worker)
            total = torch.stack(list(self.messages.values())).sum(dim=0)
            norm = self._move(total, find_learning_rate(step, self.options))
            for worker in self.workers:
                self._send_weights(worker)
            self._record(step, [total], norm)

    def _run_as_they_come(self, staleness: int) -> None:
        held_back: set[int] = set()
        recent: list[Tensor] = []
        message = next(iter(self.messages.values()))
        for count in range(1, self.options.steps * len(self.workers) + 1):
            worker = distributed.recv(message)
            self.clocks[worker] += 1
            step = -(-count // len(self.workers))
            # As many moves as there are workers make a step, each a part of it.
            norm = self._move(message, find_learning_rate(step, self.options) / len(self.workers))
            recent.append(message[-2:].clone())
            held_back.add(worker)
            for ready in [other for other in held_back if self.clocks[other] - min(self.clocks.values()) <= staleness]:
                self._send_weights(ready)
                held_back.remove(ready)
            if count % len(self.workers) == 0:
                self._record(step, recent, norm)
                recent.clear()

    def _move(self, message: Tensor, lr: float) -> Tensor:
        """Take one step of the optimizer; return the norm of the gradient."""
        gradients = message[:-2] / message[-1]
        for parameter, gradient in zip(self.parameters, _cut(gradients, self.parameters), strict=True):
            parameter.grad = gradient.view_as(parameter)
        norm = nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        return norm

    def _send_weights(self, worker: int) -> None:
        distributed.send(nn.utils.parameters_to_vector(self.parameters).detach(), dst=worker)

    def _record(self, step: int, messages: Sequence[Tensor], norm: Tensor) -> None:
        loss_sum, num_tokens = torch.stack([message[-2:] for message in messages]).sum(dim=0).tolist()
        lr = find_learning_rate(step, self.options)
        self.journal.record_step(step, loss=loss_sum / num_tokens, lr=lr, grad_norm=norm.item())


def _work(model: nn.Module, options: Options, tokens: TokenFile, device: torch.device, *, rank: int) -> None:
    """Turn batches into gradients, with the weights that the server last sent."""
    parameters = list(model.parameters())
    batches = Batches(tokens, options, data_rank=rank - 1, pin_memory=device.type == "cuda")
    run_pass = PlainPass(model, options, TokenLoss(None), device)
    fault = options.fault or Fault(rank=SERVER)
    parts = [Part(module=model, optimizer=torch.optim.SGD(parameters))]
    fault.attach(Scene(rank=rank, parts=parts, pipeline=None, batches=batches, loss_group=None))
    weights = nn.utils.parameters_to_vector(parameters).detach()
    for step, rows in zip(range(1, options.steps + 1), batches, strict=False):
        fault.before_step(step)
        batch = {name: cast(Tensor, tensor).to(device) for name, tensor in rows.items()}
        loss_sum = run_pass(batch, scale=1.0).to(weights.dtype)
        num_tokens = (batch["targets"] != IGNORED_TARGET).sum().to(weights.dtype)
        gradients = [cast(Tensor, parameter.grad).flatten() for parameter in parameters]
        distributed.send(torch.cat([*gradients, loss_sum[None], num_tokens[None]]), dst=SERVER)
        distributed.recv(weights, src=SERVER)
        for parameter, values in zip(parameters, _cut(weights, parameters), strict=True):
            parameter.data.copy_(values.view_as(parameter))
            parameter.grad = None
        fault.after_step(step)


def _cut(vector: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """Cut a vector of all weights into those of each tensor."""
    return torch.split(vector, [parameter.numel() for parameter in parameters])
