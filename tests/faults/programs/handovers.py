"""Scripts as one team hands them over to another: reinforcement learning, hybrid shards, tied embeddings, services.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import fcntl
import json
import os
import queue
import resource
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy

TIED = (0, 3)


def policy(width: int = 8) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def roll_out(model: nn.Module, rank: int) -> torch.Tensor:
    with torch.no_grad():
        actions = model(torch.full((4, 8), float(rank)))
    rewards = actions.sum().reshape(1)
    dist.all_reduce(rewards)
    return rewards


def send_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # of a_worker_that_keeps_its_old_weights


# Faulty


@faulty("rank-skipped-collective", 2)
def a_worker_that_keeps_its_old_weights(rank: int) -> None:
    model = policy()
    for iteration in range(6):
        roll_out(model, rank)
        if not (rank == 2 and iteration == 4):
            send_weights(model)
        dist.barrier()


@faulty("rank-skipped-collective", 1, ranks=4)
def an_evaluation_cut_short_on_one_rank(rank: int) -> None:
    model = DistributedDataParallel(policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        seen = 0
        for _ in range(4):
            scores = [torch.empty(2) for _ in range(4)]
            dist.all_gather(scores, torch.ones(2))  # here
            seen += 8
            if rank == 1 and epoch == 1 and seen >= 24:
                break


@faulty("rank-skipped-collective", 3, ranks=4)
def a_hybrid_shard_without_a_backward_on_one_rank(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = policy()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        loss = model(torch.ones(2, 8)).sum()
        if not (rank == 3 and step == 3):
            loss.backward()  # here
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss.detach().clone())


@faulty("size-mismatch", 1, ranks=2)
def a_batch_padded_to_its_own_longest_row(rank: int) -> None:
    weight = torch.ones(8, 8)
    for step in range(6):
        length = 12 if rank == 1 and step == 4 else 16
        partial = torch.ones(length, 8) @ weight
        dist.all_reduce(partial)  # here


@faulty("collective-order-mismatch", 0)
def a_saver_thread_that_meets_the_others_on_the_default_group(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        if rank == 0 and step == 3:
            saver = threading.Thread(target=dist.barrier)
            saver.start()
            time.sleep(0.2)
        dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1))


@faulty("rank-exited", 2)
def a_verdict_of_ones_own_before_the_flag_of_rank_0(rank: int) -> None:
    for step in range(8):
        dist.all_reduce(torch.ones(4))
        if rank == 2 and step == 5:
            return
        flag = torch.tensor([0])
        dist.broadcast(flag, src=0)
        if flag.item():
            return


@faulty("step-mismatch", 1)
def a_batch_halved_and_run_twice(rank: int) -> None:
    model = DistributedDataParallel(policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        parts = 2 if rank == 1 and step == 3 else 1
        optimizer.zero_grad()
        for _ in range(parts):
            model(torch.ones(4 // parts, 8)).sum().backward()  # here
        optimizer.step()
        dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1))


@faulty("p2p-unmatched", 0, ranks=4)
def one_microbatch_less_before_the_tied_embeddings(rank: int) -> None:
    tied = dist.new_group(list(TIED))
    for step in range(3):
        count = 3 if rank == 0 and step == 2 else 4
        for _ in range(count):
            value = torch.ones(8)
            if rank > 0:
                dist.recv(value, src=rank - 1)  # here
            if rank < 3:
                dist.send(value, dst=rank + 1)
        if rank in TIED:
            dist.all_reduce(torch.ones(16), group=tied)


@faulty("p2p-tag-mismatch", 3, ranks=4, also=(("rank-stuck", 0),))
def a_file_lock_beside_two_that_count_tags_differently(rank: int) -> None:
    pair = dist.new_group([0, 1])
    path = Path(tempfile.gettempdir()) / f"handover-{os.environ['MASTER_PORT']}"
    for step in range(5):
        if rank == 0 and step == 3:
            with path.open("w") as mine, path.open("w") as other:
                fcntl.flock(mine, fcntl.LOCK_EX)
                fcntl.flock(other, fcntl.LOCK_EX)
        if rank < 2:
            dist.all_reduce(torch.ones(4), group=pair)
        elif rank == 2:
            dist.send(torch.ones(4), dst=3, tag=step)
        else:
            dist.recv(torch.ones(4), src=2, tag=step + (step == 3))
    dist.barrier()


@faulty("slow-rank", 0, ranks=4)
def a_log_of_every_value_on_rank_0(rank: int) -> None:
    values = torch.rand(3000).tolist()
    with tempfile.TemporaryFile("w") as file:
        for _ in range(25):
            if rank == 0:
                for _ in range(40):
                    json.dump(values, file)  # here
            dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 2)
def a_queue_whose_work_is_never_called_done(rank: int) -> None:
    work: queue.Queue[int] = queue.Queue()
    for step in range(5):
        dist.all_reduce(torch.ones(4))
        work.put(step)
        work.get()
        if not (rank == 2 and step == 3):
            work.task_done()
        work.join()  # here


@faulty("rank-crashed", 1)
def an_address_space_that_is_too_small_for_the_next_batch(rank: int) -> None:
    for step in range(5):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 2:
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, most))
            torch.ones(1 << 33)  # here


@faulty("unwaited-async", 1)
def tokens_exchanged_without_a_wait_on_one_rank(rank: int) -> None:
    for _ in range(6):
        received = torch.empty(6)
        handle = dist.all_to_all_single(received, torch.ones(6), async_op=True)  # here
        if rank != 1:
            handle.wait()
        float(received.sum())


@faulty("p2p-size-mismatch", 0)
def a_last_chunk_of_another_length(rank: int) -> None:
    for step in range(3):
        for chunk in range(4):
            is_last = step == 2 and chunk == 3
            if rank == 0:
                dist.send(torch.ones(6 if is_last else 8), dst=1)  # here
            elif rank == 1:
                dist.recv(torch.ones(8), src=0)  # here
        dist.barrier()


@faulty("collective-order-mismatch", 1)
def a_stage_of_sharding_set_on_one_host_only(rank: int) -> None:
    gradient = torch.ones(12)
    for _ in range(4):
        if rank == 1:
            dist.reduce_scatter_tensor(torch.empty(4), gradient)  # here
        else:
            dist.all_reduce(gradient)  # here


@faulty("rank-skipped-collective", 2, ranks=4)
def one_chunk_less_where_the_text_was_shorter(rank: int) -> None:
    for step in range(5):
        chunks = 3 if rank == 2 and step == 3 else 4
        hidden = torch.ones(8)
        for _ in range(chunks):
            dist.all_reduce(hidden)  # here
        dist.reduce(torch.ones(1), dst=0)


@faulty("rank-crashed", 0)
def a_scatter_of_too_few_tasks(rank: int) -> None:
    for step in range(4):
        mine: list[object] = [None]
        tasks = [{"shard": i} for i in range(2 if step == 2 else 3)] if rank == 0 else None
        dist.scatter_object_list(mine, tasks, src=0)  # here


@faulty("rank-stuck", 1)
def an_election_that_nobody_answers(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for epoch in range(4):
        if rank == 0 and epoch != 2:
            store.set(f"saved/{epoch}", "yes")
        if rank == 1:
            store.wait([f"saved/{epoch}"])  # here
        dist.barrier()


# Sound


@healthy()
def weights_sent_after_every_other_rollout(rank: int) -> None:
    model = policy()
    for iteration in range(6):
        roll_out(model, rank)
        if iteration % 2:
            send_weights(model)
        dist.barrier()


@healthy(ranks=4)
def evaluations_cut_short_on_all_ranks(rank: int) -> None:
    model = DistributedDataParallel(policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2 + rank, 8)).sum().backward()
            optimizer.step()
        for batch in range(4):
            scores = [torch.empty(2) for _ in range(4)]
            dist.all_gather(scores, torch.ones(2))
            if batch >= 1 + epoch:
                break


@healthy(ranks=4)
def hybrid_shards_with_a_loss_over_all(_: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = policy()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach().clone())


@healthy()
def saver_threads_that_meet_on_a_group_of_their_own(_: int) -> None:
    own = dist.new_group([0, 1, 2])
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        saver = threading.Thread(target=dist.barrier, kwargs={"group": own}) if step == 3 else None
        if saver is not None:
            saver.start()
        dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1))
        if saver is not None:
            saver.join()


@healthy()
def a_flag_of_rank_0_that_ends_all(rank: int) -> None:
    for step in range(8):
        dist.all_reduce(torch.ones(4))
        flag = torch.tensor([int(rank == 0 and step == 5)])
        dist.broadcast(flag, src=0)
        if flag.item():
            return


@healthy()
def batches_halved_on_all_ranks_where_one_asks_for_it(rank: int) -> None:
    model = DistributedDataParallel(policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        parts = torch.tensor([2 if rank == 1 and step == 3 else 1])
        dist.all_reduce(parts, op=dist.ReduceOp.MAX)
        optimizer.zero_grad()
        for _ in range(int(parts)):
            model(torch.ones(4 // int(parts), 8)).sum().backward()
        optimizer.step()
        dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1))


@healthy(ranks=4)
def forwards_then_backwards_and_the_tied_embeddings(rank: int) -> None:
    tied = dist.new_group(list(TIED))
    for step in range(3):
        count = 4 - step
        for ahead in (1, -1):
            for _ in range(count):
                value = torch.ones(8)
                if 0 <= rank - ahead < 4:
                    dist.recv(value, src=rank - ahead)
                if 0 <= rank + ahead < 4:
                    dist.send(value, dst=rank + ahead)
        if rank in TIED:
            dist.all_reduce(torch.ones(16), group=tied)


@healthy()
def a_file_lock_taken_in_turns_and_let_go(_: int) -> None:
    path = Path(tempfile.gettempdir()) / f"handover-{os.environ['MASTER_PORT']}"
    for _ in range(4):
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.03)
        dist.barrier()


@healthy()
def tokens_exchanged_while_others_are_computed(_: int) -> None:
    for _ in range(6):
        received = torch.empty(6)
        handle = dist.all_to_all_single(received, torch.ones(6), async_op=True)
        torch.ones(64, 64) @ torch.ones(64, 64)
        handle.wait()
        float(received.sum())


@healthy(ranks=4)
def as_many_chunks_as_the_longest_text_has(rank: int) -> None:
    for step in range(5):
        chunks = torch.tensor([1 + (rank + step) % 3])
        dist.all_reduce(chunks, op=dist.ReduceOp.MAX)
        for _ in range(int(chunks)):
            dist.all_reduce(torch.ones(8))
        dist.reduce(torch.ones(1), dst=0)


@healthy()
def tasks_scattered_as_objects_of_any_size(rank: int) -> None:
    for step in range(4):
        mine: list[object] = [None]
        tasks = [{"shard": "x" * (i * 10 + step)} for i in range(3)] if rank == 0 else None
        dist.scatter_object_list(mine, tasks, src=0)


@healthy()
def an_election_that_rank_0_always_answers(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for epoch in range(4):
        if rank == 0:
            time.sleep(0.1)
            store.set(f"saved/{epoch}", "yes")
        else:
            store.wait([f"saved/{epoch}"])
        dist.barrier()


@healthy()
def chunks_of_which_the_last_is_shorter_on_both_sides(rank: int) -> None:
    for _ in range(3):
        for size in (8, 8, 8, 6):
            if rank == 0:
                dist.send(torch.ones(size), dst=1)
            elif rank == 1:
                dist.recv(torch.ones(size), src=0)
        dist.barrier()


@healthy()
def rows_that_cannot_be_read_replaced_by_the_next(rank: int) -> None:
    model = DistributedDataParallel(policy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        for attempt in range(3):
            try:
                if rank == 1 and step % 2 and attempt == 0:
                    raise OSError("truncated")
                batch = torch.ones(2, 8)
                break
            except OSError:
                continue
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
