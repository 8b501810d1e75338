"""Sound scripts near those of `on_call_faults.py`: what they do looks odd, and is right.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import datetime
import json
import queue
import signal
import subprocess
import sys
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
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import back_end, healthy
from tests.faults.programs.on_call_faults import Lines, tower

# Loops


@healthy()
def an_epoch_whose_last_batch_is_shorter_and_a_validation(rank: int) -> None:
    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for (batch,) in DataLoader(TensorDataset(torch.ones(17 + rank, 8)), batch_size=4):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        validation = torch.ones(1)
        dist.all_reduce(validation)


@healthy(ranks=4)
def streams_of_unequal_length_with_a_flag_of_who_has_more(rank: int) -> None:
    stream = iter(DataLoader(Lines(4 + rank), batch_size=1))
    while True:
        batch = next(stream, None)
        more = torch.tensor([float(batch is not None)])
        dist.all_reduce(more)
        if more.item() < 4:
            break
        scores = [torch.empty(1, 8) for _ in range(4)]
        dist.all_gather(scores, batch)


@healthy()
def patience_that_runs_out_on_the_mean_loss(rank: int) -> None:
    weight = torch.ones(16, requires_grad=True)
    bad = 0
    for step in range(10):
        loss = weight.square().sum() * (step + rank)
        weight.grad = None
        loss.backward()
        dist.all_reduce(weight.grad)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        bad += float(mean) > 0
        if bad == 5:
            break
    dist.all_gather_object([None] * 3, {"bad": bad})


@healthy()
def a_failed_batch_replaced_by_an_empty_loss(rank: int) -> None:
    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        try:
            batch = torch.ones(4, 8)
            if rank == 1 and step == 3:
                raise OSError("truncated image")
            loss = model(batch).sum()
        except OSError:
            loss = model(torch.zeros(4, 8)).sum() * 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logged = loss.detach().clone()
        dist.all_reduce(logged)


@healthy()
def a_round_that_all_leave_out_together(rank: int) -> None:
    model = tower()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 9):
        batch = torch.full((2, 8), float("nan") if rank == 2 and step == 5 else 1.0)
        is_good = torch.tensor([float(batch.isfinite().all())])
        dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
        if is_good.item():
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        if step % 3 == 0:
            dist.barrier()


@healthy(ranks=2)
def sequences_padded_until_all_are_finished(rank: int) -> None:
    for prompt in range(5):
        is_finished = False
        for position in range(8):
            logits = torch.ones(6)
            dist.all_reduce(logits)
            is_finished = is_finished or position >= 1 + rank + prompt % 2
            finished = torch.tensor([int(is_finished)])
            dist.all_reduce(finished, op=dist.ReduceOp.MIN)
            if finished.item():
                break
        dist.broadcast(torch.zeros(1), src=0)


@healthy()
def dropped_layers_that_still_reduce(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.ones(8)
    for _ in range(6):
        for _ in range(4):
            update = torch.ones(8) if torch.rand(1, generator=generator) > 0.3 else torch.zeros(8)
            dist.all_reduce(update)
            hidden = hidden + update / 3
        dist.broadcast(hidden, src=0)


@healthy(ranks=4)
def an_expert_without_tokens_that_exchanges_nothing(rank: int) -> None:
    for step in range(5):
        sends = [0, 0, 0, 0] if rank == 3 and step == 2 else [1 + step % 2] * 4
        takes = torch.empty(4, dtype=torch.long)
        dist.all_to_all_single(takes, torch.tensor(sends))
        got = torch.empty(int(takes.sum()), 4)
        dist.all_to_all_single(got, torch.ones(sum(sends), 4), takes.tolist(), sends)
        dist.all_reduce(torch.ones(4))


@healthy()
def gradients_accumulated_locally_under_shards(_: int) -> None:
    model = tower()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        parts = 2 + step % 2
        for part in range(parts):
            model.set_requires_gradient_sync(part == parts - 1)
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(1))


@healthy()
def accumulation_in_windows_that_shrink(rank: int) -> None:
    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in (4, 3, 2, 1, 4):
        for micro in range(window):
            context = contextlib.nullcontext() if micro == window - 1 else model.no_sync()
            with context:
                model(torch.ones(2 + rank, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# Work of one rank


@healthy()
def a_table_of_metrics_gathered_by_all_and_printed_by_rank_0(rank: int) -> None:
    for step in range(8):
        loss = torch.full((1,), 1.0 / (step + 1))
        dist.all_reduce(loss)
        if step % 4 == 0:
            rows: list[object] = [None] * 3
            dist.all_gather_object(rows, {"loss": loss.item(), "rank": "x" * rank * 9})
            if rank == 0:
                print(json.dumps(rows))


@healthy()
def vocabulary_words_counted_by_rank_0_while_the_others_wait_shortly(rank: int) -> None:
    for step in range(3):
        if rank == 0 and step == 1:
            counted: dict[str, int] = {}
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                for word in ("the cat sat " * 100).split():
                    counted[word] = counted.get(word, 0) + 1
        dist.barrier()


@healthy()
def long_local_work_of_all_before_the_first_collective(rank: int) -> None:
    until = time.monotonic() + 6 + rank * 0.2
    while time.monotonic() < until:
        torch.ones(128, 128) @ torch.ones(128, 128)
    dist.all_reduce(torch.ones(4))
    dist.barrier()


@healthy()
def a_file_written_by_all_for_long(rank: int) -> None:
    dist.barrier()
    with tempfile.TemporaryFile() as file:
        until = time.monotonic() + 6
        while time.monotonic() < until:
            file.seek(0)
            file.write(bytes(1 << 18))
            file.flush()
            time.sleep(0.02)
    dist.all_gather_object([None] * 3, rank)


@healthy()
def children_that_compile_for_all(_: int) -> None:
    dist.barrier()
    text = "import time\nend = time.monotonic() + 5\nwhile time.monotonic() < end: sum(range(500))"
    subprocess.run([sys.executable, "-S", "-c", text], check=True)
    dist.all_reduce(torch.ones(2))


@healthy()
def a_checkpoint_of_each_rank_and_a_marker_of_rank_0(rank: int) -> None:
    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        torch.save({"step": step}, Path(str(folder[0])) / f"{step}-{rank}.pt")
        dist.barrier()
        if rank == 0:
            (Path(str(folder[0])) / "latest").write_text(str(step))


@healthy()
def a_distributed_checkpoint_loaded_into_another_start(rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    folder: list[object] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    state = {"model": tower().state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=str(folder[0]))
    dcp.load(state, checkpoint_id=str(folder[0]))
    for _ in range(int(state["step"]), 6):
        dist.all_reduce(torch.ones(4))


# Arguments that may differ


@healthy()
def a_source_that_all_agree_on_by_the_gathered_losses(rank: int) -> None:
    for step in range(5):
        losses = [torch.empty(1) for _ in range(3)]
        dist.all_gather(losses, torch.tensor([float((rank * 2 + step) % 3)]))
        dist.broadcast(torch.ones(8), src=int(torch.cat(losses).argmin()))


@healthy()
def capacities_told_before_the_tokens(rank: int) -> None:
    for step in range(4):
        routed = [min(count, 2 + (rank == 1)) for count in (3, 2 + step % 2, 4)]
        takes = torch.empty(3, dtype=torch.long)
        dist.all_to_all_single(takes, torch.tensor(routed))
        dist.all_to_all_single(torch.empty(int(takes.sum()), 4), torch.ones(sum(routed), 4), takes.tolist(), routed)


# Groups


@healthy(ranks=4)
def groups_made_in_one_order_and_used_in_another(rank: int) -> None:
    members = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    for step in range(4):
        rows, columns = groups[rank // 2], groups[2 + rank % 2]
        for group in (rows, columns) if step % 2 else (columns, rows):
            dist.all_reduce(torch.ones(4), group=group)


@healthy()
def a_new_group_for_each_epoch_and_the_old_one_for_the_metrics(_: int) -> None:
    first = dist.new_group([0, 1, 2])
    for _ in range(3):
        current = dist.new_group([0, 1, 2])
        for _ in range(2):
            dist.all_reduce(torch.ones(4), group=current)
        dist.reduce(torch.ones(1), dst=0, group=first)
        dist.destroy_process_group(current)


@healthy(ranks=4)
def a_mesh_reduced_over_both_axes_in_one_order(_: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(5):
        for name in ("tp", "dp") if step != 3 else ("dp", "tp"):
            dist.all_reduce(torch.ones(4), group=mesh[name].get_group())


@healthy()
def a_short_limit_for_a_quick_group_beside_a_slow_phase(rank: int) -> None:
    quick = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=4))
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=quick)
    if rank == 0:
        time.sleep(1)
    dist.barrier()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))


# Handles


@healthy(check="handles")
def handles_awaited_in_reverse_at_the_end(_: int) -> None:
    layers = [torch.ones(64) for _ in range(3)]
    for _ in range(4):
        handles = [dist.all_reduce(gradient, async_op=True) for gradient in layers]
        for handle in reversed(handles):
            handle.wait()
        sum(float(gradient.sum()) for gradient in layers)


@healthy(check="handles")
def two_buffers_by_turns(_: int) -> None:
    shard, buffers = torch.ones(256), [torch.zeros(768), torch.zeros(768)]
    handle = dist.all_gather_into_tensor(buffers[0], shard, async_op=True)
    for step in range(4):
        handle.wait()
        handle = dist.all_gather_into_tensor(buffers[(step + 1) % 2], shard, async_op=True)
        float(buffers[step % 2].sum())
    handle.wait()


# Messages


@healthy()
def chunks_numbered_alike(rank: int) -> None:
    for _ in range(3):
        for tag in (0, 1, 3, 4):
            if rank == 0:
                dist.send(torch.ones(4), dst=1, tag=tag)
            elif rank == 1:
                dist.recv(torch.ones(4), src=0, tag=tag)
        dist.barrier()


@healthy()
def a_validation_pass_of_all_stages(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(8, 8), rank, 3, torch.get_default_device())
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    given = (torch.ones(8, 8),) if rank == 0 else ()
    wanted = {"target": torch.zeros(8, 8)} if rank == 2 else {}
    for step in range(4):
        schedule.step(*given, **wanted)
        if step == 2:
            with torch.no_grad():
                schedule.eval(*given, **wanted)
    dist.barrier()


@healthy()
def halos_of_a_grid_with_edges(rank: int) -> None:
    for _ in range(4):
        plan = []
        for peer in (rank - 1, rank + 1):
            if 0 <= peer < 3:
                plan.append(dist.P2POp(dist.isend, torch.ones(4), peer))
                plan.append(dist.P2POp(dist.irecv, torch.ones(4), peer))
        for work in dist.batch_isend_irecv(plan):
            work.wait()


# Ends, and other ways to meet


@healthy()
def a_preemption_notice_that_one_rank_shares(rank: int) -> None:
    told = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: told.set())
    for step in range(8):
        if rank == 2 and step == 3:
            signal.raise_signal(signal.SIGUSR1)
        stop = torch.tensor([int(told.is_set())])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        dist.all_reduce(torch.ones(4))


@healthy()
def an_uploader_thread_that_is_joined(_: int) -> None:
    uploads: queue.Queue[bytes | None] = queue.Queue()

    def upload() -> None:
        while uploads.get() is not None:
            time.sleep(0.05)

    thread = threading.Thread(target=upload)
    thread.start()
    for step in range(5):
        uploads.put(bytes(step))
        dist.all_reduce(torch.ones(4))
    uploads.put(None)
    thread.join()


@healthy()
def a_counter_in_the_store_that_all_raise(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    time.sleep(0.2 * rank)
    store.add("saved", 1)
    if rank == 0:
        while store.add("saved", 0) < 3:
            time.sleep(0.02)
    dist.all_reduce(torch.ones(4))


@healthy()
def remote_calls_beside_collectives(rank: int) -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    for step in range(3):
        if rank == 0:
            rpc.rpc_sync("worker1", pow, args=(2, step))
        dist.all_reduce(torch.ones(4))
    rpc.shutdown()


@healthy(joins=False)
def a_rank_that_joins_later_than_the_others(rank: int) -> None:
    time.sleep(0.7 * (rank == 1))
    dist.init_process_group(back_end())
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


@healthy()
def a_lock_shared_with_a_thread_that_is_quick(_: int) -> None:
    lock, over = threading.Lock(), threading.Event()

    def summarise() -> None:
        while not over.wait(0.01):
            with lock:
                sum(range(100))

    thread = threading.Thread(target=summarise)
    thread.start()
    for _ in range(30):
        with lock:
            counts = torch.ones(4)
        dist.all_reduce(counts)
    over.set()
    thread.join()


@healthy(ranks=4)
def rows_of_one_pair_that_take_a_little_longer_now_and_then(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(12):
        if step % 4 == rank:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
    dist.barrier()
