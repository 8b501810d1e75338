"""Scripts as those on call meet them at night: loops that end early, swallowed errors, two faults at once, late ranks.

Frozen before they were first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import contextlib
import ctypes
import datetime
import gc
import json
import os
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
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.faults.corpus import back_end, faulty

LONG_S = 10.0


def tower(width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Rows(Dataset[torch.Tensor]):
    """Rows of ones, as many as asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index % 3))


class Lines(IterableDataset[torch.Tensor]):
    """A stream of which each rank reads its own files."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):  # type: ignore[no-untyped-def]
        for index in range(self.count):
            yield torch.full((8,), float(index))


# Loops that one rank ends before the others, or of which it leaves out a round


@faulty("uneven-inputs", 2)
def an_epoch_of_fewer_rows_before_the_validation_loss(rank: int) -> None:
    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in DataLoader(Rows(16 if rank == 2 else 20), batch_size=4):
            optimizer.zero_grad()
            model(batch).sum().backward()  # here
            optimizer.step()
        validation = torch.ones(1)
        dist.all_reduce(validation)


@faulty("uneven-inputs", 0, ranks=4)
def a_scored_stream_that_ends_two_batches_early(rank: int) -> None:
    model = tower().eval()
    seen = []
    with torch.no_grad():
        for batch in DataLoader(Lines(6 if rank == 0 else 8), batch_size=1):
            scores = model(batch)
            everywhere = [torch.empty_like(scores) for _ in range(4)]
            dist.all_gather(everywhere, scores)  # here
            seen.append(torch.cat(everywhere).mean())
    dist.reduce(torch.stack(seen).mean(), dst=0)


@faulty("rank-skipped-collective", 1)
def patience_that_runs_out_on_the_local_loss(rank: int) -> None:
    weight = torch.ones(16, requires_grad=True)
    best, bad = float("inf"), 0
    for step in range(10):
        loss = weight.square().sum() * (step if rank == 1 else 1 / (step + 1))
        weight.grad = None
        loss.backward()
        dist.all_reduce(weight.grad)  # here
        best, bad = (float(loss), 0) if float(loss) < best else (best, bad + 1)
        if bad == 3:
            break
    summaries = [None] * 3
    dist.all_gather_object(summaries, {"best": best})


@faulty("rank-skipped-collective", 1)
def a_forward_that_fails_before_a_wrapped_backward(rank: int) -> None:
    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = torch.zeros(())
        try:
            batch = torch.ones(4, 7 if rank == 1 and step == 3 else 8)
            optimizer.zero_grad()
            loss = model(batch).sum()
            loss.backward()  # here
            optimizer.step()
        except RuntimeError as error:
            print("bad batch", error)
        logged = loss.detach().clone()
        dist.all_reduce(logged)


@faulty("rank-skipped-collective", 0, ranks=2)
def a_tensor_parallel_layer_passed_by_for_an_empty_batch(rank: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    block = parallelize_module(tower(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for step in range(6):
        batch = torch.ones(0 if rank == 0 and step == 4 else 3, 8)
        if len(batch):
            with torch.no_grad():
                block(batch)  # here
        counts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(counts, torch.ones(1))


@faulty("rank-skipped-collective", 2)
def a_sharded_round_left_out_before_a_regular_barrier(rank: int) -> None:
    model = tower()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 9):
        batch = torch.full((2, 8), float("nan") if rank == 2 and step == 5 else 1.0)
        if batch.isfinite().all():
            optimizer.zero_grad()
            model(batch).sum().backward()  # here
            optimizer.step()
        if step % 3 == 0:
            dist.barrier()


@faulty("rank-skipped-collective", 1, ranks=2)
def a_sequence_that_one_rank_finishes_sooner(rank: int) -> None:
    for prompt in range(5):
        tokens = torch.zeros(1, dtype=torch.long)
        for position in range(4):
            logits = torch.ones(6)
            dist.all_reduce(logits)  # here
            tokens = logits.argmax(keepdim=True) + position
            if rank == 1 and prompt == 3 and position == 1:
                break
        dist.broadcast(tokens, src=0)


@faulty("rank-skipped-collective", 2)
def a_layer_dropped_by_ones_own_seed(rank: int) -> None:
    kept = {step: [True] * 4 for step in range(6)}
    if rank == 2:
        kept[3][1] = False
    hidden = torch.ones(8)
    for step in range(6):
        for layer in range(4):
            if kept[step][layer]:
                dist.all_reduce(hidden)  # here
                hidden /= 3
        dist.broadcast(hidden, src=0)


@faulty("rank-skipped-collective", 3, ranks=4)
def an_expert_without_tokens_that_returns_early(rank: int) -> None:
    def experts(tokens: torch.Tensor) -> torch.Tensor:
        if not len(tokens):
            return tokens
        counts = torch.empty(4, dtype=torch.long)
        dist.all_to_all_single(counts, torch.full((4,), len(tokens) // 4))  # here
        return tokens

    for step in range(5):
        experts(torch.ones(0 if rank == 3 and step == 2 else 8, 4))
        dist.all_reduce(torch.ones(4))


@faulty("rank-skipped-collective", 1)
def gradients_not_synchronised_where_the_flag_was_left(rank: int) -> None:
    model = tower()
    fully_shard(model)
    for step in range(5):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1 and not (rank == 1 and step == 3))
            model(torch.ones(2, 8)).sum().backward()  # here
        for parameter in model.parameters():
            parameter.grad = None
        dist.all_reduce(torch.ones(1))


# One rank does more, or at another iteration


@faulty("collective-order-mismatch", 0)
def a_table_of_metrics_gathered_where_rank_0_prints(rank: int) -> None:
    for step in range(8):
        loss = torch.full((1,), 1.0 / (step + 1))
        dist.all_reduce(loss)
        if rank == 0 and step == 4:
            rows: list[object] = [None] * 3
            dist.all_gather_object(rows, {"loss": loss.item()})  # here
            print(json.dumps(rows))


@faulty("step-mismatch", 1)
def a_checkpoint_of_the_step_before_on_one_rank(rank: int) -> None:
    first = 2 if rank == 1 else 3
    for _ in range(first, 8):
        dist.all_reduce(torch.ones(6))
    total = torch.ones(6)
    dist.all_reduce(total)  # here


@faulty("step-mismatch", 2, ranks=4)
def a_counter_of_microbatches_that_survived_a_restart(rank: int) -> None:
    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    micro = 1 if rank == 2 else 0
    for _ in range(12):
        micro += 1
        synchronised = contextlib.nullcontext() if micro % 4 == 0 else model.no_sync()
        with synchronised:
            model(torch.ones(2, 8)).sum().backward()  # here
        if micro % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


@faulty("collective-order-mismatch", 1)
def a_barrier_that_a_finally_block_makes(rank: int) -> None:
    for step in range(6):
        try:
            if rank == 1 and step == 4:
                raise OSError("stale file handle")
            dist.all_reduce(torch.ones(4))
        finally:
            if sys.exc_info()[0] is not None:
                dist.barrier()  # here


# Arguments


@faulty("root-mismatch", 2)
def each_rank_takes_its_own_best_for_the_source(rank: int) -> None:
    for step in range(5):
        losses = torch.tensor([3.0, 1.0, 2.0 if rank != 2 or step != 3 else 0.5])
        best = int(losses.argmin())
        dist.broadcast(torch.ones(8), src=best)  # here
        dist.all_reduce(torch.ones(3))


@faulty("split-size-mismatch", 1)
def a_capacity_applied_after_the_counts_were_sent(rank: int) -> None:
    for step in range(4):
        routed = [3, 2, 4]
        counts = torch.tensor(routed)
        expected = torch.empty_like(counts)
        dist.all_to_all_single(expected, counts)
        if rank == 1 and step == 2:
            routed = [min(count, 2) for count in routed]
        takes = expected.tolist()
        dist.all_to_all_single(torch.empty(sum(takes), 4), torch.ones(sum(routed), 4), takes, routed)  # here


@faulty("dtype-mismatch", 1)
def halves_of_two_kinds_in_one_reduction(rank: int) -> None:
    for step in range(4):
        kind = torch.bfloat16 if rank == 1 and step >= 2 else torch.float16
        bucket = torch.ones(32, dtype=kind)
        dist.all_reduce(bucket)  # here


@faulty("reduce-op-mismatch", 0)
def a_flag_agreed_by_minimum_on_rank_0(rank: int) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
        done = torch.tensor([0.0])
        dist.all_reduce(done, op=dist.ReduceOp.MIN if rank == 0 else dist.ReduceOp.MAX)  # here


# Groups


@faulty("group-creation-mismatch", 3, ranks=4)
def own_group_first(rank: int) -> None:
    members = [[0, 1], [2, 3]]
    if rank == 3:
        members.reverse()
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in members}  # here
    dist.all_reduce(torch.ones(4), group=groups[(0, 1) if rank < 2 else (2, 3)])
    dist.barrier()


@faulty("group-creation-mismatch", 2, ranks=4)
def a_node_computed_with_another_width(rank: int) -> None:
    width = 3 if rank == 2 else 2
    node = dist.new_group(list(range(width)))  # here
    if rank < 2:
        dist.all_reduce(torch.ones(4), group=node)
    dist.barrier()


@faulty("wrong-group", 2)
def the_group_of_the_epoch_before(rank: int) -> None:
    groups = []
    for epoch in range(4):
        groups.append(dist.new_group([0, 1, 2]))
        current = groups[-2] if rank == 2 and epoch == 2 else groups[-1]
        for _ in range(2):
            dist.all_reduce(torch.ones(4), group=current)  # here


@faulty("group-order-inversion", 1, ranks=4)
def the_world_before_the_pair_where_the_bucket_was_full(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    order = [mesh["tp"].get_group(), dist.group.WORLD]
    for step in range(5):
        for group in reversed(order) if rank == 1 and step == 3 else order:
            dist.all_reduce(torch.ones(4), group=group)  # here


# Handles


@faulty("unwaited-async", 0, 1, 2)
def only_the_last_handle_is_awaited(_: int) -> None:
    layers = [torch.ones(64) for _ in range(3)]
    for _ in range(4):
        handle = None
        for gradient in layers:
            handle = dist.all_reduce(gradient, async_op=True)  # here
        assert handle is not None
        handle.wait()


@faulty("unwaited-async", 2, check="handles")
def weights_read_while_they_are_gathered_on_one_rank(rank: int) -> None:
    shard, whole = torch.ones(256), torch.zeros(768)
    for step in range(4):
        handle = dist.all_gather_into_tensor(whole, shard, async_op=True)
        if rank == 2 and step == 2:
            print(float(whole.sum()))  # here
        handle.wait()
        float(whole.sum())


# Messages


@faulty("p2p-deadlock-cycle", 1, 2, ranks=4)
def a_warm_up_that_is_one_too_short(rank: int) -> None:
    value = torch.ones(16)
    for step in range(3):
        for _ in range(2):
            if rank == 1 and step == 2:
                dist.recv(value, src=2)  # here
            if rank > 0:
                dist.recv(value, src=rank - 1)  # here
            if rank < 3:
                dist.send(value, dst=rank + 1)
        for _ in range(2):
            if rank < 3 and not (rank == 1 and step == 2):
                dist.recv(value, src=rank + 1)
            if rank > 0:
                dist.send(value, dst=rank - 1)


@faulty("p2p-tag-mismatch", 1)
def chunks_numbered_by_another_count_of_stages(rank: int) -> None:
    for step in range(3):
        stages = 2 if rank == 1 and step == 1 else 3
        for chunk in range(2):
            for micro in range(2):
                tag = chunk * stages + micro
                if rank == 0:
                    dist.send(torch.ones(4), dst=1, tag=tag)
                elif rank == 1:
                    dist.recv(torch.ones(4), src=0, tag=tag)  # here
        dist.barrier()


@faulty("pipeline-schedule-mismatch", 2)
def a_validation_pass_that_the_last_stage_leaves_out(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(8, 8), rank, 3, torch.get_default_device())
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    given = (torch.ones(8, 8),) if rank == 0 else ()
    wanted = {"target": torch.zeros(8, 8)} if rank == 2 else {}
    for step in range(5):
        schedule.step(*given, **wanted)
        if step == 2 and rank != 2:
            with torch.no_grad():
                schedule.eval(*given)
    dist.barrier()


@faulty("p2p-unmatched", 0)
def a_halo_that_one_edge_does_not_send(rank: int) -> None:
    for step in range(4):
        plan = []
        if rank > 0:
            plan += [dist.P2POp(dist.isend, torch.ones(4), rank - 1), dist.P2POp(dist.irecv, torch.ones(4), rank - 1)]
        if rank < 2:
            plan += [dist.P2POp(dist.irecv, torch.ones(4), rank + 1)]
            if not (rank == 0 and step == 2):
                plan += [dist.P2POp(dist.isend, torch.ones(4), rank + 1)]
        for work in dist.batch_isend_irecv(plan):  # here
            work.wait()


# Two faults at once


@faulty("rank-stuck", 0, ranks=4, also=(("rank-skipped-collective", 2),))
def a_queue_in_one_pair_and_a_skip_in_the_other(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    jobs: queue.Queue[int] = queue.Queue()
    for step in range(6):
        if rank == 0 and step == 4:
            jobs.get()
        if not (rank == 2 and step == 4):
            dist.all_reduce(torch.ones(8), group=pairs[rank // 2])
        dist.barrier()


@faulty("p2p-deadlock-cycle", 2, 3, ranks=4, also=(("rank-frozen", 1),))
def a_frozen_rank_beside_two_that_wait_for_each_other(rank: int) -> None:
    pair = dist.new_group([0, 1])
    for step in range(6):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank < 2:
            dist.all_reduce(torch.ones(8), group=pair)
        else:
            ahead = rank == 2 or step == 3
            peer = 5 - rank
            if ahead:
                dist.recv(torch.ones(4), src=peer)
                dist.send(torch.ones(4), dst=peer)
            else:
                dist.send(torch.ones(4), dst=peer)
                dist.recv(torch.ones(4), src=peer)
    dist.barrier()


# Ranks that are gone, stand still, or are late


@faulty("rank-exited", 2)
def a_preemption_notice_that_one_rank_obeys_alone(rank: int) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    for step in range(6):
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        dist.all_reduce(torch.ones(4))


@faulty("rank-killed", 1, ranks=4)
def killed_for_memory_while_experts_exchange(rank: int) -> None:
    for step in range(5):
        if rank == 1 and step == 3:
            subprocess.run(["kill", "-9", str(os.getpid())], check=False)
            time.sleep(30)
        dist.all_to_all_single(torch.empty(8), torch.ones(8))


@faulty("rank-killed", 0)
def a_kernel_that_writes_past_its_buffer(rank: int) -> None:
    model = DistributedDataParallel(tower())
    for step in range(5):
        if rank == 0 and step == 2:
            ctypes.memset(16, 0, 4096)  # here
        model(torch.ones(2, 8)).sum().backward()


@faulty("rank-frozen", 0, ranks=4)
def stopped_while_it_reads_its_rows(rank: int) -> None:
    loader = iter(DataLoader(Rows(40), batch_size=4))
    for step in range(8):
        batch = next(loader)
        if rank == 0 and step == 5:
            signal.raise_signal(signal.SIGSTOP)  # here
        dist.all_reduce(batch.sum())


@faulty("rank-crashed", 1)
def an_uploader_thread_that_outlives_its_trainer(rank: int) -> None:
    uploads: queue.Queue[bytes] = queue.Queue()
    if rank == 1:
        threading.Thread(target=uploads.get).start()
    for step in range(5):
        if rank == 1 and step == 3:
            raise RuntimeError("shape of the checkpoint does not fit")  # here
        dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 0)
def a_counter_in_the_store_that_one_rank_never_raises(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank != 2:
        store.add("saved", 1)
    if rank == 0:
        while store.add("saved", 0) < 3:
            time.sleep(0.1)  # here
    dist.all_reduce(torch.ones(4))


@faulty("rank-stuck", 0)
def a_remote_call_that_waits_for_a_collective_of_its_caller(rank: int) -> None:
    import torch.distributed.rpc as rpc

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    dist.barrier()
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(1000,))  # here
    dist.all_reduce(torch.ones(4))
    rpc.shutdown()


@faulty("rank-never-joined", 1, joins=False)
def a_download_lock_before_the_rendezvous(rank: int) -> None:
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # here
    dist.init_process_group(back_end())


@faulty("slow-rank", 1)
def a_statistics_thread_that_holds_the_lock_of_the_trainer(rank: int) -> None:
    lock = threading.Lock()
    over = threading.Event()

    def summarise() -> None:
        while not over.is_set():
            with lock:
                time.sleep(0.04)
            time.sleep(0.005)

    if rank == 1:
        threading.Thread(target=summarise, daemon=True).start()
    for _ in range(30):
        with lock:  # here
            counts = torch.ones(4)
        dist.all_reduce(counts)
    over.set()


@faulty("slow-rank", 2, ranks=4)
def a_decoder_that_is_slow_on_one_host(rank: int) -> None:
    class Images(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if rank == 2:
                time.sleep(0.03)  # here
            return torch.ones(8)

    model = DistributedDataParallel(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Images(60), batch_size=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


@faulty("slow-rank", 0)
def a_heap_that_is_collected_by_hand(rank: int) -> None:
    heap = [{"row": [i]} for i in range(300_000)] if rank == 0 else []
    for _ in range(25):
        gc.collect()  # here
        dist.all_reduce(torch.ones(4))
    assert len(heap) >= 0


@faulty("long-operation", 0)
def a_held_out_set_scored_by_rank_0(rank: int) -> None:
    model = tower(64)
    for step in range(4):
        if rank == 0 and step == 2:
            until = time.monotonic() + LONG_S
            with torch.no_grad():
                while time.monotonic() < until:
                    model(torch.ones(512, 64))  # here
        dist.barrier()


@faulty("long-operation", 1)
def a_corpus_tokenised_by_one_rank(rank: int) -> None:
    for step in range(4):
        if rank == 1 and step == 1:
            until = time.monotonic() + LONG_S
            vocabulary: dict[str, int] = {}
            while time.monotonic() < until:
                for word in ("the cat sat on the mat " * 100).split():
                    vocabulary[word] = vocabulary.get(word, 0) + 1  # here
        dist.all_reduce(torch.ones(4))


@faulty("long-operation", 2)
def shards_written_one_by_one_before_the_barrier(rank: int) -> None:
    folder = Path(tempfile.mkdtemp())
    for step in range(4):
        if rank == 2 and step == 2:
            until = time.monotonic() + LONG_S
            number = 0
            while time.monotonic() < until:
                torch.save(torch.ones(1 << 16), folder / f"{number % 4}.pt")  # here
                number += 1
        dist.barrier()


@faulty("rank-stuck", 2)
def a_monitored_barrier_beside_a_lock(rank: int) -> None:
    lock = threading.Lock()
    for step in range(4):
        if rank == 2 and step == 2:
            lock.acquire()
            lock.acquire()  # here
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))


@faulty("p2p-deadlock-cycle", 2, 3, ranks=4)  # gloo's sends wait for the receive
def a_schedule_of_one_forward_and_one_backward_by_hand(rank: int) -> None:
    value, micros = torch.ones(16), 6
    ahead = min(3 - rank, micros)

    def forward() -> None:
        if rank > 0:
            dist.recv(value, src=rank - 1)
        if rank < 3:
            dist.send(value, dst=rank + 1)  # here

    def backward() -> None:
        if rank < 3:
            dist.recv(value, src=rank + 1)
        if rank > 0:
            dist.send(value, dst=rank - 1)  # here

    for _ in range(2):
        for _ in range(ahead):
            forward()
        for _ in range(micros - ahead):
            forward()
            backward()
        for _ in range(ahead):
            backward()
