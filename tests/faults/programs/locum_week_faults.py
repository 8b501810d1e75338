"""Programs as they are pasted into issues and forum threads, and that are wrong.

Labelled and frozen before their first run, by somebody who has not read the rules;
`docs/explanation/measurements/verdicts.md` gives the rate at first sight. A comment `or:` names what the label accepts
as well. `locum_week_twins.py` has programs that are right.
"""

import functools
import json
import logging
import os
import random
import signal
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.faults.corpus import faulty

logger = logging.getLogger(__name__)


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))


def sync_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    world = dist.get_world_size(group)
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad.div_(world)


@faulty("rank-skipped-collective", 3, ranks=4)
def preemption_notice_on_the_local_disk_of_one_node(rank: int) -> None:
    # or: collective-order-mismatch 3
    notice = Path(mkdtemp(prefix="node-")) / "preempt"
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def save(step: int) -> None:
        if rank == 0:
            torch.save({"step": step, "model": model.module.state_dict()}, notice.parent / "last.pt")
        dist.barrier()  # here

    def train() -> int:
        for step in range(20):
            if rank == 3 and step == 6:
                notice.touch()  # the agent of the cloud provider does this
            if notice.exists():  # here
                logger.warning("preempted at step %d", step)
                return step  # here
            model(torch.randn(4, 8)).pow(2).mean().backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        return 20

    save(train())  # here


@faulty("rank-skipped-collective", 1)
def best_score_restored_from_a_checkpoint_of_another_run(rank: int) -> None:
    # or: collective-order-mismatch 1
    folder = Path(mkdtemp(prefix="run-"))
    if rank == 1:
        (folder / "state.json").write_text(json.dumps({"best": 0.95}))

    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            state = folder / "state.json"
            self.best: float = json.loads(state.read_text())["best"] if state.exists() else 0.0

        def train_epoch(self) -> None:
            for _ in range(3):
                self.model(torch.randn(4, 8)).abs().mean().backward()
                sync_gradients(self.model)  # here
                self.optimizer.step()
                self.optimizer.zero_grad()

        def evaluate(self, epoch: int) -> float:
            score = torch.tensor(0.5 + 0.1 * epoch)
            dist.all_reduce(score)
            return float(score) / dist.get_world_size()

        def save(self, score: float) -> None:
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, torch.get_rng_state()[:16])  # here
            if rank == 0:
                torch.save({"best": score, "rng": states}, folder / "best.pt")

    trainer = Trainer()
    for epoch in range(4):
        trainer.train_epoch()  # here
        score = trainer.evaluate(epoch)
        if score > trainer.best:  # here
            trainer.best = score
            trainer.save(score)  # here


@faulty("unwaited-async", 0, 1, 2)
def replay_batch_that_is_used_while_it_is_still_on_its_way(rank: int) -> None:
    policy = mlp()
    optimizer = torch.optim.Adam(policy.parameters())

    class Replay:
        def __init__(self) -> None:
            self.buffer = torch.zeros(32, 8)

        def sample(self) -> torch.Tensor:
            if rank == 0:
                self.buffer = torch.randn(32, 8)
            dist.broadcast(self.buffer, src=0, async_op=True)  # here
            return self.buffer

    replay = Replay()
    for step in range(6):
        batch = replay.sample()  # here
        loss = policy(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        sync_gradients(policy)
        optimizer.step()
        if rank == 0:
            logger.info("step %d loss %.3f", step, loss.item())
    dist.barrier()


@faulty("step-mismatch", 0)
def validation_of_a_sharded_model_on_the_first_rank_only(rank: int) -> None:
    # or: collective-order-mismatch 0
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.no_grad()
    def evaluate() -> float:
        return float(sum(model(torch.randn(4, 8)).pow(2).mean() for _ in range(2)))  # here

    def train(steps: int) -> None:
        for step in range(steps):
            loss = model(torch.randn(4, 8)).pow(2).mean()  # here
            loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 4 == 3:  # here
                print(f"step {step}: val loss {evaluate():.4f}")  # here

    train(12)
    dist.barrier()


@faulty("p2p-tag-mismatch", 2, ranks=4)
def epochs_as_tags_and_a_worker_that_resumed_further_on(rank: int) -> None:
    # or: p2p-unmatched 2
    folder = Path(mkdtemp(prefix="worker-"))
    if rank == 2:
        torch.save({"epoch": 0}, folder / "last.pt")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def start_epoch() -> int:
        last = folder / "last.pt"
        return int(torch.load(last)["epoch"]) + 1 if last.exists() else 0  # here

    def collect(epoch: int) -> list[float]:
        received = torch.zeros(2)
        losses = []
        for worker in range(1, dist.get_world_size()):
            dist.recv(received, src=worker, tag=epoch)  # here
            losses.append(received[0].item())
        return losses

    for epoch in range(start_epoch(), 4):  # here
        if rank == 0:
            print(epoch, collect(epoch))  # here
            continue
        for _ in range(3):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.send(torch.tensor([loss.item(), float(epoch)]), dst=0, tag=epoch)  # here
        torch.save({"epoch": epoch}, folder / "last.pt")


@faulty("group-creation-mismatch", 1, 3, ranks=4)
def cached_group_of_loggers_that_only_loggers_ask_for(rank: int) -> None:
    @functools.cache
    def logging_group() -> Any:
        return dist.new_group([0, 2])  # here

    def log(loss: torch.Tensor) -> None:
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=logging_group())  # here
        print("mean of the loggers", mean.item() / 2)

    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()
        if step == 4 and rank % 2 == 0:  # here
            log(loss)  # here
    everyone = dist.new_group()  # here
    score = loss.detach().clone()
    dist.all_reduce(score, group=everyone)  # here


@faulty("wrong-group", 3, ranks=4)
def gradients_over_the_dimension_that_an_environment_names(rank: int) -> None:
    # or: rank-skipped-collective 3
    os.environ["SYNC_DIM"] = "tp" if rank == 3 else "dp"  # one node still has the old launcher script
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    column, row = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
    params = [*column.parameters(), *row.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.01)

    def forward(x: torch.Tensor) -> torch.Tensor:
        partial = row(column(x).relu())
        shared = partial.detach().clone()
        dist.all_reduce(shared, group=mesh.get_group("tp"))  # here
        return partial + (shared - partial.detach())

    def sync() -> None:
        group = mesh.get_group(os.environ["SYNC_DIM"])  # here
        for param in params:
            dist.all_reduce(param.grad, group=group)  # here

    for _ in range(5):
        forward(torch.randn(4, 8)).pow(2).mean().backward()
        sync()  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-exited", 1)
def run_that_logs_a_bad_configuration_and_returns(rank: int) -> None:
    class Trainer:
        def __init__(self, config: dict[str, float]) -> None:
            self.config = config
            self.model = DistributedDataParallel(mlp())
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"])

        def fit(self) -> None:
            for step in range(12):
                if step == 5:
                    for group in self.optimizer.param_groups:
                        group["lr"] = self.config["lr"] * self.config["decay"]  # here
                self.model(torch.randn(4, 8)).pow(2).mean().backward()  # here
                self.optimizer.step()
                self.optimizer.zero_grad()

        def run(self) -> None:
            try:
                self.fit()  # here
            except LookupError:  # here
                logger.exception("bad configuration")
                return  # here

    config = {"lr": 0.1, "decay": 0.5}
    if rank == 1:
        del config["decay"]
    Trainer(config).run()  # here


@faulty("dtype-mismatch", 1)
def half_points_that_make_the_count_a_float_on_one_shard(rank: int) -> None:
    # or: size-mismatch 1
    model = DistributedDataParallel(mlp(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    answers = {0: [1, 0, 2, 2], 1: [1, 3, 3, -1], 2: [0, 0, 1, 2]}[rank]

    def evaluate() -> float:
        correct, total = 0, 0
        for answer in answers:
            guess = 1 if answer == 1 else 0
            correct += 0.5 if answer < 0 else int(guess == answer)  # type: ignore[assignment]  # here
            total += 1
        counts = torch.tensor([correct, total])  # here
        dist.all_reduce(counts)  # here
        return float(counts[0]) / float(counts[1])

    for epoch in range(3):
        for _ in range(3):
            model(torch.randn(4, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(epoch, evaluate())  # here


@faulty("rank-skipped-collective", 1)
def layers_dropped_by_a_random_state_that_was_not_restored(rank: int) -> None:
    # or: step-mismatch 1
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    random.seed(1234)
    keep = [[random.random() > 0.1 for _ in layers] for _ in range(10)]
    state = random.getstate()
    if rank == 1:
        random.seed(99)
        state = random.getstate()
    random.setstate(state)

    def forward(x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
        for layer, kept in zip(layers, keep, strict=True):
            if kept:  # here
                x = x + layer(x).tanh()
        return x

    def train(steps: int) -> None:
        for step in range(steps):
            chosen = keep[step] if step < 3 else [random.random() > 0.1 for _ in layers]  # here
            forward(torch.randn(4, 8), chosen).pow(2).mean().backward()
            sync_gradients(layers)  # here
            optimizer.step()
            optimizer.zero_grad()

    train(12)
    dist.barrier()  # here


@faulty("rank-crashed", 2, 3, ranks=4)
def weights_from_the_first_rank_of_each_node_by_its_local_rank(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    node = nodes[rank // 2]
    model = mlp()

    def share_weights() -> None:
        for param in model.parameters():
            dist.broadcast(param.data, src=0, group=node)  # here

    def train(steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            model(torch.randn(4, 8)).pow(2).mean().backward()
            sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    share_weights()  # here
    train(5)


@faulty("rank-skipped-collective", 1)
def time_budget_by_the_clock_of_each_node(rank: int) -> None:
    # or: collective-order-mismatch 1
    skew = 0.6 if rank == 1 else 0.0  # its clock was never synchronized

    def now() -> float:
        return time.time() + skew

    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    started = [time.time()]
    dist.broadcast_object_list(started, src=0)

    def train(budget_s: float) -> int:
        step = 0
        while now() - started[0] < budget_s:  # here
            time.sleep(0.05)
            model(torch.randn(4, 8)).pow(2).mean().backward()
            sync_gradients(model)  # here
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        return step

    def evaluate() -> float:
        scores = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(scores, torch.rand(1))  # here
        return max(float(score) for score in scores)

    steps = train(1.5)  # here
    print(steps, "steps, best score", evaluate())  # here


@faulty("uneven-inputs", 3, ranks=4)
def subset_by_stride_instead_of_a_distributed_sampler(rank: int) -> None:
    # or: rank-skipped-collective 3
    data = TensorDataset(torch.randn(51, 8), torch.randn(51, 8))
    world = dist.get_world_size()
    loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=3)
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.MSELoss()

    def train_one_epoch() -> float:
        total = 0.0
        for inputs, targets in loader:  # here
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # here
            optimizer.step()
            total += loss.item()
        return total / len(loader)

    for epoch in range(3):
        mean = torch.tensor(train_one_epoch())  # here
        dist.all_reduce(mean)  # here
        if rank == 0:
            print(f"epoch {epoch}: {mean.item() / world:.4f}")


@faulty("rank-killed", 1)
def alarm_of_a_slow_read_that_stays_set_after_an_error(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def decode(index: int) -> torch.Tensor:
        if rank == 1 and index == 4:
            raise ValueError(f"sample {index}: truncated")
        return torch.randn(4, 8)

    def read(index: int) -> torch.Tensor:
        signal.setitimer(signal.ITIMER_REAL, 0.8)  # give up on a file system that hangs
        sample = decode(index)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return sample

    samples = []
    for index in range(5):
        try:
            samples.append(read(index))
        except ValueError as error:
            print("use the first one again:", error)
            samples.append(samples[0])

    for step in range(40):
        model(samples[step % 5]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)


@faulty("rank-skipped-collective", 1, ranks=4, also=(("rank-stuck", 3),))
def replicas_one_that_converged_and_one_that_waits_for_a_file(rank: int) -> None:
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = replicas[rank // 2]
    folder = Path(mkdtemp(prefix="shards-"))
    for shard in range(3 if rank == 3 else 6):
        torch.save(torch.randn(4, 8), folder / f"{shard}.pt")
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(shard: int) -> torch.Tensor:
        path = folder / f"{shard}.pt"
        while not path.exists():  # here
            time.sleep(0.2)  # here
        batch: torch.Tensor = torch.load(path)
        return batch

    def train() -> None:
        for step in range(6):
            loss = model(load(step)).pow(2).mean()  # here
            if rank == 1 and step == 4:
                loss = loss * 0
            if loss.item() < 1e-6:  # here
                print("converged")
                break  # here
            loss.backward()
            sync_gradients(model, mine)  # here
            optimizer.step()
            optimizer.zero_grad()

    train()  # here
    dist.barrier()  # here


@faulty("rank-skipped-collective", 1, ranks=6, also=(("reduce-op-mismatch", 4),))
def islands_one_with_an_old_config_and_one_with_a_bad_batch(rank: int) -> None:
    # or: step-mismatch 1
    islands = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    island = islands[rank // 3]
    config = {"norm": "sum" if rank == 4 else "max"}
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[config["norm"]]
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def clip() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        dist.all_reduce(norm, op=op, group=island)  # here
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(min(1.0, 1.0 / float(norm)))

    for step in range(7):
        batch = torch.randn(4, 8)
        if rank == 1 and step == 3:
            batch[0, 0] = float("nan")
        if not batch.isfinite().all():  # here
            continue  # here
        model(batch).pow(2).mean().backward()
        sync_gradients(model, island)  # here
        clip()  # here
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # here
