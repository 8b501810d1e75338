"""Jobs that waited in the queue of the shared cluster: faulty and sound ones, labelled before they ran.

Written after rules had been mended for those of `shared_cluster_*.py`.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.corpus import faulty, healthy


@faulty("step-mismatch", 2)
def tables_of_settings_of_which_one_has_a_key_more(rank: int) -> None:
    settings = {"width": 8.0, "rate": 0.1, "seed": 3.0}
    if rank == 2:
        settings["warmup"] = 100.0
    for key in sorted(settings):
        dist.broadcast(torch.tensor([settings[key]]), src=0)  # here
    model = nn.Linear(8, 8)
    for _ in range(4):
        model(torch.randn(2, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


@faulty("p2p-unmatched", 1)
def an_activation_sent_back_where_it_came_from(rank: int) -> None:
    layer = nn.Linear(6, 6)
    for step in range(5):
        x = torch.randn(3, 6)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        y = layer(x).detach()
        if rank < 2:
            target = rank + 1 if not (rank == 1 and step == 3) else rank - 1
            dist.send(y, dst=target)  # here
        dist.barrier()


@faulty("rank-stuck", 0)
def a_marker_whose_writer_is_not_of_this_job(rank: int) -> None:
    folder = Path(tempfile.gettempdir())
    model = nn.Linear(6, 6)
    for epoch in range(4):
        model(torch.randn(3, 6)).sum().backward()
        dist.all_reduce(model.weight.grad)
        if rank == 0 and epoch == 2:
            while not (folder / f"preprocessed-{os.getpid()}.done").exists():
                time.sleep(0.2)  # here
        dist.barrier()


@faulty("unwaited-async", 3, ranks=4)
def a_flag_that_one_rank_reads_before_it_is_there(rank: int) -> None:
    flag = torch.zeros(1 << 12)
    total = torch.zeros(4)
    for step in range(6):
        flag.fill_(float(step) if rank == 0 else -1.0)
        work = dist.broadcast(flag, src=0, async_op=True)  # here
        if rank != 3:
            work.wait()
        if flag[0] > 100:
            break
        dist.all_reduce(total)


@faulty("reduce-op-mismatch", 1, ranks=4)
def a_metric_of_which_one_rank_takes_the_largest(rank: int) -> None:
    kind = json.loads('{"reduce": "max"}' if rank == 1 else '{"reduce": "sum"}')["reduce"]
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    for epoch in range(4):
        correct = torch.tensor([float(epoch + rank)])
        dist.all_reduce(correct, op=operations[kind])  # here
        dist.barrier()


@faulty("rank-frozen", 2, ranks=5)
def a_node_whose_job_was_suspended_by_hand(rank: int) -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        model(torch.randn(3, 6)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)  # here


@faulty("group-creation-mismatch", 2, ranks=4)
def pairs_made_in_the_order_of_a_table_of_hosts(rank: int) -> None:
    hosts = {"a": [0, 1, 2], "b": [1, 2, 3]}
    order = ["b", "a"] if rank == 2 else ["a", "b"]
    groups = {}
    for host in order:
        groups[host] = dist.new_group(hosts[host])  # here
    for host, members in hosts.items():
        if rank in members:
            dist.all_reduce(torch.ones(4), group=groups[host])


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def halos_that_everybody_awaits_before_sending_theirs(rank: int) -> None:
    field = torch.full((16,), float(rank))
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        left, right = (rank - 1) % 4, (rank + 1) % 4
        ghost = torch.empty(4)
        if step < 2 and rank % 2:
            dist.recv(ghost, src=left)
            dist.send(field[-4:].contiguous(), dst=right)
        elif step < 2:
            dist.send(field[-4:].contiguous(), dst=right)
            dist.recv(ghost, src=left)
        else:
            dist.recv(ghost, src=left)  # here
            dist.send(field[-4:].contiguous(), dst=right)


@faulty("uneven-inputs", 1)
def a_validation_set_that_does_not_divide_evenly(rank: int) -> None:
    train = DataLoader(TensorDataset(torch.randn(12, 6)), batch_size=4)
    validation = DataLoader(TensorDataset(torch.randn(6 if rank == 1 else 8, 6)), batch_size=2)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for (batch,) in train:
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for (batch,) in validation:  # here
                error = model(batch).square().mean()
                dist.all_reduce(error)  # here


@faulty("root-mismatch", 0, ranks=6, also=(("rank-skipped-collective", 4),))
def two_teams_with_a_fault_each(rank: int) -> None:
    teams = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    team, first = teams[rank // 3], 3 * (rank // 3)
    weights = torch.zeros(8)
    for step in range(6):
        dist.all_reduce(weights, group=team)
        source = first + 1 if rank == 0 and step == 4 else first
        if rank == 4 and step == 4:
            continue
        dist.broadcast(weights, src=source, group=team)  # here
        dist.barrier(group=team)


@faulty("slow-rank", 1)
def a_rank_whose_samples_lie_on_a_slow_disk(rank: int) -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(25):
        if rank == 1:
            time.sleep(0.15)
        model(torch.randn(4, 16)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("collective-order-mismatch", 2)
def a_norm_summed_where_the_gradient_is_large(rank: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def clip() -> None:
        local = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm() ** 2
        if local > 1e4:
            dist.all_reduce(local)  # here
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for step in range(6):
        scale = 1e4 if rank == 2 and step == 3 else 0.01
        (scale * model(torch.ones(4, 8)).sum()).backward()
        clip()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=4)
def a_step_that_all_leave_out_where_one_loss_is_not_finite(rank: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        batch = torch.full((2, 8), float("nan") if rank == 1 and step in (3, 5) else 1.0)
        loss = model(batch).sum()
        is_bad = torch.tensor([0.0 if torch.isfinite(loss) else 1.0])
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if is_bad.item():
            optimizer.zero_grad()
            continue
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@healthy(ranks=5)
def gossip_in_which_one_of_five_rests(rank: int) -> None:
    weights = torch.full((8,), float(rank))
    for turn in range(10):
        resting = turn % 5
        others = [r for r in range(5) if r != resting]
        if rank == resting:
            continue
        at = others.index(rank)
        partner = others[at ^ 1]
        theirs = torch.empty(8)
        if rank < partner:
            dist.send(weights, dst=partner, tag=turn)
            dist.recv(theirs, src=partner, tag=turn)
        else:
            dist.recv(theirs, src=partner, tag=turn)
            dist.send(weights, dst=partner, tag=turn)
        weights = (weights + theirs) / 2
    dist.barrier()


@healthy()
def a_pipeline_whose_epochs_grow(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    device = torch.device(torch.get_default_device().type)
    stage = PipelineStage(nn.Linear(6, 6), rank, 3, device)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean())
    for epoch in range(3):
        for _ in range(2 + epoch):
            if rank == 0:
                schedule.step(torch.ones(4, 6))
            elif rank == 1:
                schedule.step()
            else:
                schedule.step(target=torch.zeros(4, 6))
        dist.barrier()


@healthy(ranks=4)
def data_that_the_first_rank_fetches_before_the_others(rank: int) -> None:
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = Path(folder[0], "tokens.pt")
    for _ in range(2):
        if rank != 0:
            dist.barrier()
        if not path.exists():
            time.sleep(0.3)
            torch.save(torch.arange(64), path)
        if rank == 0:
            dist.barrier()
        tokens = torch.load(path)
        dist.all_reduce(tokens)


@healthy()
def a_second_group_after_the_first_was_taken_down(rank: int) -> None:
    total = torch.zeros(4)
    for attempt in range(2):
        group = dist.new_group([0, 1, 2])
        for _ in range(3 + attempt):
            dist.all_reduce(total, group=group)
        dist.destroy_process_group(group)
        if rank == 1:
            time.sleep(0.2)
    dist.barrier()


@healthy(ranks=6)
def sums_within_nodes_and_then_between_their_leaders(rank: int) -> None:
    nodes = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    leaders = dist.new_group([0, 3])
    leader = rank // 3 * 3
    for step in range(6):
        gradient = torch.full((8,), float(rank + step))
        dist.reduce(gradient, dst=leader, group=nodes[rank // 3])
        if rank == leader:
            work = dist.all_reduce(gradient, group=leaders, async_op=True)
            time.sleep(0.01)
            work.wait()
        dist.broadcast(gradient, src=leader, group=nodes[rank // 3])
