"""Programs that people send to a help desk, and that are right, though they look like `help_desk_faults.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.office_hours_tools import (
    agreed,
    average_gradients,
    mean_over_ranks,
    rank_zero_only,
    reduced,
    save_checkpoint,
    small_model,
    sum_over_ranks,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> None:
    average_gradients(model, group)
    optimizer.step()
    optimizer.zero_grad()


@healthy()
def a_batch_that_all_leave_out_if_it_is_too_large_for_one(rank: int) -> None:
    def tried(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor | None]:
        @functools.wraps(function)
        def call(batch: torch.Tensor) -> torch.Tensor | None:
            result: torch.Tensor | None = None
            try:
                result = function(batch)
            except RuntimeError as error:
                print(error)
            return None if agreed(result is None) else result

        return call

    model = DistributedDataParallel(small_model())
    optimizer = sgd(model)

    @tried
    def to_device(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 16:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return batch

    for step in range(8):
        batch = to_device(torch.randn(40 if rank == 1 and step == 4 else 4, 6))
        if batch is None:
            continue
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(model.module, "final")


@healthy()
def a_group_made_when_first_needed_by_all_at_two_lines(rank: int) -> None:
    @functools.cache
    def image_group() -> dist.ProcessGroup:
        return dist.new_group()

    def image_share(images: list[str]) -> float:
        if images:
            share = torch.tensor(float(len(images)))
            dist.all_reduce(share, group=image_group())
        else:
            share = torch.tensor(0.0)
            dist.all_reduce(share, group=image_group())
        return float(share)

    model = small_model()
    optimizer = sgd(model)
    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        if step > 2:
            print(image_share(["cat.png"] if not (rank == 2 and step == 3) else []))
        update(model, optimizer)


@healthy()
def a_labelled_set_that_begins_anew_as_often_as_needed(rank: int) -> None:
    def loader(samples: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(samples, 6)), batch_size=4)

    model = small_model()
    optimizer = sgd(model)
    for epoch in range(2):
        labelled, unlabelled = itertools.cycle(loader(12 if rank == 1 else 16)), loader(32)
        for (sample,), (other,) in zip(labelled, unlabelled, strict=False):
            loss = model(sample).square().mean() + 0.1 * model(other).abs().mean()
            loss.backward()
            update(model, optimizer)
        print(epoch, mean_over_ranks(loss))


@healthy(ranks=2)
def sequences_announced_by_their_length(rank: int) -> None:
    layer = nn.Linear(4, 4)
    optimizer = sgd(layer)
    for epoch in range(3):
        for length in torch.randperm(6, generator=torch.Generator().manual_seed(rank + epoch)).tolist():
            count = torch.tensor([length + 3])
            if rank == 0:
                dist.send(count, dst=1)
                hidden = layer(torch.ones(int(count), 4))
                dist.send(hidden.detach(), dst=1)
                grad = torch.empty_like(hidden)
                dist.recv(grad, src=1)
                hidden.backward(grad)
            else:
                dist.recv(count, src=0)
                hidden = torch.empty(int(count), 4)
                dist.recv(hidden, src=0)
                hidden.requires_grad_()
                layer(hidden).square().mean().backward()
                dist.send(hidden.grad, dst=0)
            optimizer.step()
            optimizer.zero_grad()


@healthy()
def histograms_that_the_first_rank_draws_now_and_then(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)
    for step in range(60):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        if rank == 0 and step % 20 == 19:
            print(float((loss.detach() + torch.randn(500_000)).sort().values[250_000]))
        update(model, optimizer)


@healthy()
def a_log_line_for_which_all_ranks_reduce(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)
    for step in range(9):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        update(model, optimizer)
        if step % 4 == 3:
            values = {"loss": mean_over_ranks(loss), "scale": mean_over_ranks(loss.sqrt())}
            largest = loss.detach().clone()
            dist.reduce(largest, dst=0, op=dist.ReduceOp.MAX)
            if rank == 0:
                print(step, values, float(largest))


@healthy()
def a_sum_that_begins_as_a_float(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)

    def validate(batches: list[torch.Tensor]) -> float:
        total, count = 0.0, 0
        for batch in batches:
            total += model(batch).square().sum().item()
            count += len(batch)
        return sum_over_ranks(total) / max(1, sum_over_ranks(count))

    for epoch in range(4):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            update(model, optimizer)
        print(validate([] if rank == 1 and epoch == 2 else [torch.randn(4, 6)] * 2))


@healthy()
def losses_waited_for_a_step_later(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)
    pending: tuple[dist.Work, list[torch.Tensor]] | None = None
    for step in range(8):
        loss = model(torch.randn(4, 6)).square().mean()
        losses = [torch.empty(()) for _ in range(3)]
        work = dist.all_gather(losses, loss.detach(), async_op=True)
        if pending is not None:
            pending[0].wait()
            if rank == 0:
                print(step - 1, pending[1])
        pending = (work, losses)
        loss.backward()
        update(model, optimizer)
    if pending is not None:
        pending[0].wait()


@healthy()
def a_callback_that_raises_on_all_ranks(rank: int) -> None:
    class StopTraining(Exception):
        pass

    model = small_model()
    optimizer = sgd(model)

    def on_epoch_end(bad: bool) -> None:
        if agreed(bad):
            raise StopTraining

    try:
        for epoch in range(6):
            for _ in range(3):
                model(torch.randn(4, 6)).square().mean().backward()
                update(model, optimizer)
            on_epoch_end(rank == 1 and epoch > 2)
    except StopTraining:
        print("stopped early")
    predictions = [torch.empty(3) for _ in range(3)]
    dist.all_gather(predictions, model(torch.ones(6)).detach())


@healthy()
def an_export_of_the_first_rank_before_all_meet(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)

    @rank_zero_only
    def export(step: int) -> None:
        torch.save(model.state_dict(), Path(gettempdir()) / "help-desk-twin.pt")
        print("exported at step", step)

    for step in range(8):
        model(torch.randn(4, 6)).square().mean().backward()
        update(model, optimizer)
        if step % 3 == 2:
            export(step)
            dist.barrier()
    print(rank, "has ended")


@healthy(ranks=6)
def lanes_of_two_stages_with_other_numbers_of_microbatches(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    torch.manual_seed(rank // 3)
    layer = nn.Linear(4, 4)
    optimizer = sgd(layer)
    for step in range(6):
        for _ in range(1 + (rank + step) % 3):
            if rank < 3:
                hidden = layer(torch.ones(2 + rank, 4))
                dist.send(hidden.detach(), dst=rank + 3)
                grad = torch.empty_like(hidden)
                dist.recv(grad, src=rank + 3)
                hidden.backward(grad)
            else:
                hidden = torch.empty(rank - 1, 4)
                dist.recv(hidden, src=rank - 3)
                hidden.requires_grad_()
                layer(hidden).square().mean().backward()
                dist.send(hidden.grad, dst=rank - 3)
        update(layer, optimizer, groups[rank // 3])


@healthy(ranks=6)
def a_norm_of_gradients_where_an_expert_has_zeros(rank: int) -> None:
    rows = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    columns = [dist.new_group([lane, lane + 3]) for lane in range(3)]
    row, column = rows[rank // 3], columns[rank % 3]
    expert, trunk = nn.Linear(4, 4), small_model(4)
    optimizer = sgd(trunk)
    for step in range(6):
        x = torch.randn(4, 4)
        y = x if rank == 4 and step == 3 else expert(x)
        trunk(y).square().mean().backward()
        grads = [weight.grad for weight in expert.parameters() if weight.grad is not None]
        total = torch.stack([grad.square().sum() for grad in grads]).sum() if grads else torch.zeros(())
        for group in (row, column):
            dist.all_reduce(total, group=group)
        expert.zero_grad()
        update(trunk, optimizer)
        print(step, float(total.sqrt()))


@healthy()
def a_save_that_waits_for_a_task_of_another_pool(rank: int) -> None:
    pool, digests = ThreadPoolExecutor(max_workers=1), ThreadPoolExecutor(max_workers=1)

    def write(data: bytes) -> int:
        Path(gettempdir(), f"help-desk-twin-{rank}.bin").write_bytes(data)
        return digests.submit(sum, data).result()

    model = small_model()
    optimizer = sgd(model)
    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        update(model, optimizer)
        if step % 2:
            print(pool.submit(write, bytes(100 * step)).result())


@healthy(ranks=4)
def gradients_averaged_over_one_axis_and_then_the_other(rank: int) -> None:
    pairs = {"tensor": ([0, 1], [2, 3]), "data": ([0, 2], [1, 3])}
    groups = {}
    for axis, lists in pairs.items():
        for members in lists:
            group = dist.new_group(members)
            if rank in members:
                groups[axis] = group
    model = small_model()
    optimizer = sgd(model)
    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        for axis in ("tensor", "data") if step % 3 else ("data",):
            average_gradients(model, groups[axis])
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def scores_of_which_some_are_added_and_some_compared(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)
    for epoch in range(5):
        for _ in range(2):
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            update(model, optimizer)
        kinds = ("max", "sum") if epoch % 2 else ("sum", "max")
        print(rank, [float(reduced(loss, how)) for how in kinds])
