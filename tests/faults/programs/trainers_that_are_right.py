"""Sound scripts in the styles in which trainers, evaluations and services are written, odd as they look.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import copy
import json
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import healthy


def network(width: int = 8, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


@healthy()
def epochs_with_a_validation_of_the_inner_model_on_rank_0(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(3):
            step_with(model, optimizer, torch.ones(2, 8))
        if rank == 0:
            with torch.no_grad():
                for _ in range(20):
                    model.module(torch.ones(1, 8))
            time.sleep(0.4)
        dist.barrier()


@healthy(ranks=2)
def a_full_state_gathered_by_all_and_saved_by_rank_0(rank: int) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = network()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        step_with(model, optimizer, torch.ones(2, 8))
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(state, Path(tempfile.mkdtemp()) / "model.pt")


@healthy(ranks=2)
def norms_of_sharded_weights_printed_by_rank_0(rank: int) -> None:
    from torch.distributed.tensor import DTensor

    model = network()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        step_with(model, optimizer, torch.ones(2, 8))
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        norm = weight.full_tensor().norm()
        if rank == 0:
            print(norm)


@healthy(ranks=4)
def replicas_that_need_other_numbers_of_tensor_parallel_passes(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    tensor, data = mesh["tp"].get_group(), mesh["dp"].get_group()
    for step in range(5):
        for _ in range(1 + (rank // 2) * (step % 3)):
            dist.all_reduce(torch.ones(8), group=tensor)
        dist.all_reduce(torch.ones(4), group=data)


@healthy()
def an_optimizer_in_parts_consolidated_by_all(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(4):
        step_with(model, optimizer, torch.ones(2, 8))
        if step == 2:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                torch.save(optimizer.state_dict(), Path(tempfile.mkdtemp()) / "optimizer.pt")


@healthy(ranks=4)
def pairs_that_iterate_until_each_has_converged(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(3):
        error = torch.tensor(1.0 if rank < 2 else 40.0)
        while error.item() > 0.5:
            error /= 2
            dist.all_reduce(error, op=dist.ReduceOp.MAX, group=pairs[rank // 2])
        dist.all_reduce(torch.ones(2))


@healthy(ranks=4)
def a_tree_of_messages(rank: int) -> None:
    for _ in range(3):
        weights = torch.full((6,), float(rank == 0))
        distance = 2
        while distance:
            if rank % (2 * distance) == 0:
                dist.send(weights, dst=rank + distance)
            elif rank % (2 * distance) == distance:
                dist.recv(weights, src=rank - distance)
            distance //= 2
        assert weights.sum() == 6


@healthy()
def a_pipeline_that_prefetches_the_next_activations(rank: int) -> None:
    count = 6
    if rank == 0:
        sends = [dist.isend(torch.full((4,), float(i)), dst=1, tag=i) for i in range(count)]
        for send in sends:
            send.wait()
        return
    buffers = [torch.empty(4) for _ in range(count)]
    pending = dist.irecv(buffers[0], src=rank - 1, tag=0)
    outgoing: list[dist.Work] = []
    for i in range(count):
        coming = dist.irecv(buffers[i + 1], src=rank - 1, tag=i + 1) if i + 1 < count else None
        pending.wait()
        if rank < dist.get_world_size() - 1:
            outgoing.append(dist.isend(buffers[i] * 2, dst=rank + 1, tag=i))
        if coming is not None:
            pending = coming
    for send in outgoing:
        send.wait()


@healthy(ranks=4)
def a_queue_of_tasks_served_by_rank_0(rank: int) -> None:
    if rank == 0:
        left, working = 9, 3
        while working:
            asked = torch.empty(1)
            worker = dist.recv(asked)
            dist.send(torch.tensor([float(left)]), dst=worker)
            left, working = max(0, left - 1), working - (left == 0)
    else:
        while True:
            dist.send(torch.ones(1), dst=0)
            task = torch.empty(1)
            dist.recv(task, src=0)
            if task.item() == 0:
                break
            time.sleep(0.02 * rank)
    dist.barrier()


@healthy()
def ranks_that_meet_at_a_key(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for epoch in range(3):
        if rank == 0:
            time.sleep(0.3)
            store.set(f"data/{epoch}", "ready")
        store.wait([f"data/{epoch}"], timedelta(seconds=20))
        dist.all_reduce(torch.ones(4))


@healthy()
def a_download_by_the_first_rank_of_the_host(rank: int) -> None:
    if rank == 0:
        time.sleep(1.5)
    dist.barrier()
    for _ in range(4):
        dist.all_reduce(torch.ones(4))


@healthy()
def an_early_stop_that_rank_0_decides(rank: int) -> None:
    for epoch in range(10):
        dist.all_reduce(torch.ones(4))
        stop = torch.tensor([float(rank == 0 and epoch == 4)])
        dist.broadcast(stop, src=0)
        if stop.item():
            break


@healthy()
def batches_dropped_by_all_when_one_rank_fails(rank: int) -> None:
    for step in range(6):
        failed = torch.zeros(1)
        try:
            if rank == 1 and step == 2:
                raise ValueError("corrupt record")
        except ValueError:
            failed += 1
        dist.all_reduce(failed)
        if failed.item():
            continue
        dist.all_reduce(torch.ones(16))


@healthy()
def predictions_of_uneven_number_gathered_as_objects(rank: int) -> None:
    for step in range(3):
        mine = {f"sample {i}": [0.1] * i for i in range(rank * 7 + step)} or None
        everyone: list[object] = [None] * 3
        dist.all_gather_object(everyone, mine)
        chosen: list[object] = [None] * 3 if rank == step else []
        dist.gather_object(mine, chosen if rank == step else None, dst=step)


@dataclass
class Bucket:
    values: torch.Tensor
    work: dist.Work | None = None


@dataclass
class Reducer:
    buckets: list[Bucket] = field(default_factory=list)

    def push(self, values: torch.Tensor) -> None:
        self.buckets.append(Bucket(values, dist.all_reduce(values, async_op=True)))

    def finish(self) -> torch.Tensor:
        total = torch.zeros(())
        while self.buckets:
            bucket = self.buckets.pop()
            assert bucket.work is not None
            bucket.work.wait()
            total += bucket.values.sum()
        return total


@healthy(check="handles")
def a_reducer_that_waits_from_the_last(rank: int) -> None:
    reducer = Reducer()
    for _ in range(4):
        for size in (32, 16, 8):
            reducer.push(torch.full((size,), float(rank)))
        assert reducer.finish() > 0


@healthy()
def losses_reduced_with_gradients(rank: int) -> None:
    import torch.distributed.nn.functional as differentiable

    model = network()
    for _ in range(3):
        model.zero_grad()
        loss = differentiable.all_reduce(model(torch.full((2, 8), float(rank))).mean())
        loss.backward()


@healthy()
def two_threads_that_count_differently(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]

    def talk(number: int) -> None:
        for _ in range(4 + 5 * number):
            dist.all_reduce(torch.full((2,), float(rank)), group=groups[number])
            time.sleep(0.01)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@healthy()
def a_group_with_a_limit_of_its_own_in_each_epoch(rank: int) -> None:
    for epoch in range(3):
        group = dist.new_group(timeout=timedelta(seconds=60 + epoch))
        dist.all_reduce(torch.full((3,), float(rank)), group=group)
        dist.destroy_process_group(group)


@healthy(ranks=4)
def gossip_between_pairs_drawn_from_one_seed(rank: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.full((8,), float(rank))
    for _ in range(6):
        order = torch.randperm(4, generator=generator).tolist()
        partner = order[order.index(rank) ^ 1]
        theirs = torch.empty(8)
        batch = [dist.P2POp(dist.isend, weights.clone(), partner), dist.P2POp(dist.irecv, theirs, partner)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        weights = (weights + theirs) / 2


@healthy()
def a_leader_and_followers_in_functions_of_their_own(rank: int) -> None:
    def lead(step: int) -> None:
        dist.broadcast(torch.tensor([float(step)]), src=0)
        losses = [torch.empty(1) for _ in range(3)]
        dist.gather(torch.zeros(1), losses, dst=0)

    def follow() -> None:
        command = torch.empty(1)
        dist.broadcast(command, src=0)
        dist.gather(command + rank, dst=0)

    for step in range(5):
        if rank == 0:
            lead(step)
        else:
            follow()


@healthy()
def a_critic_trained_twice_as_often(rank: int) -> None:
    critic, actor = DistributedDataParallel(network()), DistributedDataParallel(network(depth=1))
    first, second = torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.SGD(actor.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            step_with(critic, first, torch.full((2, 8), float(rank)))
        step_with(actor, second, torch.ones(2, 8))


@healthy()
def counts_of_an_evaluation_reduced_to_rank_0(rank: int) -> None:
    right = torch.zeros(2)
    for _ in range(3 + rank):  # shards of uneven length: nothing is sent in the loop
        right += torch.ones(2)
    dist.reduce(right, dst=0)
    if rank == 0:
        assert right[0] == 12


@healthy()
def a_copy_of_the_state_saved_by_a_thread(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver: threading.Thread | None = None
    for step in range(6):
        step_with(model, optimizer, torch.ones(2, 8))
        if rank == 0 and step % 2 == 0:
            if saver is not None:
                saver.join()
            state = copy.deepcopy(model.module.state_dict())
            saver = threading.Thread(target=torch.save, args=(state, Path(tempfile.mkdtemp()) / "state.pt"))
            saver.start()
    if saver is not None:
        saver.join()


@healthy()
def a_signal_on_one_rank_that_all_agree_on(rank: int) -> None:
    asked = [False]

    def on_signal(*_: object) -> None:
        asked[0] = True

    signal.signal(signal.SIGUSR1, on_signal)
    for step in range(8):
        dist.all_reduce(torch.ones(6))
        if rank == 2 and step == 3:
            signal.raise_signal(signal.SIGUSR1)
        flag = torch.tensor([float(asked[0])])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            torch.save({"step": step}, Path(tempfile.mkdtemp()) / f"{rank}.pt")
            break
    dist.barrier()


@healthy(ranks=4)
def reductions_within_hosts_then_between_their_leaders(rank: int) -> None:
    hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    for _ in range(4):
        gradient = torch.full((6,), float(rank))
        leader = 2 * (rank // 2)
        dist.reduce(gradient, dst=leader, group=hosts[rank // 2])
        if rank == leader:
            dist.all_reduce(gradient, group=leaders)
        dist.broadcast(gradient, src=leader, group=hosts[rank // 2])
        assert gradient.eq(6).all()


@healthy(ranks=4)
def tokens_exchanged_after_their_counts(rank: int) -> None:
    for step in range(4):
        sent = torch.tensor([(rank + other + step) % 3 for other in range(4)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        tokens, into = torch.ones(int(sent.sum()), 2), torch.empty(int(received.sum()), 2)
        dist.all_to_all_single(into, tokens, received.tolist(), sent.tolist())


@healthy()
def rows_padded_to_the_longest(rank: int) -> None:
    for step in range(3):
        rows = torch.ones(rank + step, 4)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(lengths, torch.tensor([len(rows)]))
        longest = int(max(length.item() for length in lengths))
        padded = torch.zeros(longest, 4)
        padded[: len(rows)] = rows
        dist.all_gather([torch.empty(longest, 4) for _ in range(3)], padded)


@healthy(ranks=2)
def messages_of_two_kinds_in_flight_with_tags(rank: int) -> None:
    for _ in range(3):
        if rank == 0:
            works = [dist.isend(torch.ones(4), dst=1, tag=7), dist.isend(torch.ones(9), dst=1, tag=8)]
        else:
            works = [dist.irecv(torch.empty(9), src=0, tag=8), dist.irecv(torch.empty(4), src=0, tag=7)]
        for work in works:
            work.wait()


@healthy()
def layers_dropped_by_a_common_seed(rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for _ in range(6):
        kept = torch.rand(4, generator=generator) > 0.4
        for layer, keep in zip(layers, kept.tolist(), strict=True):
            if keep:
                layer.zero_grad()
                layer(torch.full((2, 8), float(rank))).sum().backward()
                dist.all_reduce(layer.weight.grad)


@healthy()
def a_loop_that_goes_on_while_any_rank_has_data(rank: int) -> None:
    rows = iter(range(4 + 2 * rank))
    while True:
        row = next(rows, None)
        has_data = torch.tensor([float(row is not None)])
        dist.all_reduce(has_data, op=dist.ReduceOp.MAX)
        if not has_data.item():
            break
        dist.all_reduce(torch.ones(4) if row is not None else torch.zeros(4))


@healthy()
def a_first_step_in_which_one_rank_compiles(rank: int) -> None:
    for step in range(5):
        if rank == 1 and step == 0:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                json.dumps(list(range(100)))
        dist.all_reduce(torch.ones(4))


@healthy()
def weights_checked_for_equality_now_and_then(rank: int) -> None:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        step_with(model, optimizer, torch.full((2, 8), float(rank)))
        if step % 3 == 2:
            digest = sum(parameter.detach().double().sum() for parameter in model.parameters())
            low, high = digest.clone(), digest.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            assert low == high


@healthy(ranks=4)
def shards_of_uneven_size_reduced_one_after_the_other(rank: int) -> None:
    sizes = [5, 3, 0, 7]
    for _ in range(3):
        for owner, size in enumerate(sizes):
            part = torch.full((size,), float(rank))
            if size:
                dist.reduce(part, dst=owner)
        dist.barrier()


@healthy()
def a_warm_up_that_one_group_does_and_a_cool_down_of_the_other(rank: int) -> None:
    pair, rest = dist.new_group([0, 1]), dist.new_group([1, 2])
    for step in range(6):
        if rank < 2 and step < 2:
            dist.all_reduce(torch.ones(3), group=pair)
        dist.all_reduce(torch.ones(5))
        if rank > 0 and step >= 4:
            dist.broadcast(torch.ones(3), src=2, group=rest)


@healthy(ranks=2)
def gradients_clipped_and_accumulated_under_fsdp(rank: int) -> None:
    model = network()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            model(torch.full((2, 8), rank + 1.0)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
