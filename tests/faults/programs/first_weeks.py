"""What engineers meet in the first weeks of a project: simple mistakes in plain scripts, and scripts that are right.

Sixty programs, frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first
sight.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.faults.corpus import faulty, healthy

WORK_S = 9.0


def linear(width: int = 6) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(width, width)


def averaged(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def work_for(seconds: float) -> int:
    """Use the processor for some time, as parsing does."""
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        count += len(json.dumps({"row": list(range(200)), "at": count}))
    return count


# Skipped and extra calls


@faulty("rank-skipped-collective", 3, ranks=4)
def a_loss_that_one_rank_does_not_average(rank: int) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).sum()
        loss.backward()
        for parameter in model.parameters():
            averaged(parameter)
        optimizer.step()
        if not (rank == 3 and step == 4):
            dist.all_reduce(loss.detach().clone())  # here


@faulty("rank-skipped-collective", 1, ranks=4)
def a_rank_that_skips_the_step_on_overflow(rank: int) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        if rank == 1 and step == 5:
            continue
        for parameter in model.parameters():
            averaged(parameter)
        optimizer.step()
        dist.barrier()


@faulty("collective-order-mismatch", 0)
def a_barrier_in_the_save_of_rank_0(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(12))
        if rank == 0 and step == 3:
            torch.save({"step": step}, Path(tempfile.mkdtemp()) / "model.pt")
            dist.barrier()  # here


@faulty("collective-order-mismatch", 2, ranks=4)
def metrics_gathered_where_only_one_rank_logs(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(12))
        dist.broadcast(torch.ones(3), src=0)
        if rank == 2 and step == 4:
            dist.gather(torch.ones(1), [torch.zeros(1) for _ in range(4)] if rank == 0 else None, dst=0)  # here


@faulty("collective-order-mismatch", 1)
def a_reduce_scatter_where_the_others_all_reduce(rank: int) -> None:
    for step in range(5):
        if rank == 1 and step == 2:
            dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(12))  # here
        else:
            dist.all_reduce(torch.ones(12))


@faulty("uneven-inputs", 2)
def a_dataset_that_does_not_divide(rank: int) -> None:
    model = linear(3)
    rows = TensorDataset(torch.ones(20 if rank == 2 else 24, 3))
    for (batch,) in DataLoader(rows, batch_size=4):
        model(batch).sum().backward()
        dist.all_reduce(model.weight.grad)  # here


@faulty("rank-exited", 1, ranks=4)
def a_rank_that_stops_early_by_itself(rank: int) -> None:
    for step in range(10):
        if rank == 1 and step == 6:
            sys.exit(0)
        dist.all_reduce(torch.ones(5))  # here


@faulty("rank-exited", 0)
def a_return_from_main_before_the_last_barrier(rank: int) -> None:
    for _ in range(4):
        dist.all_reduce(torch.ones(5))
    if rank == 0:
        return
    dist.barrier()  # here


# Groups


@faulty("group-order-inversion", 0, 1, ranks=2)
def two_handles_of_the_same_ranks_in_opposite_order(rank: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for _ in range(2):
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=first)  # here
            dist.all_reduce(torch.ones(4), group=second)
        else:
            dist.all_reduce(torch.ones(4), group=second)  # here
            dist.all_reduce(torch.ones(4), group=first)


@faulty("group-order-inversion", 0, 1, 2)
def three_groups_in_a_circle(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    for number in order:
        dist.all_reduce(torch.ones(4), group=groups[number])  # here


@faulty("group-order-inversion", 3, ranks=4)
def one_rank_that_enters_the_data_group_before_the_world(rank: int) -> None:
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(4):
        if rank == 3 and step == 2:
            dist.all_reduce(torch.ones(2), group=data[rank % 2])  # here
            dist.barrier()
        else:
            dist.barrier()  # here
            dist.all_reduce(torch.ones(2), group=data[rank % 2])


@faulty("group-creation-mismatch", 2)
def a_group_made_where_only_members_come(rank: int) -> None:
    dist.barrier()
    if rank < 2:
        group = dist.new_group([0, 1])  # here
        dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


@faulty("wrong-group", 2, ranks=4)
def a_reduction_over_the_world_instead_of_the_pair(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(6):
        group = dist.group.WORLD if rank == 2 and step == 4 else pairs[rank // 2]
        dist.all_reduce(torch.ones(9), group=group)  # here


# Arguments


@faulty("root-mismatch", 1)
def a_broadcast_from_the_own_rank(rank: int) -> None:
    for step in range(4):
        dist.broadcast(torch.ones(6), src=1 if rank == 1 and step == 2 else 0)  # here


@faulty("dtype-mismatch", 0, ranks=4)
def a_counter_in_another_type(rank: int) -> None:
    for step in range(4):
        count = torch.ones(1, dtype=torch.int32 if rank == 0 and step == 3 else torch.float32)
        dist.all_reduce(count)  # here


@faulty("size-mismatch", 3, ranks=4)
def an_embedding_of_another_size(rank: int) -> None:
    embedding = nn.Embedding(40 if rank == 3 else 48, 4)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(embedding.weight.detach())  # here


@faulty("reduce-op-mismatch", 2)
def a_maximum_on_one_rank(rank: int) -> None:
    for step in range(5):
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 2 and step == 3 else dist.ReduceOp.SUM)  # here


@faulty("size-mismatch", 1)
def a_gather_of_fewer_rows_on_one_rank(rank: int) -> None:
    for step in range(5):
        rows = 2 if rank == 1 and step == 4 else 4
        dist.all_gather([torch.zeros(4) for _ in range(3)], torch.ones(rows)) if rows == 4 else dist.all_gather(  # here
            [torch.zeros(2) for _ in range(3)], torch.ones(2)
        )


@faulty("split-size-mismatch", 1)
def experts_that_expect_more_tokens_than_come(rank: int) -> None:
    for step in range(3):
        send, receive = [2, 2, 2], [2, 2, 2]
        if rank == 1 and step == 2:
            receive = [3, 2, 3]
        dist.all_to_all_single(torch.zeros(sum(receive)), torch.ones(sum(send)), receive, send)  # here


# Messages


@faulty("p2p-unmatched", 1)
def one_message_more_expected_than_sent(rank: int) -> None:
    if rank == 0:
        for _ in range(5):
            dist.recv(torch.zeros(4), src=1)  # here
    if rank == 1:
        for _ in range(4):
            dist.send(torch.ones(4), dst=0)
    dist.barrier()


@faulty("p2p-tag-mismatch", 0, 1, ranks=2)
def a_tag_for_each_direction(rank: int) -> None:
    value = torch.ones(1 << 18)
    if rank == 0:
        dist.send(value, dst=1, tag=7)  # here
    else:
        dist.recv(value, src=0, tag=8)  # here


@faulty("p2p-deadlock-cycle", 0, 1, ranks=2)
def both_send_large_tensors_first(rank: int) -> None:
    value = torch.ones(1 << 20)
    dist.barrier()
    dist.send(value, dst=1 - rank)  # here
    dist.recv(value, src=1 - rank)


@faulty("p2p-unmatched", 2)
def a_result_sent_to_the_wrong_rank(rank: int) -> None:
    for step in range(3):
        if rank == 0:
            dist.recv(torch.zeros(1 << 18), src=2)  # here
        if rank == 2:
            dist.send(torch.ones(1 << 18), dst=1 if step == 2 else 0)


@faulty("p2p-size-mismatch", 0, 1, ranks=2)
def a_buffer_of_the_old_batch_size(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(64), dst=1)  # here
    else:
        dist.recv(torch.zeros(32), src=0)  # here
    dist.barrier()


@faulty("unwaited-async", 0, 1, 2)
def gradients_used_before_they_are_averaged(_: int) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, async_op=True)  # here
        optimizer.step()
    dist.barrier()


# Ranks that stand still, work for long, or end


@faulty("rank-stuck", 1)
def a_marker_file_that_is_written_too_late(rank: int) -> None:
    marker = Path(tempfile.gettempdir()) / f"prepared-{os.getppid()}-{os.environ['MASTER_PORT']}"
    if rank == 1:
        while not marker.exists():
            time.sleep(0.05)  # here
    dist.barrier()
    if rank == 0:
        marker.touch()


@faulty("rank-stuck", 0)
def a_key_of_the_store_that_nobody_sets(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["config"])  # here
    dist.barrier()


@faulty("rank-frozen", 2, ranks=4)
def a_debugger_that_stops_a_rank(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(6))
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # here


@faulty("long-operation", 0)
def a_vocabulary_built_on_rank_0(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        work_for(WORK_S)
    dist.barrier()


@faulty("long-operation", 2)
def a_dataset_copied_by_one_rank(rank: int) -> None:
    dist.barrier()
    if rank == 2:
        until = time.monotonic() + WORK_S
        source = Path(tempfile.mkdtemp()) / "shard"
        source.write_bytes(b"x" * (1 << 22))
        while time.monotonic() < until:
            source.with_suffix(".copy").write_bytes(source.read_bytes())  # here
            time.sleep(0.1)  # here
    dist.barrier()


@faulty("slow-rank", 3, ranks=4)
def a_rank_that_sleeps_in_each_step(rank: int) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(25):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        if rank == 3:
            time.sleep(0.12)
        for parameter in model.parameters():
            averaged(parameter)
        optimizer.step()


@faulty("rank-crashed", 2)
def a_missing_key_in_the_batch(rank: int) -> None:
    for step in range(6):
        batch = {"ids": torch.ones(3)} if not (rank == 2 and step == 4) else {}
        dist.all_reduce(batch["ids"])  # here


@faulty("rank-crashed", 0)
def a_process_that_leaves_with_status_3(rank: int) -> None:
    for step in range(6):
        if rank == 0 and step == 3:
            os._exit(3)
        dist.all_reduce(torch.ones(3))


@faulty("rank-killed", 1)
def a_library_that_segfaults(rank: int) -> None:
    for step in range(6):
        if rank == 1 and step == 3:
            ctypes.string_at(0)
        dist.all_reduce(torch.ones(3))


@faulty("rank-crashed", 1)
def a_main_thread_that_dies_while_another_lives_on(rank: int) -> None:
    for step in range(5):
        if rank == 1 and step == 2:
            threading.Thread(target=time.sleep, args=(6,)).start()
            raise ValueError("learning rate is nan")  # here
        dist.all_reduce(torch.ones(3))


@faulty("rank-crashed", 3, ranks=4)
def an_error_while_another_rank_is_only_late(rank: int) -> None:
    for step in range(5):
        if rank == 1 and step == 3:
            time.sleep(1)
        if rank == 3 and step == 3:
            raise KeyError("labels")  # here
        dist.all_reduce(torch.ones(3))


# Sound


@healthy(ranks=4)
def plain_data_parallel(_: int) -> None:
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.randn(64, 6))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(rows)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(rows, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    del model


@healthy()
def a_checkpoint_by_rank_0_and_a_barrier_for_all(rank: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if step == 2:
            if rank == 0:
                torch.save({"step": step}, Path(tempfile.mkdtemp()) / "model.pt")
            dist.barrier()


@healthy()
def rows_of_metrics_gathered_as_objects(rank: int) -> None:
    for step in range(3):
        rows: list[dict[str, int] | None] = [None] * 3
        dist.all_gather_object(rows, {"rank": rank, "step": step, "words": rank * 100})


@healthy(ranks=4)
def a_tree_of_groups_entered_in_one_order(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    for _ in range(4):
        dist.all_reduce(torch.ones(4), group=halves[rank // 2])
        if rank % 2 == 0:
            dist.all_reduce(torch.ones(4), group=leaders)
        dist.broadcast(torch.ones(4), src=2 * (rank // 2), group=halves[rank // 2])


@healthy()
def a_pipeline_of_messages(rank: int) -> None:
    for _ in range(3):
        for _ in range(4):
            value = torch.ones(8)
            if rank > 0:
                dist.recv(value, src=rank - 1)
            if rank < 2:
                dist.send(value, dst=rank + 1)


@healthy(ranks=2)
def an_exchange_in_even_and_odd_order(rank: int) -> None:
    mine, theirs = torch.ones(1 << 18), torch.zeros(1 << 18)
    for _ in range(3):
        if rank == 0:
            dist.send(mine, dst=1)
            dist.recv(theirs, src=1)
        else:
            dist.recv(theirs, src=0)
            dist.send(mine, dst=0)


@healthy()
def asynchronous_reductions_waited_for_at_the_end_of_the_step(_: int) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for handle in handles:
            handle.wait()
        optimizer.step()


@healthy()
def an_evaluation_of_equal_length_on_all_ranks(_: int) -> None:
    model = linear()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
        with torch.no_grad():
            for _ in range(20):
                model(torch.ones(2, 6))
        dist.reduce(torch.ones(1), dst=0)


@healthy()
def a_short_pause_of_one_rank(rank: int) -> None:
    for step in range(6):
        if rank == 1 and step == 3:
            time.sleep(2)
        dist.all_reduce(torch.ones(3))


@healthy()
def an_agreed_early_stop(rank: int) -> None:
    for step in range(10):
        stop = torch.tensor([1 if rank == 2 and step == 4 else 0])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        dist.all_reduce(torch.ones(6))


@healthy()
def an_exception_caught_before_any_collective(rank: int) -> None:
    for step in range(5):
        try:
            if rank == 0 and step == 2:
                raise ValueError("one bad row, which is dropped")
        except ValueError:
            pass
        dist.all_reduce(torch.ones(3))


@healthy(ranks=4)
def tokens_exchanged_in_uneven_parts(rank: int) -> None:
    for _ in range(3):
        send = [(rank + peer) % 3 + 1 for peer in range(4)]
        dist.all_to_all_single(torch.zeros(sum(send)), torch.ones(sum(send)), send, send)


@healthy()
def accumulated_gradients_without_communication(_: int) -> None:
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(3):
            with model.no_sync():
                model(torch.ones(2, 6)).sum().backward()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model


@healthy()
def a_thread_that_writes_logs(_: int) -> None:
    done = threading.Event()
    writer = threading.Thread(target=lambda: [done.wait(0.02) for _ in range(20)])
    writer.start()
    for _ in range(5):
        dist.all_reduce(torch.ones(3))
    done.set()
    writer.join()


@healthy(ranks=4)
def roots_that_take_turns(_: int) -> None:
    for step in range(8):
        dist.broadcast(torch.ones(3), src=step % 4)
        dist.reduce(torch.ones(3), dst=(step + 1) % 4)


@healthy()
def a_group_made_and_destroyed_in_each_epoch(rank: int) -> None:
    for _ in range(3):
        group = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(torch.ones(3), group=group)
            dist.destroy_process_group(group)
        dist.barrier()


@healthy()
def a_receive_from_anyone(rank: int) -> None:
    if rank == 0:
        for _ in range(4):
            dist.recv(torch.zeros(4))
    else:
        for _ in range(2):
            dist.send(torch.ones(4), dst=0)
    dist.barrier()


@healthy(ranks=2)
def a_futures_callback_that_scales(_: int) -> None:
    for _ in range(4):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.get_future().then(lambda future: future.value()[0] / 2).wait()


@healthy()
def work_on_rank_0_that_nobody_waits_for(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        work_for(1.5)


@healthy(ranks=4)
def a_model_averaged_now_and_then(_: int) -> None:
    model = linear()
    for step in range(9):
        model(torch.ones(2, 6)).sum().backward()
        if step % 3 == 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 4


@healthy()
def parameters_of_different_layers_on_each_rank(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(rank + 1)))
    for _ in range(4):
        norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
        dist.all_reduce(norm)


@healthy(ranks=2)
def a_ring_with_batched_messages(rank: int) -> None:
    for _ in range(3):
        value, into = torch.ones(1 << 16), torch.zeros(1 << 16)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, value, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
        ):
            work.wait()


@healthy()
def a_scatter_of_shards_and_a_gather_of_results(rank: int) -> None:
    for _ in range(3):
        shard = torch.zeros(4)
        dist.scatter(shard, [torch.ones(4) * i for i in range(3)] if rank == 0 else None, src=0)
        dist.gather(shard, [torch.zeros(4) for _ in range(3)] if rank == 0 else None, dst=0)


@healthy()
def a_timeout_that_is_long_enough(rank: int) -> None:
    for step in range(3):
        if rank == step:
            time.sleep(1.2)
        dist.monitored_barrier()
