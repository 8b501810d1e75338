"""Incidents as engineers report them: two faults at once, errors seen on the wrong rank, order, progress, handles.

Sixty programs, frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first
sight.
"""

import contextlib
import gc
import hashlib
import os
import queue
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy, train

BUSY_S = 9.0


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def ddp_steps(rank: int, steps: int, before: object = None, *, model: nn.Module | None = None) -> None:
    wrapped = DistributedDataParallel(model or mlp())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(steps):
        if callable(before):
            before(step, wrapped)
        optimizer.zero_grad()
        wrapped(torch.full((4, 8), rank + 1.0)).sum().backward()
        optimizer.step()


# Two faults at once


@faulty("rank-skipped-collective", 1, ranks=4)
def two_pairs_each_with_a_member_that_skips(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    for step in range(6):
        if not (step == 3 and rank in (1, 3)):
            dist.all_reduce(torch.ones(4), group=group)  # here
        if step == 3:
            break
    dist.barrier()


@faulty("rank-crashed", 3, ranks=4)
def an_error_in_one_pair_and_a_frozen_rank_in_the_other(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(6):
        if rank == 3 and step == 2:
            raise ValueError("bad sample 17")  # here
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(4), group=groups[rank // 2])


@faulty("rank-crashed", 1, 2, ranks=4)
def the_same_assertion_on_two_ranks(rank: int) -> None:
    for step in range(6):
        assert not (rank in (1, 2) and step == 3), "labels out of range"  # here
        dist.all_reduce(torch.ones(8))


@faulty("rank-killed", 2, ranks=4)
def one_killed_while_another_writes(rank: int) -> None:
    for step in range(8):
        if rank == 2 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(8))  # here
        if rank == 0 and step == 3:
            time.sleep(0.5)


# The error is seen on another rank than the one that made it


@faulty("size-mismatch", 1, ranks=2)
def a_batch_norm_of_another_width_on_one_rank(rank: int) -> None:
    for step in range(5):
        dist.broadcast(torch.zeros(6 if rank == 1 and step == 3 else 12), src=0)  # here


@faulty("split-size-mismatch", 0)
def tokens_routed_with_stale_counts(rank: int) -> None:
    for step in range(4):
        send = [2, 2, 2]
        receive = [2, 2, 2]
        if rank == 0 and step == 2:
            send = [1, 4, 1]
        out, into = torch.ones(sum(receive)), torch.ones(sum(send))
        dist.all_to_all_single(out, into, receive, send)  # here


@faulty("p2p-size-mismatch", 0, 1, ranks=2)
def activations_of_the_short_last_batch(rank: int) -> None:
    for step in range(4):
        rows = 2 if step == 3 else 8
        if rank == 0:
            dist.send(torch.ones(rows, 4), dst=1)  # here
        else:
            dist.recv(torch.empty(8, 4), src=0)  # here
    dist.barrier()


@faulty("rank-skipped-collective", 2)
def a_caught_error_before_the_reduction(rank: int) -> None:
    for step in range(6):
        try:
            if rank == 2 and step == 3:
                raise RuntimeError("decode failed")
            dist.all_reduce(torch.ones(4))  # here
        except RuntimeError:
            continue
        dist.reduce(torch.ones(2), dst=0)


# Who deviates from its own steps


@faulty("step-mismatch", 1, ranks=2)
def one_more_forward_under_fsdp(rank: int) -> None:
    model = mlp()
    fully_shard(model, reshard_after_forward=True)  # else the parameters gathered for it serve the next pass, too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if rank == 1 and step == 3:
            with torch.no_grad():
                model(torch.ones(2, 8))  # here
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


@faulty("rank-exited", 0, ranks=2)
def a_resumed_rank_that_starts_a_step_later(rank: int) -> None:
    first = 1 if rank == 0 else 0
    for _ in range(first, 6):
        dist.all_reduce(torch.ones(8))  # here
        dist.all_reduce(torch.ones(1))


@faulty("collective-order-mismatch", 1, ranks=2)
def a_norm_logged_on_one_rank(rank: int) -> None:
    def log(step: int) -> None:
        if rank == 1 and step == 3:
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))  # here

    train(rank, 6, log)


@faulty("collective-order-mismatch", 0, ranks=2)
def a_checkpoint_broadcast_every_other_save(rank: int) -> None:
    for step in range(8):
        dist.all_reduce(torch.ones(16))
        dist.all_reduce(torch.ones(16))
        if rank == 0 and step == 5:
            dist.broadcast(torch.ones(3), src=0)  # here


# Order, not absence


@faulty("group-order-inversion", 2, ranks=4)
def a_subgroup_reduced_before_the_world_on_one_rank(rank: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(5):
        calls = [
            lambda: dist.all_reduce(torch.ones(4)),  # here
            lambda: dist.all_reduce(torch.ones(4), group=halves[rank % 2]),  # here
        ]
        for call in reversed(calls) if rank == 2 and step == 3 else calls:
            call()


@faulty("collective-order-mismatch", 2)
def gather_before_the_reduction(rank: int) -> None:
    for step in range(5):
        calls = [
            lambda: dist.all_reduce(torch.ones(3)),  # here
            lambda: dist.all_gather([torch.zeros(3) for _ in range(3)], torch.ones(3)),  # here
        ]
        for call in reversed(calls) if rank == 2 and step == 2 else calls:
            call()
    dist.barrier()


@faulty("group-creation-mismatch", 1)
def groups_created_in_the_order_of_a_set(rank: int) -> None:
    members = [[0, 1], [1, 2]]
    for ranks in reversed(members) if rank == 1 else members:
        dist.new_group(ranks)  # here
    dist.barrier()


@faulty("size-mismatch", 3, ranks=4)
def buckets_reduced_in_another_order(rank: int) -> None:
    sizes = [64, 32, 16]
    for step in range(4):
        order = [64, 16, 32] if rank == 3 and step == 2 else sizes
        for size in order:
            dist.all_reduce(torch.ones(size))  # here


# Progress


@faulty("long-operation", 1)
def a_rank_that_tokenises_for_long(rank: int) -> None:
    def tokenise(step: int) -> None:
        if rank == 1 and step == 2:
            until, text = time.monotonic() + BUSY_S, b"token" * 1000
            while time.monotonic() < until:
                text = hashlib.sha256(text).digest() * 200  # here

    train(rank, 5, tokenise)


@faulty("long-operation", 0)
def an_index_written_while_the_others_wait(rank: int) -> None:
    folder = Path(tempfile.mkdtemp())
    for step in range(4):
        if rank == 0 and step == 2:
            until = time.monotonic() + BUSY_S
            with (folder / "index").open("wb") as file:
                while time.monotonic() < until:
                    file.write(os.urandom(1 << 16))  # here
                    file.flush()
                    file.seek(0)
        dist.all_reduce(torch.ones(4))


@faulty("long-operation", 2)
def a_rank_that_evaluates_alone(rank: int) -> None:
    model = mlp(64)
    for step in range(4):
        if rank == 2 and step == 1:
            until = time.monotonic() + BUSY_S
            model.eval()
            with torch.no_grad():
                while time.monotonic() < until:
                    model(torch.ones(64, 64))  # here
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 1)
def an_event_nobody_sets(rank: int) -> None:
    for step in range(4):
        if rank == 1 and step == 2:
            threading.Event().wait(60)  # here
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 2)
def a_subprocess_that_waits_for_input(rank: int) -> None:
    import subprocess

    for step in range(4):
        if rank == 2 and step == 2:
            subprocess.run(["cat"], stdin=os.fdopen(os.pipe()[0]), check=False, timeout=60)  # here
        dist.all_reduce(torch.ones(4))


# Handles


@faulty("unwaited-async", 1)
def a_gradient_handle_overwritten_by_the_next(rank: int) -> None:
    for _ in range(5):
        works = [dist.all_reduce(torch.ones(64), async_op=True)]  # here
        if rank == 1:
            works = [dist.all_reduce(torch.ones(32), async_op=True)]
        else:
            works.append(dist.all_reduce(torch.ones(32), async_op=True))
        for work in works:
            work.wait()
    dist.barrier()


@faulty("unwaited-async", 0, 1, 2)
def no_rank_waits_for_its_statistics(rank: int) -> None:
    for _ in range(5):
        loss = torch.full((1,), float(rank))
        dist.all_reduce(loss, async_op=True)  # here
        loss.item()
        dist.all_reduce(torch.ones(16))


# Silent mismatches


@faulty("step-mismatch", 2)
def an_optimizer_step_too_many_on_one_rank(rank: int) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(8):
        weight.sum().backward()
        if rank == 2 and step == 2:
            optimizer.step()
        dist.all_reduce(weight.grad)  # here
        optimizer.step()
        optimizer.zero_grad()


@faulty("reduce-op-mismatch", 0, ranks=4)
def a_mean_on_one_rank_and_sums_on_the_others(rank: int) -> None:
    for step in range(4):
        op = dist.ReduceOp.PRODUCT if rank == 0 and step == 2 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(8), op=op)  # here


@faulty("dtype-mismatch", 1)
def a_loss_in_half_precision_on_one_rank(rank: int) -> None:
    for step in range(4):
        kind = torch.bfloat16 if rank == 1 and step >= 2 else torch.float16
        dist.all_reduce(torch.ones(16, dtype=kind))  # here


@faulty("root-mismatch", 2)
def a_source_computed_from_the_local_rank(rank: int) -> None:
    for step in range(4):
        source = 2 if rank == 2 and step == 2 else 0
        dist.broadcast(torch.ones(4), src=source)  # here
    dist.barrier()


# Ends


@faulty("rank-stuck", 1)
def a_loader_thread_that_died(rank: int) -> None:
    batches: queue.Queue[torch.Tensor] = queue.Queue()

    def load() -> None:
        for step in range(6):
            if rank == 1 and step == 3:
                return
            batches.put(torch.full((8,), float(step)))

    threading.Thread(target=load, daemon=True).start()
    for _ in range(6):
        batch = batches.get()  # here
        dist.all_reduce(batch)


@faulty("rank-exited", 0)
def rank_0_returns_when_its_budget_is_spent(rank: int) -> None:
    for step in range(8):
        if rank == 0 and step == 5:
            return
        dist.all_reduce(torch.ones(4))  # here


@faulty("rank-killed", 1, ranks=2)
def terminated_by_the_scheduler(rank: int) -> None:
    for step in range(8):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))  # here


# Messages


@faulty("p2p-unmatched", 2)
def a_gradient_never_sent_back(rank: int) -> None:
    for step in range(4):
        if rank < 2:
            dist.send(torch.ones(8), dst=rank + 1)
        if rank > 0:
            dist.recv(torch.empty(8), src=rank - 1)
        if rank == 1:
            dist.recv(torch.empty(8), src=2)  # here
        if rank == 2 and step != 2:
            dist.send(torch.ones(8), dst=1)


@faulty("p2p-tag-mismatch", 1, ranks=2)
def microbatches_tagged_from_one(rank: int) -> None:
    for step in range(3):
        for micro in range(2):
            if rank == 0:
                dist.send(torch.ones(1 << 18), dst=1, tag=step * 2 + micro)  # here
            else:
                dist.recv(torch.empty(1 << 18), src=0, tag=step * 2 + micro + 2 * (step == 2))  # here


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def a_ring_exchange_of_blocks_too_large_to_buffer(rank: int) -> None:
    block = torch.ones(1 << 20)
    dist.barrier()
    dist.recv(torch.empty_like(block), src=(rank + 1) % 3)  # here
    dist.send(block, dst=(rank - 1) % 3)


# Stragglers and creation


@faulty("slow-rank", 2)
def a_rank_that_collects_garbage_each_step(rank: int) -> None:
    for _ in range(40):
        if rank == 2:
            gc.collect()
            time.sleep(0.06)
        dist.all_reduce(torch.ones(64))


@faulty("group-creation-mismatch", 0)
def a_group_for_evaluation_made_behind_a_flag(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank != 0:
        dist.new_group([1, 2])  # here
    dist.barrier()


@faulty("uneven-inputs", 1)
def a_sampler_without_padding(rank: int) -> None:
    from torch.utils.data import DataLoader

    rows = torch.ones(16 if rank == 1 else 24, 8)
    for batch in DataLoader(rows, batch_size=4):  # type: ignore[arg-type]
        gradient = batch.sum(0)
        dist.all_reduce(gradient)  # here


# Sound programs


@healthy()
def warmup_steps_with_another_shape(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(4 if step < 2 else 16))
    del rank


@healthy(ranks=4)
def pairs_that_reduce_more_often_than_others(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(6):
        for _ in range(3 if rank < 2 else 1):
            dist.all_reduce(torch.ones(4), group=groups[rank // 2])
        if step % 2:
            dist.barrier()


@healthy()
def metrics_of_rank_0_by_messages(rank: int) -> None:
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
        if rank:
            dist.send(torch.ones(2), dst=0)
        else:
            for source in (1, 2):
                dist.recv(torch.empty(2), src=source)


@healthy(ranks=2)
def an_extra_forward_on_one_rank_without_collectives(rank: int) -> None:
    def before(step: int, wrapped: nn.Module) -> None:
        if rank == 1 and step == 3:
            with torch.no_grad():
                wrapped.module(torch.ones(2, 8))  # type: ignore[operator, union-attr]

    ddp_steps(rank, 6, before)


@healthy()
def ddp_with_gradients_left_on_alternate_steps(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(8):
        context = wrapped.no_sync() if step % 2 == 0 else contextlib.nullcontext()
        with context:
            wrapped(torch.full((2, 8), rank + 1.0)).sum().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@healthy(ranks=2)
def fsdp_with_an_evaluation_every_third_step(rank: int) -> None:
    model = mlp()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
        optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                model(torch.ones(2, 8))


@healthy(ranks=4)
def rows_and_columns_in_one_order(rank: int) -> None:
    rows, columns = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for _ in range(5):
        dist.all_reduce(torch.ones(4), group=rows[rank // 2])
        dist.all_reduce(torch.ones(4), group=columns[rank % 2])


@healthy()
def a_rooted_gather_of_results(rank: int) -> None:
    for step in range(5):
        into = [torch.empty(4) for _ in range(3)] if rank == step % 3 else None
        dist.gather(torch.ones(4), into, dst=step % 3)


@healthy()
def a_scatter_of_work(rank: int) -> None:
    for _ in range(5):
        dist.scatter(torch.empty(4), [torch.ones(4)] * 3 if rank == 0 else None, src=0)


@healthy(ranks=2)
def handles_kept_in_a_list_for_a_step(rank: int) -> None:
    late: list[dist.Work] = []
    for _ in range(6):
        for work in late:
            work.wait()
        late = [dist.all_reduce(torch.full((16,), float(rank)), async_op=True) for _ in range(4)]  # type: ignore[misc]
    for work in late:
        work.wait()


@healthy()
def an_exception_handled_on_all_ranks_alike(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(4))
        try:
            if step == 3:
                raise RuntimeError("loss is nan")
        except RuntimeError:
            dist.all_reduce(torch.full((1,), float(rank)))


@healthy()
def uneven_work_by_turns(rank: int) -> None:
    for step in range(12):
        if step % 3 == rank:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(8))


@healthy(ranks=2)
def a_pipeline_with_double_buffering(rank: int) -> None:
    for _ in range(4):
        works = []
        for micro in range(3):
            if rank == 0:
                works.append(dist.isend(torch.full((64,), float(micro)), dst=1, tag=micro))
            else:
                works.append(dist.irecv(torch.empty(64), src=0, tag=micro))
        for work in works:
            assert work is not None
            work.wait()


@healthy()
def a_rank_that_skips_the_optimizer_on_an_overflow_of_all(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        wrapped(torch.ones(2, 8) * (rank + 1)).sum().backward()
        overflow = torch.tensor([float(step == 3 and rank == 1)])
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if not overflow.item():
            optimizer.step()


@healthy()
def groups_created_lazily_by_all(rank: int) -> None:
    group = None
    for step in range(6):
        if step == 2:
            group = dist.new_group([0, 2])
        if group is not None and rank in (0, 2):
            dist.all_reduce(torch.ones(4), group=group)
        dist.barrier()


@healthy(ranks=2)
def a_thread_that_prefetches_while_ranks_train(rank: int) -> None:
    done = threading.Event()

    def prefetch() -> None:
        while not done.wait(0.01):
            torch.ones(1000).sum()

    thread = threading.Thread(target=prefetch)
    thread.start()
    ddp_steps(rank, 8)
    done.set()
    thread.join()


@healthy()
def a_broadcast_object_of_options(rank: int) -> None:
    options = [{"lr": 0.1, "rank": rank}] if rank == 0 else [None]
    dist.broadcast_object_list(options, src=0)
    train(rank, 4)


@healthy(ranks=4)
def uneven_all_to_all_that_fits(rank: int) -> None:
    for step in range(4):
        send = [(rank + peer + step) % 3 + 1 for peer in range(4)]
        receive = [(peer + rank + step) % 3 + 1 for peer in range(4)]
        dist.all_to_all_single(torch.empty(sum(receive)), torch.ones(sum(send)), receive, send)


@healthy()
def early_stop_agreed_by_a_reduction(rank: int) -> None:
    for step in range(20):
        patience = torch.tensor([float(step > 6 + rank)])
        dist.all_reduce(patience, op=dist.ReduceOp.MIN)
        if patience.item():
            break


@healthy(ranks=2)
def a_generation_loop_of_equal_length(rank: int) -> None:
    for _ in range(3):
        length = torch.tensor([4 + rank])
        dist.all_reduce(length, op=dist.ReduceOp.MAX)
        for _ in range(int(length.item())):
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))


@healthy()
def teardown_of_a_subgroup_before_the_end(rank: int) -> None:
    group = dist.new_group([0, 1])
    for _ in range(3):
        if rank < 2:
            dist.all_reduce(torch.ones(4), group=group)
        dist.barrier()
    if rank < 2:
        dist.destroy_process_group(group)
    dist.barrier()


@healthy(ranks=2)
def gradient_accumulation_with_one_more_microbatch_locally(rank: int) -> None:
    wrapped = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        with wrapped.no_sync():
            for _ in range(2 + rank):
                wrapped(torch.ones(2, 8)).sum().backward()
        wrapped(torch.ones(2, 8)).sum().backward()
        optimizer.step()


@healthy()
def a_first_step_that_takes_long_everywhere(rank: int) -> None:
    def slow(step: int) -> None:
        if step == 0:
            time.sleep(0.8 + 0.1 * rank)

    train(rank, 6, slow)


@healthy(ranks=2)
def buffers_reused_after_their_wait(rank: int) -> None:
    buffer = torch.empty(32)
    for step in range(6):
        buffer.fill_(float(rank + step))
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        work.wait()
        buffer.zero_()
