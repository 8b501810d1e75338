"""Programs that people send to a help desk, and that are wrong; `office_hours_tools.py` is their `utils.py`.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well. `help_desk_twins.py` has programs that are right.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty
from tests.faults.programs.office_hours_tools import (
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


@faulty("rank-skipped-collective", 1)
def a_batch_that_is_too_large_for_one_rank(rank: int) -> None:
    # or: step-mismatch 1
    def skip_when_out_of_memory(function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        @functools.wraps(function)
        def call(batch: torch.Tensor) -> None:
            try:
                function(batch)
            except RuntimeError as error:  # here
                if "out of memory" not in str(error):
                    raise
                print("skipping a batch of shape", tuple(batch.shape))
                gc.collect()

        return call

    model = DistributedDataParallel(small_model())
    optimizer = sgd(model)

    def to_device(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 16:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")  # here
        return batch

    @skip_when_out_of_memory
    def train_step(batch: torch.Tensor) -> None:
        model(to_device(batch)).square().mean().backward()  # here
        optimizer.step()
        optimizer.zero_grad()

    for step in range(8):
        train_step(torch.randn(40 if rank == 1 and step == 4 else 4, 6))
    save_checkpoint(model.module, "final")


@faulty("group-creation-mismatch", 2)
def a_group_made_when_the_first_image_comes(rank: int) -> None:
    @functools.cache
    def image_group() -> dist.ProcessGroup:
        return dist.new_group()  # here

    def image_share(images: list[str]) -> float:
        if not images:  # here
            return 0.0  # here
        share = torch.tensor(float(len(images)))
        dist.all_reduce(share, group=image_group())  # here
        return float(share)

    model = small_model()
    optimizer = sgd(model)
    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        print(image_share(["cat.png"] if step > 2 and not (rank == 2 and step == 3) else []))
        update(model, optimizer)


@faulty("uneven-inputs", 1)
def a_labelled_set_that_is_shorter_than_the_unlabelled(rank: int) -> None:
    def loader(samples: int) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(samples, 6)), batch_size=4)

    model = small_model()
    optimizer = sgd(model)
    for epoch in range(2):
        labelled, unlabelled = loader(24 if rank == 1 else 32), loader(60)
        for (sample,), (other,) in zip(labelled, unlabelled, strict=False):  # here
            loss = model(sample).square().mean() + 0.1 * model(other).abs().mean()
            loss.backward()
            update(model, optimizer)
        print(epoch, mean_over_ranks(loss))


@faulty("p2p-size-mismatch", 0, 1, ranks=2)
def an_order_of_sequences_of_which_one_stage_is_not_told(rank: int) -> None:
    class Order:
        def __init__(self, lengths: list[int]) -> None:
            self.lengths, self.epoch = lengths, 0

        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator().manual_seed(100 + self.epoch)
            for index in torch.randperm(len(self.lengths), generator=generator).tolist():
                yield self.lengths[index]

    order, layer = Order([3, 5, 7, 9, 11, 13]), nn.Linear(4, 4)
    optimizer = sgd(layer)
    for epoch in range(3):
        if rank == 0:
            order.epoch = epoch
        for length in order:
            if rank == 0:
                hidden = layer(torch.ones(length, 4))
                dist.send(hidden.detach(), dst=1)  # here
                grad = torch.empty(length, 4)
                dist.recv(grad, src=1)  # here
                hidden.backward(grad)
            else:
                hidden = torch.empty(length, 4)
                dist.recv(hidden, src=0)  # here
                hidden.requires_grad_()
                layer(hidden).square().mean().backward()
                dist.send(hidden.grad, dst=0)  # here
            optimizer.step()
            optimizer.zero_grad()


@faulty("slow-rank", 0)
def histograms_that_the_first_rank_draws_of_every_step(rank: int) -> None:
    class Monitor:
        def __init__(self, enabled: bool) -> None:
            self.enabled, self.quantiles = enabled, list[float]()

        def on_step(self, loss: torch.Tensor) -> None:
            if self.enabled:
                noise = loss.detach() + torch.randn(500_000)
                self.quantiles.append(float(noise.sort().values[250_000]))  # here

    model, monitor = small_model(), Monitor(rank == 0)
    optimizer = sgd(model)
    for _ in range(60):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        monitor.on_step(loss)
        update(model, optimizer)


@faulty("step-mismatch", 0)
def a_log_line_for_which_only_one_rank_reduces(rank: int) -> None:
    # or: collective-order-mismatch 0; size-mismatch 0
    lines: list[str] = []

    def log(step: int, values: dict[str, float]) -> None:
        lines.append(f"{step}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))

    model = small_model()
    optimizer = sgd(model)
    for step in range(9):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        update(model, optimizer)
        if rank == 0 and step % 4 == 3:  # here
            log(step, {"loss": mean_over_ranks(loss), "scale": mean_over_ranks(loss.sqrt())})  # here


@faulty("dtype-mismatch", 1)
def a_sum_that_stays_the_integer_it_began_with(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)

    def validate(batches: list[torch.Tensor]) -> float:
        total, count = 0, 0
        for batch in batches:
            total += model(batch).square().sum().item()
            count += len(batch)
        return sum_over_ranks(total) / max(1.0, sum_over_ranks(float(count)))  # here

    for epoch in range(4):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            update(model, optimizer)
        print(validate([] if rank == 1 and epoch == 2 else [torch.randn(4, 6)] * 2))


@faulty("unwaited-async", 1, 2)
def losses_that_only_the_printing_rank_waits_for(rank: int) -> None:
    model = small_model()
    optimizer = sgd(model)
    for step in range(8):
        loss = model(torch.randn(4, 6)).square().mean()
        losses = [torch.empty(()) for _ in range(3)]
        work = dist.all_gather(losses, loss.detach(), async_op=True)  # here
        if rank == 0:
            work.wait()
            print(step, losses)
        (loss / (1 + torch.stack(losses).mean())).backward()
        update(model, optimizer)


@faulty("rank-skipped-collective", 1)
def a_callback_that_raises_to_stop(rank: int) -> None:
    class StopTraining(Exception):
        pass

    class EarlyStopping:
        def __init__(self, patience: int) -> None:
            self.patience, self.best, self.bad = patience, float("inf"), 0

        def on_epoch_end(self, loss: float) -> None:
            self.bad = 0 if loss < self.best else self.bad + 1
            self.best = min(loss, self.best)
            if self.bad > self.patience:  # here
                raise StopTraining(f"no better for {self.bad} epochs")  # here

    model = small_model()
    optimizer = sgd(model)

    def train_epoch() -> None:
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
            update(model, optimizer)

    def fit() -> None:
        callback = EarlyStopping(1)
        try:
            for epoch in range(6):
                train_epoch()  # here
                callback.on_epoch_end(1.0 if rank == 1 and epoch > 1 else 0.9**epoch)  # here
        except StopTraining as stop:  # here
            print(stop)

    fit()
    predictions = [torch.empty(3) for _ in range(3)]
    dist.all_gather(predictions, model(torch.ones(6)).detach())


@faulty("collective-order-mismatch", 0)
def an_export_of_the_first_rank_that_meets_the_others(rank: int) -> None:
    # or: step-mismatch 0
    model = small_model()
    optimizer = sgd(model)

    @rank_zero_only
    def export(step: int) -> None:
        torch.save(model.state_dict(), Path(gettempdir()) / "help-desk.pt")
        dist.barrier()  # here
        print("exported at step", step)

    for step in range(8):
        model(torch.randn(4, 6)).square().mean().backward()
        update(model, optimizer)
        if step % 3 == 2:
            export(step)  # here
    print(rank, "has ended")


@faulty("rank-crashed", 4, ranks=6)
def activations_that_explode_in_one_lane(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    torch.manual_seed(rank // 3)
    layer = nn.Linear(4, 4)
    optimizer = sgd(layer)

    def checked(activations: torch.Tensor) -> torch.Tensor:
        assert activations.abs().max() < 1e3, "activations explode"  # here
        return activations

    def first(x: torch.Tensor) -> None:
        hidden = layer(x)
        dist.send(hidden.detach(), dst=rank + 3)
        grad = torch.empty_like(hidden)
        dist.recv(grad, src=rank + 3)
        hidden.backward(grad)

    def last() -> None:
        hidden = torch.empty(2, 4)
        dist.recv(hidden, src=rank - 3)
        checked(hidden).requires_grad_()
        layer(hidden).square().mean().backward()
        dist.send(hidden.grad, dst=rank - 3)

    for step in range(6):
        if rank < 3:
            first(torch.full((2, 4), 1e6 if rank == 1 and step == 3 else 1.0))
        else:
            last()
        update(layer, optimizer, groups[rank // 3])


@faulty("rank-skipped-collective", 4, ranks=6)
def a_norm_of_gradients_where_an_expert_has_none(rank: int) -> None:
    rows = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    columns = [dist.new_group([lane, lane + 3]) for lane in range(3)]
    row, column = rows[rank // 3], columns[rank % 3]
    expert, trunk = nn.Linear(4, 4), small_model(4)
    optimizer = sgd(trunk)

    def global_norm(model: nn.Module) -> float:
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        if not grads:  # here
            return 0.0  # here
        total = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(total, group=row)  # here
        dist.all_reduce(total, group=column)  # here
        return float(total.sqrt())

    for step in range(6):
        x = torch.randn(4, 4)
        y = x if rank == 4 and step == 3 else expert(x)
        trunk(y).square().mean().backward()
        norm = global_norm(expert)
        expert.zero_grad()
        update(trunk, optimizer)
        print(step, norm)


@faulty("rank-stuck", 2)
def a_save_that_waits_for_a_task_of_its_own_pool(rank: int) -> None:
    pool = ThreadPoolExecutor(max_workers=1)

    def digest(data: bytes) -> int:
        return sum(data)

    def write(data: bytes, verify: bool) -> int:
        Path(gettempdir(), f"help-desk-{rank}.bin").write_bytes(data)
        if verify:
            return pool.submit(digest, data).result()  # here
        return len(data)

    model = small_model()
    optimizer = sgd(model)
    for step in range(7):
        model(torch.randn(4, 6)).square().mean().backward()
        update(model, optimizer)
        if step % 2:
            future = pool.submit(write, bytes(100 * step), rank == 2 and step == 3)
            print(future.result())  # here


@faulty("wrong-group", 3, ranks=4)
def gradients_averaged_over_the_other_axis_once(rank: int) -> None:
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
        y = model(torch.randn(4, 6))
        dist.all_reduce(y.detach().clone(), group=groups["tensor"])
        y.square().mean().backward()
        axis = "tensor" if rank == 3 and step == 4 else "data"
        average_gradients(model, groups[axis])  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("reduce-op-mismatch", 1)
def a_best_score_that_one_rank_adds_up(rank: int) -> None:
    class Score:
        def __init__(self, how: str) -> None:
            self.how, self.values = how, list[float]()

        def update(self, value: float) -> None:
            self.values.append(value)

        def compute(self) -> float:
            return float(reduced(torch.tensor(self.values[-2:]), self.how).max())  # here

    model, score = small_model(), Score("max")
    optimizer = sgd(model)
    for epoch in range(5):
        if rank == 1 and epoch == 2:
            score = Score("sum")
            score.update(0.1)
        for _ in range(2):
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            update(model, optimizer)
            score.update(float(loss))
        print(score.compute(), float(reduced(torch.ones(1), "sum")))
