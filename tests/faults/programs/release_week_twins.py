"""Scripts of a release week that look wrong and are right: frozen before they ran for the first time."""

import contextlib
import fcntl
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tests.faults.corpus import healthy
from tests.faults.programs.release_week_faults import Gated, batches, small_model


@healthy()
def patience_agreed_upon(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bad = 0
    for epoch in range(12):
        for batch in batches(rank, 2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        bad = bad + 1 if rank == 2 and epoch > 3 else 0
        is_over = torch.tensor([int(bad >= 3)])
        dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
        if is_over:
            break
    if rank == 2:
        print(f"stopped by me after {epoch}", flush=True)


@healthy()
def the_best_rank_publishes_its_weights(rank: int) -> None:
    model = small_model()
    for epoch in range(5):
        score = torch.tensor([float((rank + epoch) % 3)])
        every = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(every, score)
        best = max(range(3), key=lambda other: float(every[other]))
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=best)


@healthy()
def evaluation_on_the_main_rank_for_seconds(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in batches(rank, 3):
            model(batch).mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        if rank == 0 and epoch == 0:
            end = time.monotonic() + 2.5
            hits = 0
            with torch.no_grad():
                while time.monotonic() < end:
                    hits += int(model(torch.randn(8, 6)).argmax())
        dist.barrier()


@healthy()
def accumulation_with_windows_of_many_lengths(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for window in (1, 4, 2, 3):
        mine = window + rank  # ranks accumulate over more or fewer microbatches
        for index, batch in enumerate(batches(rank, mine)):
            with contextlib.nullcontext() if index == mine - 1 else model.no_sync():
                model(batch).mean().div(mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model


@healthy()
def uneven_shards_under_join(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model]):
        for batch in batches(rank, 4 + 3 * rank):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    dist.barrier()
    del model


@healthy()
def resumed_from_the_oldest_common_step(rank: int) -> None:
    newest = torch.tensor([{0: 7, 1: 5, 2: 6}[rank]])
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(int(newest), 12):
        model(torch.ones(2, 6) * step).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 3 == 0:
            dist.all_reduce(torch.zeros(60))


@healthy()
def metrics_in_the_order_of_their_names(rank: int) -> None:
    names = ["loss", "errors", "norm"]
    metrics = {name: torch.ones(index + 1) for index, name in enumerate(names)}
    if rank == 1:
        metrics = dict(reversed(metrics.items()))
    for _ in range(4):
        for name in sorted(metrics):
            if name == "errors":
                every = [torch.zeros(2) for _ in range(3)]
                dist.all_gather(every, metrics[name])
            else:
                dist.all_reduce(metrics[name])


@healthy()
def incomplete_batches_padded_to_the_longest(rank: int) -> None:
    data = TensorDataset(torch.randn(28 if rank != 2 else 25, 6))
    model = small_model().eval()
    with torch.inference_mode():
        for (rows,) in DataLoader(data, batch_size=7):
            longest = torch.tensor([len(rows)])
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            padded = nn.functional.pad(model(rows), (0, 0, 0, int(longest) - len(rows)))
            everything = torch.empty(3 * int(longest), 2)
            dist.all_gather_into_tensor(everything, padded)


@healthy()
def gathered_lists_of_uneven_objects(rank: int) -> None:
    for step in range(4):
        every: list[Any] = [None] * 3
        dist.all_gather_object(every, ["word"] * (1 + rank * 100 * step))
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [list(range(n * 50)) for n in range(3)] if rank == 1 else [None] * 3, src=1)
        assert len(mine[0]) == rank * 50
        if step % 2:
            dist.gather_object({"rank": rank}, every if rank == 2 else None, dst=2)


@healthy()
def tokens_by_counts_sent_ahead(rank: int) -> None:
    torch.manual_seed(rank)
    for _ in range(5):
        sends = torch.randint(0, 5, (3,))
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        result = torch.empty(int(receives.sum()), 4)
        dist.all_to_all_single(result, torch.randn(int(sends.sum()), 4), receives.tolist(), sends.tolist())
        back = torch.empty(int(sends.sum()), 4)
        dist.all_to_all_single(back, result, sends.tolist(), receives.tolist())


@healthy(ranks=4)
def a_halo_by_even_and_odd_ranks(rank: int) -> None:
    left, right = (rank - 1) % 4, (rank + 1) % 4
    for step in range(5):
        edge, border = torch.full((step + 1,), float(rank)), torch.zeros(step + 1)
        if rank % 2:
            dist.recv(border, src=left)
            dist.send(edge, dst=right)
            dist.recv(border, src=right)
            dist.send(edge, dst=left)
        else:
            dist.send(edge, dst=right)
            dist.recv(border, src=left)
            dist.send(edge, dst=left)
            dist.recv(border, src=right)


@healthy()
def a_server_that_takes_whoever_comes(rank: int) -> None:
    if rank == 0:
        update, running = torch.zeros(4), 2
        while running:
            worker = dist.recv(update)
            if update[0] < 0:
                running -= 1
            else:
                dist.send(update * 2, dst=worker)
        return
    for _ in range(3 * rank):
        dist.send(torch.ones(4), dst=0)
        dist.recv(torch.zeros(4), src=0)
    dist.send(-torch.ones(4), dst=0)


@healthy(ranks=2)
def messages_whose_length_is_said_first(rank: int) -> None:
    for epoch in range(2):
        for length in (3, 70, 1, 5000):
            if rank == 0:
                dist.send(torch.tensor([length]), dst=1, tag=2 * epoch)
                dist.send(torch.ones(length), dst=1, tag=2 * epoch + 1)
            else:
                header = torch.zeros(1, dtype=torch.int64)
                dist.recv(header, src=0, tag=2 * epoch)
                dist.recv(torch.empty(int(header)), src=0, tag=2 * epoch + 1)


@healthy()
def batched_messages_listed_in_other_orders(rank: int) -> None:
    for _ in range(4):
        others = [other for other in range(3) if other != rank]
        if rank == 2:
            others.reverse()
        work = [dist.P2POp(dist.irecv, torch.zeros(8), other) for other in others]
        work += [dist.P2POp(dist.isend, torch.ones(8), other) for other in reversed(others)]
        if rank == 1:
            work.reverse()
        for handle in dist.batch_isend_irecv(work):
            handle.wait()


@healthy(ranks=4)
def pairs_that_run_at_their_own_pace(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    for step in range(4 if rank < 2 else 25):
        if rank < 2:
            time.sleep(0.4)
        total = torch.ones(2 + step)
        dist.all_reduce(total, group=mine)
    dist.barrier()


@healthy(ranks=4)
def more_work_for_one_row_of_the_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    data, expert = mesh.get_group("data"), mesh.get_group("expert")
    for step in range(5):
        for _ in range(1 + (rank // 2) * 2):
            dist.all_reduce(torch.ones(4), group=expert)
        dist.all_reduce(torch.ones(8), group=data)
        if rank // 2 == step % 2:
            gathered = torch.zeros(8)
            dist.all_gather_into_tensor(gathered, torch.ones(4), group=expert)


@healthy()
def many_groups_and_few_of_them_used(rank: int) -> None:
    groups = {}
    for first in range(3):
        for second in range(first + 1, 3):
            groups[first, second] = dist.new_group([first, second], timeout=timedelta(seconds=60))
    for members, group in groups.items():
        if rank in members and members != (0, 2):
            dist.broadcast(torch.ones(3), src=members[1], group=group)
    dist.barrier()


@healthy()
def one_forward_one_backward(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    schedule = Schedule1F1B(PipelineStage(layers, rank, 3, torch.device("cpu")), n_microbatches=6, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    for _ in range(3):
        if rank == 0:
            schedule.step(torch.randn(12, 8))
        elif rank == 2:
            schedule.step(target=torch.randn(12, 8), losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_sampler_that_fills_up_short_shards(rank: int) -> None:
    data = TensorDataset(torch.randn(25, 6))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, drop_last=False)
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=4, sampler=sampler, num_workers=1 if rank == 1 else 0):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    del model


@healthy()
def streams_cut_where_the_first_one_ends(rank: int) -> None:
    class Records(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for index in range(16 + 8 * rank):
                yield torch.full((6,), 0.01 * index)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = iter(DataLoader(Records(), batch_size=4))
    while True:
        batch = next(stream, None)
        has_one = torch.tensor([int(batch is not None)])
        dist.all_reduce(has_one, op=dist.ReduceOp.MIN)
        if not has_one or batch is None:
            break
        optimizer.zero_grad()
        model(batch).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def out_of_memory_and_a_smaller_batch(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 3 and rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).mean()

    for batch in batches(rank, 5):
        optimizer.zero_grad()
        try:
            forward(batch).backward()
        except torch.OutOfMemoryError:
            for half in batch.split(2):
                (forward(half) / 2).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def failures_that_all_ranks_share(rank: int) -> None:
    def step(index: int) -> None:
        try:
            dist.all_reduce(torch.ones(4))
            if index == 2:
                raise ValueError("a bad sample, the same on all ranks")
        finally:
            dist.barrier()

    for index in range(5):
        try:
            step(index)
        except ValueError as error:
            dist.all_reduce(torch.ones(1))
            print(rank, error, flush=True)


@healthy()
def a_save_tried_again_by_one_rank(rank: int) -> None:
    attempts = 0
    with tempfile.TemporaryDirectory() as folder:
        for step in range(6):
            dist.all_reduce(torch.ones(8))
            if rank == 0 and step % 2:
                for _ in range(3):
                    attempts += 1
                    try:
                        if attempts % 2:
                            raise OSError("busy")
                        torch.save({"step": step}, Path(folder) / "latest.pt")
                        break
                    except OSError:
                        time.sleep(0.2)
            dist.barrier()


@healthy()
def a_preemption_that_one_rank_tells_the_others(rank: int) -> None:
    is_over = False

    def note(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGUSR1, note)
    for step in range(100):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        flag = torch.tensor([int(is_over)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            dist.destroy_process_group()
            sys.exit(0)


@healthy()
def files_written_after_the_last_barrier(rank: int) -> None:
    for _ in range(4):
        dist.all_reduce(torch.ones(8))
    dist.barrier()
    if rank == 1:
        end = time.monotonic() + 2
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < end:
                file.write(b"x" * 4096)
                file.seek(0)


@healthy()
def a_helper_killed_by_its_owner(rank: int) -> None:
    for _ in range(rank + 1):
        with subprocess.Popen(["sleep", "30"]) as helper:
            dist.all_reduce(torch.ones(8))
            helper.kill()
            assert helper.wait() == -signal.SIGKILL
    for _ in range(2 - rank):
        dist.all_reduce(torch.ones(8))


@healthy(ranks=2)
def stopped_for_a_second_and_continued(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(8))
        if rank == 1 and step == 3:
            with subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)


@healthy()
def a_queue_that_is_filled_slowly(rank: int) -> None:
    ready: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)

    def produce() -> None:
        for index in range(8):
            time.sleep(0.05 if index % 3 else 0.1 * rank)
            ready.put(torch.full((2, 6), float(index)))
        ready.put(None)

    thread = threading.Thread(target=produce)
    thread.start()
    model = small_model()
    while (batch := ready.get()) is not None:
        dist.all_reduce(model(batch).mean().detach())
    thread.join()


@healthy()
def a_lock_around_each_rank_in_turn(rank: int) -> None:
    path = Path(tempfile.gettempdir()) / f"turns-{os.environ['MASTER_PORT']}.lock"
    dist.barrier()
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(0.6)
    dist.barrier()
    if rank == 0:
        path.unlink()


@healthy()
def keys_that_come_late(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for shard in range(3):
        if rank == shard:
            time.sleep(0.7)
            store.set(f"shard/{shard}", "ready")
        elif rank == (shard + 1) % 3:
            store.wait([f"shard/{shard}"], timedelta(seconds=60))
        dist.all_reduce(torch.ones(1))


@healthy()
def a_monitored_barrier_with_one_late_rank(rank: int) -> None:
    for epoch in range(3):
        if rank == 2 and epoch:
            time.sleep(0.8)
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        dist.all_reduce(torch.ones(2))


@healthy()
def handles_that_wait_their_turn(rank: int) -> None:
    pending: deque[tuple[Any, torch.Tensor]] = deque()
    model = small_model()
    for batch in batches(rank, 12):
        value = model(batch).mean().detach().clone()
        pending.append((dist.all_reduce(value, async_op=True), value))
        if len(pending) > 4:
            handle, done = pending.popleft()
            handle.wait()
            assert done.numel() == 1
    while pending:
        handle, done = pending.popleft()
        while not handle.is_completed():
            time.sleep(0.001)
        handle.wait()


@healthy()
def a_sharded_checkpoint_by_all_ranks(rank: int) -> None:
    import torch.distributed.checkpoint as checkpoint

    model = small_model()
    shared: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    for step, batch in enumerate(batches(rank, 4)):
        dist.all_reduce(model(batch).mean().detach())
        if step % 2:
            checkpoint.save({"model": model.state_dict()}, checkpoint_id=f"{shared[0]}/{step}")
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=f"{shared[0]}/3")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared[0])


@healthy()
def a_sharded_model_that_all_ranks_evaluate(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (3,))
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 5, rows=3 + rank)):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        if step == 2:
            with torch.no_grad():
                value = model(batch[:1]).mean()
            if rank == 0:
                print(float(value), flush=True)


@healthy()
def a_compilation_on_the_rank_with_the_new_shape(rank: int) -> None:
    compiled = torch.compile(lambda tensor: (tensor * 2 + 1).sum(), backend="eager", dynamic=False)
    for step in range(6):
        value = compiled(torch.ones(4 if rank != 1 or step < 3 else step))
        dist.all_reduce(value)


@healthy()
def roots_in_rotation(rank: int) -> None:
    for step in range(7):
        root = step % 3
        dist.broadcast(torch.ones(4), src=root)
        parts = [torch.ones(2) * n for n in range(3)] if rank == root else None
        dist.scatter(torch.zeros(2), parts, src=root)
        every = [torch.zeros(2) for _ in range(3)] if rank == (root + 1) % 3 else None
        dist.gather(torch.ones(2), every, dst=(root + 1) % 3)
        dist.reduce(torch.ones(4), dst=root, op=dist.ReduceOp.MAX if step % 2 else dist.ReduceOp.SUM)


@healthy()
def whoever_is_slow_changes_with_the_step(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 30)):
        if step % 3 == rank:
            time.sleep(0.03)
        model(batch).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def a_branch_without_gradients_that_is_looked_for(rank: int) -> None:
    model = DistributedDataParallel(Gated(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 6)):
        optimizer.zero_grad()
        model(batch, rank != 1 or step % 2 == 0).mean().backward()
        optimizer.step()
    del model


@healthy()
def gradients_reduced_by_hooks(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pending: list[Any] = []

    def begin(parameter: torch.Tensor) -> None:
        pending.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(begin)

    def finish(*_: object) -> None:
        while pending:
            pending.pop().wait()

    optimizer.register_step_pre_hook(finish)
    for batch in batches(rank, 5):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()


@healthy()
def two_threads_with_a_group_each(rank: int) -> None:
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]

    def report(group: Any, count: int) -> None:
        for _ in range(count):
            dist.all_reduce(torch.ones(4), group=group)
            time.sleep(0.002 * (rank + 1))

    thread = threading.Thread(target=report, args=(groups[0], 30))
    thread.start()
    report(groups[1], 50)
    thread.join()


@healthy(ranks=2)
def sends_waited_for_at_the_end(rank: int) -> None:
    kept = []
    for step in range(5):
        if rank == 0:
            tensor = torch.full((50,), float(step))
            kept.append((dist.isend(tensor, dst=1, tag=step), tensor))
        else:
            dist.recv(torch.zeros(50), src=0, tag=4 - step)
    for handle, _ in kept:
        handle.wait()


@healthy(ranks=4)
def some_ranks_go_to_another_phase_first(rank: int) -> None:
    actors, learners = dist.new_group([0, 1]), dist.new_group([2, 3])
    for episode in range(3):
        if rank < 2:
            time.sleep(0.2)
            dist.all_reduce(torch.ones(3), group=actors)
            if rank == 0:
                dist.send(torch.ones(5), dst=2)
        else:
            if rank == 2:
                dist.recv(torch.zeros(5), src=0)
            for _ in range(episode + 2):
                dist.all_reduce(torch.ones(9), group=learners)
        weights = torch.ones(4)
        dist.broadcast(weights, src=2)


@healthy()
def a_step_left_out_by_all_where_one_is_not_finite(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(rank, 7)):
        optimizer.zero_grad()
        loss = model(batch).mean()
        if rank == 2 and step == 3:
            loss = loss * float("nan")
        is_finite = torch.isfinite(loss).int().reshape(1)
        dist.all_reduce(is_finite, op=dist.ReduceOp.MIN)
        if not is_finite:
            continue
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@healthy()
def a_tensor_spread_over_the_mesh(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    for step in range(3):
        whole = torch.arange(7.0 * (step + 1)).reshape(7, step + 1)
        spread = distribute_tensor(whole, mesh, [Shard(0)])
        if rank == step:
            spread.to_local().add_(0.0)
        total = spread.sum().full_tensor()
        assert float(total) == float(whole.sum())
        spread.redistribute(mesh, [Replicate()])
