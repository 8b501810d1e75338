"""What colleagues sent in at the end of a quarter: roles, groups, messages and handles, each beside one that is right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.distributed.device_mesh import init_device_mesh

from tests.faults.corpus import faulty, healthy

# Reinforcement learning: actor, critic, reward.


@faulty("wrong-group", 1, ranks=4)
def a_divergence_averaged_over_the_actors_alone(rank: int) -> None:
    actors, critics = dist.new_group([0, 1]), dist.new_group([2, 3])
    team = actors if rank < 2 else critics
    for rollout in range(6):
        gradient = torch.ones(6)
        dist.all_reduce(gradient, group=team)
        divergence = torch.ones(2)
        group = team if rank == 1 and rollout == 3 else dist.group.WORLD
        dist.all_reduce(divergence, group=group)  # here


@faulty("root-mismatch", 2, ranks=4)
def rewards_scattered_from_the_wrong_role(rank: int) -> None:
    reward_model = 3
    for rollout in range(6):
        scores = torch.zeros(2)
        source = 0 if rank == 2 and rollout == 3 else reward_model
        parts = [torch.full((2,), float(r)) for r in range(4)] if rank == source else None
        dist.scatter(scores, parts, src=source)  # here
        dist.all_reduce(scores)


@faulty("rank-skipped-collective", 0, ranks=4)
def an_actor_without_rollouts_that_trains_no_further(rank: int) -> None:
    actors = dist.new_group([0, 1])
    policy = nn.Linear(3, 2)
    rewards = [[1.0], [0.5, 0.5], [], [1.0], [0.25]]

    def improve(episode: list[float]) -> None:
        if rank == 0 and not episode:
            return  # here
        policy.zero_grad()
        policy(torch.ones(max(1, len(episode)), 3)).sum().backward()
        dist.all_reduce(policy.weight.grad, group=actors)

    for episode in rewards:
        if rank < 2:
            improve(episode)
        weights = policy.weight.detach().clone()
        dist.broadcast(weights, src=1)


@healthy(ranks=4)
def actors_critics_and_a_reward_model(rank: int) -> None:
    actors, critics = dist.new_group([0, 1]), dist.new_group([2, 3])
    policy, value = nn.Linear(3, 2), nn.Linear(3, 1)
    for rollout in range(5):
        lengths: list[Any] = [None] * 4
        dist.all_gather_object(lengths, [rollout] * (rank + 1))
        model, group = (policy, actors) if rank < 2 else (value, critics)
        model.zero_grad()
        model(torch.ones(len(lengths[rank]), 3)).sum().backward()
        dist.all_reduce(model.weight.grad, group=group)
        if rank == 3:
            dist.send(torch.ones(2), dst=0)
        elif rank == 0:
            dist.recv(torch.zeros(2), src=3)
        weights = policy.weight.detach().clone()
        dist.broadcast(weights, src=0)


# Experts.


def dispatch(tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    output = tokens.new_empty(sum(received), tokens.shape[1])
    dist.all_to_all_single(output, tokens, received, sent)
    return output


def exchanged(sent: list[int]) -> list[int]:
    counts = torch.tensor(sent)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    return [int(count) for count in received]


@faulty("split-size-mismatch", 2)
def tokens_sent_by_the_routing_of_the_step_before(rank: int) -> None:
    old = [2, 2, 2]
    for step in range(6):
        new = [1 + (rank + step) % 3, 2, 1 + step % 2]
        received = exchanged(new)
        sent = old if rank == 2 and step == 4 else new
        output = torch.empty(sum(received), 3)
        dist.all_to_all_single(output, torch.ones(sum(sent), 3), received, sent)  # here
        old = [count + 1 for count in new]


@faulty("split-size-mismatch", 1)
def a_token_dropped_over_capacity_after_the_counts(rank: int) -> None:
    for step in range(6):
        sent = [4, 2, 3] if rank == 1 else [2, 2, 2]
        received = exchanged(sent)
        if rank == 1 and step == 3:
            sent[0] -= 1
        output = torch.empty(sum(received), 3)
        dist.all_to_all_single(output, torch.ones(sum(sent), 3), received, sent)  # here


@healthy(ranks=4)
def tokens_routed_unevenly(rank: int) -> None:
    for step in range(6):
        sent = [(rank + step + expert) % 3 for expert in range(4)]
        received = exchanged(sent)
        tokens = dispatch(torch.ones(sum(sent), 3), sent, received)
        dispatch(tokens, received, sent)


# A parameter server.

SERVED = threading.Event()


def slow_table(key: int) -> torch.Tensor:
    if key == 7:
        SERVED.wait()
    return torch.full((2,), float(key))


@faulty("rank-stuck", 2)
def a_lookup_that_the_server_never_answers(rank: int) -> None:
    workers = dist.new_group([1, 2])
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=3)
    if rank > 0:
        for key in range(5):
            asked = 7 if rank == 2 and key == 3 else key
            row = rpc.rpc_sync("node0", slow_table, args=(asked,), timeout=0)  # here
            dist.all_reduce(row, group=workers)
    rpc.shutdown()


@healthy()
def lookups_that_the_server_answers(rank: int) -> None:
    workers = dist.new_group([1, 2])
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=3)
    if rank > 0:
        for key in range(5):
            row = rpc.rpc_sync("node0", slow_table, args=(key,))
            dist.all_reduce(row, group=workers)
    rpc.shutdown()


# Groups and meshes.


@faulty("group-creation-mismatch", 2)
def a_group_made_by_its_members_alone(rank: int) -> None:
    dist.barrier()
    if rank < 2:
        pair = dist.new_group([0, 1])  # here
        dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()


@faulty("group-creation-mismatch", 3, ranks=4)
def a_mesh_of_another_shape(rank: int) -> None:
    shape = (4, 1) if rank == 3 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))  # here
    dist.all_reduce(torch.ones(2), group=mesh.get_group("dp"))
    dist.all_reduce(torch.ones(2), group=mesh.get_group("tp"))


@healthy(ranks=8)
def a_mesh_of_three_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    for step in range(4):
        for name in ("tp", "dp"):
            dist.all_reduce(torch.ones(2 + step), group=mesh.get_group(name))
        pipe = mesh.get_group("pp")
        peer = (rank + 4) % 8
        if rank < 4:
            dist.send(torch.ones(1), peer, group=pipe)
        else:
            dist.recv(torch.ones(1), peer, group=pipe)


@healthy(ranks=4)
def groups_made_by_all_and_used_by_some(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    every_other = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(5):
        if step % 2 or rank < 2:
            dist.all_reduce(torch.ones(1), group=pairs[rank // 2])
        dist.all_gather_into_tensor(torch.zeros(4), torch.ones(2), group=every_other[rank % 2])


@faulty("rank-skipped-collective", 3, ranks=4)
def a_spare_rank_that_does_not_evaluate(rank: int) -> None:
    model = nn.Linear(2, 1)
    for epoch in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(model.weight.grad)
        if epoch == 1 and rank != 3:  # here
            hits = torch.ones(1)
            dist.all_reduce(hits)  # here
            dist.barrier()


@healthy(ranks=4)
def an_evaluation_on_a_group_of_some_ranks(rank: int) -> None:
    evaluators = dist.new_group([0, 2])
    model = nn.Linear(2, 1)
    for _epoch in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(model.weight.grad)
        if rank in (0, 2):
            dist.all_reduce(torch.ones(1), group=evaluators)
    dist.barrier()


# Arguments.


@faulty("reduce-op-mismatch", 1)
def a_shard_of_gradients_reduced_by_maximum(rank: int) -> None:
    for step in range(6):
        shard = torch.zeros(2)
        op = dist.ReduceOp.MAX if rank == 1 and step == 3 else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(shard, torch.ones(6), op=op)  # here
        dist.all_gather_into_tensor(torch.zeros(6), shard)


@healthy()
def shards_of_gradients_reduced_alike(_rank: int) -> None:
    for step in range(6):
        shard = torch.zeros(2)
        op = dist.ReduceOp.MAX if step == 3 else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(shard, torch.ones(6), op=op)
        dist.all_gather_into_tensor(torch.zeros(6), shard)


@faulty("root-mismatch", 3, ranks=4)
def predictions_gathered_at_oneself(rank: int) -> None:
    for epoch in range(4):
        dist.barrier()
        collector = 3 if rank == 3 and epoch == 2 else 0
        parts = [torch.zeros(2) for _ in range(4)] if rank == collector else None
        dist.gather(torch.ones(2), parts, dst=collector)  # here


@healthy(ranks=4)
def predictions_gathered_at_one_after_another(rank: int) -> None:
    for epoch in range(4):
        dist.barrier()
        parts = [torch.zeros(2) for _ in range(4)] if rank == epoch else None
        dist.gather(torch.ones(2), parts, dst=epoch)


@faulty("dtype-mismatch", 2)
def statistics_that_numpy_made_double(rank: int) -> None:
    import numpy

    for step in range(6):
        values = numpy.ones(4)
        if rank != 2 or step != 4:
            values = values.astype(numpy.float32)
        statistics = torch.from_numpy(values).to(torch.get_default_device())
        dist.all_reduce(statistics)  # here


@faulty("size-mismatch", 1)
def objects_received_into_a_shorter_list(rank: int) -> None:
    for step in range(4):
        settings: list[Any] = [step, "lr", 0.1] if rank == 0 else [None, None, None]
        if rank == 1 and step == 2:
            settings.pop()
        dist.broadcast_object_list(settings, src=0)  # here


@healthy()
def trials_that_rank_0_draws(rank: int) -> None:
    torch.manual_seed(rank)
    for _trial in range(3):
        drawn: list[Any] = [{"width": int(torch.randint(2, 9, (1,)))}] if rank == 0 else [None]
        dist.broadcast_object_list(drawn, src=0)
        model = nn.Linear(drawn[0]["width"], 1)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


@faulty("size-mismatch", 1)
def trials_that_every_rank_draws(rank: int) -> None:
    widths = [[4, 6, 8], [4, 7, 8], [4, 6, 8]][rank]
    for width in widths:
        model = nn.Linear(width, width)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)  # here


@faulty("rank-skipped-collective", 2)
def a_statistic_not_given_for_want_of_values(rank: int) -> None:
    def share(values: list[float]) -> list[Any] | None:
        if not values:
            return None  # here
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, values)
        return everyone

    for step in range(6):
        dist.all_reduce(torch.ones(3))
        share([] if rank == 2 and step == 3 else [1.0] * step + [2.0])


@healthy()
def a_statistic_given_without_values(rank: int) -> None:
    for step in range(6):
        dist.all_reduce(torch.ones(3))
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, [] if rank == 2 and step == 3 else [1.0] * step)


# Messages.


@faulty("p2p-unmatched", 3, ranks=4)
def a_ring_with_a_wrong_neighbour(rank: int) -> None:
    for step in range(5):
        following, previous = (rank + 1) % 4, (rank - 1) % 4
        if rank == 3 and step == 3:
            previous = (rank - 2) % 4
        block = torch.ones(3)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, following),
                dist.P2POp(dist.irecv, torch.zeros(3), previous),
            ]
        )
        for work in works:
            work.wait()  # here


@healthy(ranks=4)
def a_ring_of_blocks(rank: int) -> None:
    block = torch.full((3,), float(rank))
    for _step in range(5):
        arriving = torch.zeros(3)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, (rank + 1) % 4),
                dist.P2POp(dist.irecv, arriving, (rank - 1) % 4),
            ]
        )
        for work in works:
            work.wait()
        block = arriving


@faulty("p2p-tag-mismatch", 2, ranks=4)
def a_message_awaited_under_the_next_tag(rank: int) -> None:
    for step in range(5):
        sending = dist.isend(torch.ones(2), (rank + 1) % 4, tag=step)
        tag = step + 1 if rank == 2 and step == 3 else step
        receiving = dist.irecv(torch.zeros(2), (rank - 1) % 4, tag=tag)  # here
        receiving.wait()
        sending.wait()


@faulty("p2p-size-mismatch", 1)
def halos_of_another_width_on_one_rank(rank: int) -> None:
    halo = 3 if rank == 1 else 2
    field = torch.ones(10)
    for _sweep in range(4):
        below, above = torch.zeros(halo), torch.zeros(halo)
        works = []
        if rank > 0:
            works += [dist.isend(field[:halo].clone(), rank - 1), dist.irecv(below, rank - 1)]  # here
        if rank < 2:
            works += [dist.isend(field[-halo:].clone(), rank + 1), dist.irecv(above, rank + 1)]  # here
        for work in works:
            work.wait()


@healthy()
def halos_of_one_width(rank: int) -> None:
    field = torch.ones(10)
    for sweep in range(4):
        halo = 1 + sweep % 2
        below, above = torch.zeros(halo), torch.zeros(halo)
        works = []
        if rank > 0:
            works += [dist.isend(field[:halo].clone(), rank - 1), dist.irecv(below, rank - 1)]
        if rank < 2:
            works += [dist.isend(field[-halo:].clone(), rank + 1), dist.irecv(above, rank + 1)]
        for work in works:
            work.wait()


@faulty("p2p-deadlock-cycle", 0, 1, 2)
def neighbours_that_all_receive_first(rank: int) -> None:
    edge = torch.ones(4)
    dist.barrier()
    for _sweep in range(3):
        ghost = torch.zeros(4)
        dist.recv(ghost, (rank - 1) % 3)  # here
        dist.send(edge, (rank + 1) % 3)


# Handles.


@faulty("unwaited-async", 0, check="handles")
def a_buffer_filled_again_before_it_was_sent(rank: int) -> None:
    buffer = torch.zeros(64)
    for step in range(4):
        if rank == 0:
            buffer.fill_(step)
            work = dist.isend(buffer, 1)  # here
            if step == 2:
                buffer.add_(1)  # here
            work.wait()
        elif rank == 1:
            dist.recv(buffer, 0)
        dist.barrier()


@healthy(check="handles")
def two_buffers_in_turn(rank: int) -> None:
    buffers = [torch.zeros(64), torch.zeros(64)]
    pending: list[Any] = [None, None]
    for step in range(6):
        turn = step % 2
        if pending[turn] is not None:
            pending[turn].wait()
        if rank == 0:
            buffers[turn].fill_(step)
            pending[turn] = dist.isend(buffers[turn], 1)
        elif rank == 1:
            pending[turn] = dist.irecv(buffers[turn], 0)
    for work in pending:
        if work is not None:
            work.wait()


@faulty("unwaited-async", 0, 1, 2)
def futures_that_nobody_asks_for(_rank: int) -> None:
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        futures = [
            dist.all_reduce(p.grad, async_op=True).get_future()  # here
            for p in model.parameters()
        ]
        optimizer.step()
        assert len(futures) == 2
    dist.barrier()


@healthy()
def futures_that_are_awaited(_rank: int) -> None:
    model = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        futures = [dist.all_reduce(p.grad, async_op=True).get_future() for p in model.parameters()]
        torch.futures.wait_all(futures)
        optimizer.step()
    dist.barrier()


@faulty("rank-skipped-collective", 1, ranks=6, also=(("rank-stuck", 5),))
def two_replicas_with_a_fault_each(rank: int) -> None:
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    group = replicas[rank // 3]
    lock = threading.Lock()
    for step in range(6):
        dist.all_reduce(torch.ones(4), group=group)
        if rank == 5 and step == 2:
            lock.acquire()
            lock.acquire()
        if rank == 1 and step == 3:
            continue  # here
        dist.all_reduce(torch.ones(2), group=group)
        dist.broadcast(torch.ones(3), src=0 if rank < 3 else 3, group=group)


@healthy(ranks=6)
def two_replicas_that_meet_now_and_then(rank: int) -> None:
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    group = replicas[rank // 3]
    for step in range(6):
        dist.all_reduce(torch.ones(4), group=group)
        if step % 3 == 2:
            dist.barrier()
        dist.broadcast(torch.ones(3), src=0 if rank < 3 else 3, group=group)


@faulty("rank-stuck", 2)
def a_lock_held_before_a_monitored_barrier(rank: int) -> None:
    lock = threading.Lock()
    for epoch in range(3):
        dist.all_reduce(torch.ones(2))
        if rank == 2 and epoch == 1:
            lock.acquire()
            lock.acquire()  # here
        dist.monitored_barrier(timeout=timedelta(seconds=2))


@healthy()
def a_monitored_barrier_a_round(_rank: int) -> None:
    for _epoch in range(3):
        dist.all_reduce(torch.ones(2))
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
