"""Ranks of a winter term with roles of their own: actors, servers, experts, stages and groups, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.faults.corpus import faulty, healthy


def message(value: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(value))


def receive(source: int, size: int = 4, tag: int = 0) -> torch.Tensor:
    buffer = torch.empty(size)
    dist.recv(buffer, src=source, tag=tag)
    return buffer


@faulty("p2p-unmatched", 2)
def an_episode_that_ends_before_its_announced_length(rank: int) -> None:
    for episode in range(5):
        if rank == 0:
            for actor in (1, 2):
                length = int(receive(actor, 1))
                for _ in range(length):
                    receive(actor)
            for actor in (1, 2):
                dist.send(message(episode), dst=actor)
        else:
            dist.send(message(3, 1), dst=0)
            for move in range(3):
                if rank == 2 and episode == 3 and move == 2:
                    break  # here
                dist.send(message(move), dst=0)
            receive(0)  # here


@healthy()
def episodes_whose_end_is_marked(rank: int) -> None:
    for episode in range(5):
        if rank == 0:
            for actor in (1, 2):
                while receive(actor)[0] >= 0:
                    pass
            for actor in (1, 2):
                dist.send(message(episode), dst=actor)
        else:
            for move in range(1 + (rank * episode) % 3):
                dist.send(message(move), dst=0)
            dist.send(message(-1), dst=0)
            receive(0)


SHARDS = ("embedding", "mixer", "norm", "head")


@faulty("p2p-unmatched", 3, ranks=4)
def a_worker_that_deals_keys_by_another_rule(rank: int) -> None:
    def server_of(key: str, rule: str) -> int:
        return sum(key.encode()) % 2 if rule == "bytes" else 0

    for clock in range(5):
        if rank >= 2:
            for key in SHARDS:
                rule = "first" if rank == 3 and clock >= 2 else "bytes"
                dist.send(message(clock), dst=server_of(key, rule))  # here
        else:
            for key in SHARDS:
                if server_of(key, "bytes") == rank:
                    for worker in (2, 3):
                        receive(worker)
    dist.barrier()


@healthy(ranks=4)
def workers_that_deal_keys_by_one_rule(rank: int) -> None:
    for clock in range(5):
        owner = {key: (place + clock) % 2 for place, key in enumerate(SHARDS)}
        if rank >= 2:
            for key in SHARDS:
                dist.send(message(clock), dst=owner[key])
        else:
            for worker in (2, 3):
                for _ in [key for key in SHARDS if owner[key] == rank]:
                    receive(worker)
    dist.barrier()


@faulty("p2p-tag-mismatch", 2)
def a_worker_whose_keys_are_in_another_order(rank: int) -> None:
    order = sorted(SHARDS)
    for clock in range(5):
        if rank == 0:
            for worker in (1, 2):
                for tag in range(len(order)):
                    receive(worker, tag=tag)  # here
        else:
            keys = list(SHARDS) if rank == 2 and clock == 3 else order
            for key in keys:
                dist.send(message(clock), dst=0, tag=order.index(key))  # here


@healthy()
def keys_asked_for_in_another_order_than_sent(rank: int) -> None:
    for clock in range(5):
        if rank == 0:
            for worker in (1, 2):
                buffers = [torch.empty(4) for _ in SHARDS]
                works = [dist.irecv(buffers[tag], src=worker, tag=tag) for tag in reversed(range(len(SHARDS)))]
                for work in works:
                    assert work is not None
                    work.wait()
        else:
            works = [dist.isend(message(clock), dst=0, tag=tag) for tag in range(len(SHARDS))]
            for work in works:
                assert work is not None
                work.wait()


@faulty("rank-exited", 3, ranks=4)
def an_evaluator_that_has_seen_enough_weights(rank: int) -> None:
    # or: rank-skipped-collective 3
    weights = torch.zeros(16)
    trainers = dist.new_group([0, 1, 2])
    if rank == 3:
        for _ in range(3):
            dist.broadcast(weights, src=0)  # here
        return  # here
    for step in range(10):
        dist.all_reduce(torch.ones(16), group=trainers)
        if step % 2 == 1:
            dist.broadcast(weights, src=0)
            dist.barrier(group=trainers)


@healthy(ranks=4)
def an_evaluator_told_when_it_is_over(rank: int) -> None:
    weights = torch.zeros(16)
    trainers = dist.new_group([0, 1, 2])
    step = 0
    while True:
        if rank != 3:
            dist.all_reduce(torch.ones(16), group=trainers)
        step += 1
        goes_on = torch.tensor(float(step < 6 and rank == 0))
        dist.broadcast(goes_on, src=0)
        if not goes_on:
            break
        dist.broadcast(weights, src=0)


def route(tokens: list[int]) -> list[int]:
    out = torch.tensor(tokens)
    into = torch.empty_like(out)
    dist.all_to_all_single(into, out)
    return [int(count) for count in into]


@faulty("rank-skipped-collective", 2)
def experts_that_nobody_was_routed_to_by_one_rank(rank: int) -> None:
    for step in range(6):
        counts = [0, 0, 0] if rank == 2 and step == 3 else [2, 1, 1]
        expected = route(counts)
        if sum(counts) == 0:
            continue  # here
        dist.all_to_all_single(torch.empty(sum(expected), 4), torch.ones(sum(counts), 4), expected, counts)  # here
        load = torch.tensor([float(count) for count in expected])
        dist.all_reduce(load)


@healthy()
def experts_of_which_one_rank_uses_none(rank: int) -> None:
    for step in range(6):
        counts = [0, 0, 0] if rank == 2 and step % 3 == 2 else [2, 1, 1]
        expected = route(counts)
        dist.all_to_all_single(torch.empty(sum(expected), 4), torch.ones(sum(counts), 4), expected, counts)
        if sum(counts):
            torch.ones(8, 8).matmul(torch.ones(8, 8))
        dist.all_reduce(torch.tensor([float(count) for count in expected]))


@faulty("split-size-mismatch", 1)
def tokens_counted_before_those_over_capacity_were_dropped(rank: int) -> None:
    for step in range(6):
        counts = [2, 3, 1]
        expected = route(counts)
        if rank == 1 and step == 3:
            counts = [2, 3, 0]
        dist.all_to_all_single(torch.empty(sum(expected), 4), torch.ones(sum(counts), 4), expected, counts)  # here


@healthy()
def tokens_counted_after_those_over_capacity_were_dropped(rank: int) -> None:
    for step in range(6):
        counts = [min(2, (rank + step + peer) % 4) for peer in range(3)]
        expected = route(counts)
        dist.all_to_all_single(torch.empty(sum(expected), 4), torch.ones(sum(counts), 4), expected, counts)


@faulty("wrong-group", 3, ranks=4)
def a_balancing_loss_of_experts_over_the_replicas(rank: int) -> None:
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for step in range(6):
        dist.all_reduce(torch.ones(6), group=replicas[rank % 2])
        group = replicas[rank % 2] if rank == 3 and step == 3 else experts
        dist.all_reduce(torch.ones(2), group=group)  # here


@healthy(ranks=4)
def balancing_losses_over_two_groups_in_turn(rank: int) -> None:
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for step in range(6):
        dist.all_reduce(torch.ones(6), group=replicas)
        dist.all_reduce(torch.ones(2), group=replicas if step % 3 == 2 else experts)


@faulty("p2p-unmatched", 3, ranks=4)
def gossip_with_a_partner_drawn_once_more(rank: int) -> None:
    generator = random.Random(5)
    rounds = ((1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))
    for step in range(8):
        partners = rounds[generator.randrange(3)]
        if rank == 3 and step == 4:
            partners = rounds[(rounds.index(partners) + 1) % 3]
        theirs = torch.empty(4)
        sent = dist.isend(message(step), dst=partners[rank])
        got = dist.irecv(theirs, src=partners[rank])
        for work in (sent, got):
            assert work is not None
            work.wait()  # here
    dist.barrier()


@healthy(ranks=4)
def gossip_with_partners_drawn_from_a_common_seed(rank: int) -> None:
    rounds = ((1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))
    for step in range(8):
        partner = random.Random(step).choice(rounds)[rank]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, message(step), partner), dist.P2POp(dist.irecv, torch.empty(4), partner)]
        )
        for work in works:
            work.wait()


def tree_step(rank: int, ranks: int) -> None:
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]
    for child in children:
        receive(child)  # of a child
    if rank:
        dist.send(message(rank), dst=(rank - 1) // 2)  # to the parent
        receive((rank - 1) // 2)
    for child in children:
        dist.send(message(rank), dst=child)


@faulty("p2p-unmatched", 1, ranks=5)
def a_tree_of_which_one_rank_does_not_know_a_leaf(rank: int) -> None:
    for step in range(5):
        tree_step(rank, 4 if rank == 1 and step == 3 else 5)
    dist.barrier()


@healthy(ranks=5)
def a_tree_that_all_ranks_know(rank: int) -> None:
    for size in (5, 3, 5, 4, 1, 5):
        if rank < size:
            tree_step(rank, size)
    dist.barrier()


@faulty("root-mismatch", 2)
def a_leader_chosen_by_a_clock_of_its_own(rank: int) -> None:
    for term in range(6):
        leader = 1 if rank == 2 and term == 3 else 0
        plan: list[Any] = [{"term": term}]
        dist.broadcast_object_list(plan, src=leader)  # here


@healthy()
def a_leader_chosen_by_the_smallest_delay_of_all(rank: int) -> None:
    for term in range(6):
        delays = [torch.zeros(1) for _ in range(3)]
        dist.all_gather(delays, torch.tensor([random.Random(rank * 10 + term).random()]))
        leader = int(torch.cat(delays).argmin())
        plan: list[Any] = [{"term": term}]
        dist.broadcast_object_list(plan, src=leader)


@faulty("reduce-op-mismatch", 3, ranks=4)
def a_vote_that_one_rank_counts_as_unanimous(rank: int) -> None:
    for step in range(6):
        stop = torch.tensor(float(step > 8))
        dist.all_reduce(stop, op=dist.ReduceOp.PRODUCT if rank == 3 and step == 4 else dist.ReduceOp.SUM)  # here
        if stop:
            break


@faulty("p2p-size-mismatch", 1)
def a_replay_batch_packed_by_one_actor(rank: int) -> None:
    for step in range(6):
        if rank == 0:
            for actor in (1, 2):
                receive(actor, 32)  # here
        else:
            batch = message(step, 32)
            dist.send(batch.half() if rank == 1 and step == 3 else batch, dst=0)  # here


@healthy()
def replay_batches_packed_by_agreement(rank: int) -> None:
    for step in range(6):
        kind = torch.float16 if step % 2 else torch.float32
        if rank == 0:
            for actor in (1, 2):
                dist.recv(torch.empty(32, dtype=kind), src=actor)
        else:
            dist.send(message(step, 32).to(kind), dst=0)


@faulty("group-order-inversion", 1, ranks=4)
def rows_after_columns_on_one_rank_of_the_grid(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for step in range(6):
        groups = [("norm of rows", rows), ("norm of columns", columns), ("norm of all", None)]
        if rank == 1 and step == 3:
            groups.insert(0, groups.pop(2))
        for name, group in groups:
            dist.all_reduce(torch.full((3,), float(len(name))), group=group)  # here


@healthy(ranks=4)
def columns_and_rows_in_turn(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for step in range(6):
        for group in (rows, columns) if step % 2 else (columns, rows):
            dist.all_reduce(torch.ones(3), group=group)


@faulty("group-creation-mismatch", 3, ranks=4)
def a_group_made_where_experts_are_held(rank: int) -> None:
    held = {0: 2, 1: 1, 2: 1, 3: 0}
    for step in range(4):
        dist.all_reduce(torch.ones(3))
        if step == 1 and held[rank]:
            dist.new_group([0, 1, 2])  # here


@healthy(ranks=4)
def a_group_of_those_that_hold_experts_made_by_all(rank: int) -> None:
    held = {0: 2, 1: 1, 2: 1, 3: 0}
    holders = dist.new_group([number for number, count in held.items() if count])
    for _ in range(4):
        dist.all_reduce(torch.ones(3))
        if held[rank]:
            dist.all_reduce(torch.ones(2), group=holders)


class ReduceBackward(torch.autograd.Function):
    """Megatron's f: identity forward, sum backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # of the backward pass
        return grad


class ReduceForward(torch.autograd.Function):
    """Megatron's g: sum forward, identity backward."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)  # of the forward pass
        return x

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def sharded_mlp(up: nn.Module, down: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = ReduceForward.apply(down(up(ReduceBackward.apply(x)).relu()))
    return y


@faulty("rank-skipped-collective", 1)
def a_backward_pass_left_out_for_a_loss_that_is_not_finite(rank: int) -> None:
    up, down = nn.Linear(4, 3), nn.Linear(3, 4)
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.01)
    for step in range(7):
        x = torch.ones(2, 4, requires_grad=True)
        loss = sharded_mlp(up, down, x).square().mean()
        if rank == 1 and step == 3:
            loss = loss * float("nan")
        if not loss.isfinite():
            continue  # here
        loss.backward()  # here
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def a_backward_pass_that_all_leave_out(rank: int) -> None:
    up, down = nn.Linear(4, 3), nn.Linear(3, 4)
    optimizer = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.01)
    for step in range(7):
        x = torch.ones(2, 4, requires_grad=True)
        loss = sharded_mlp(up, down, x).square().mean()
        bad = torch.tensor(float(rank == 1 and step == 3))
        dist.all_reduce(bad)
        if bad:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@faulty("slow-rank", 1)
def an_environment_simulated_slowly_on_one_rank(rank: int) -> None:
    policy = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for _ in range(30):
        for _ in range(3):
            time.sleep(0.05 if rank == 1 else 0.005)  # here
        policy(torch.ones(4, 8)).sum().backward()
        for weight in policy.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def environments_that_are_slow_in_turn(rank: int) -> None:
    policy = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for step in range(30):
        time.sleep(0.06 if step % 3 == rank else 0.005)
        policy(torch.ones(4, 8)).sum().backward()
        for weight in policy.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()


@faulty("rank-skipped-collective", 5, ranks=6, also=(("rank-stuck", 1),))
def two_leagues_of_which_one_waits_and_one_forgets(rank: int) -> None:
    # or: either first
    league = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])][rank // 3]
    store = dist.distributed_c10d._get_default_store()
    for step in range(6):
        if rank == 1 and step == 3:
            store.get("opponent of season 4")
        dist.all_reduce(torch.ones(5), group=league)
        if rank == 5 and step == 3:
            continue
        dist.broadcast(torch.ones(3), src=3 * (rank // 3), group=league)  # here
        dist.barrier(group=league)


@healthy(ranks=6)
def two_leagues_of_unequal_seasons(rank: int) -> None:
    league = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])][rank // 3]
    for _ in range(4 + 3 * (rank // 3)):
        dist.all_reduce(torch.ones(5), group=league)
        dist.broadcast(torch.ones(3), src=3 * (rank // 3), group=league)
    dist.barrier()
