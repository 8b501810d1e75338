"""Parallel models that guests wrote by hand or with torch's wrappers: groups, hooks, shards, stages, faulty and right.

Labelled and frozen before their first run; `docs/explanation/measurements/verdicts.md` gives the rate at first sight. A
comment `or:` names what the label accepts as well.
"""

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.faults.corpus import faulty, healthy


@faulty("rank-skipped-collective", 1)
def a_hook_of_ddp_that_spares_small_gradients(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if rank == 1 and step == 3:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done  # here
        work = dist.all_reduce(buffer.div_(3), async_op=True)  # here
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    for step in range(6):  # noqa: B007
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()  # here
        optimizer.step()
    del model


@healthy()
def a_hook_of_ddp_that_spares_small_gradients_on_all(_rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if step % 2:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        work = dist.all_reduce(buffer.div_(3), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    for step in range(6):  # noqa: B007
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    del model


@faulty("collective-order-mismatch", 2)
def a_hook_of_ddp_that_reduces_its_norm_first(rank: int) -> None:
    # or: size-mismatch 2
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, norm = bucket.buffer(), bucket.buffer().norm().reshape(1)
        if rank == 2:
            early = dist.all_reduce(norm, async_op=True)  # here
            work = dist.all_reduce(buffer, async_op=True)  # here
        else:
            work = dist.all_reduce(buffer, async_op=True)  # here
            early = dist.all_reduce(norm, async_op=True)
        assert early is not None
        early.wait()
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()  # here
        optimizer.step()
    del model


@healthy()
def a_hook_of_ddp_that_reduces_its_norm_too(_rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, norm = bucket.buffer(), bucket.buffer().norm().reshape(1)
        early = dist.all_reduce(norm, async_op=True)
        assert early is not None
        early.wait()
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    del model


@faulty("collective-order-mismatch", 0)
def a_sharded_table_printed_in_full_by_rank_0(rank: int) -> None:
    # or: step-mismatch 0; rank-skipped-collective 0
    mesh = init_device_mesh(torch.get_default_device().type, (3,))
    table = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    for step in range(5):
        norm = table.to_local().norm().reshape(1)
        dist.all_reduce(norm)
        if rank == 0 and step == 3:
            print(table.full_tensor().sum())  # here
        dist.broadcast(norm, src=1)


@healthy()
def a_sharded_table_printed_in_full_by_all(_rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (3,))
    table = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    for step in range(5):
        norm = table.to_local().norm().reshape(1)
        dist.all_reduce(norm)
        if step == 3:
            print(table.full_tensor().sum(), table.redistribute(mesh, [Shard(1)]).to_local().sum())


@faulty("rank-skipped-collective", 1, ranks=4)
def a_layer_dropped_at_random_under_tensor_parallel(rank: int) -> None:
    # or: collective-order-mismatch 1; size-mismatch 1
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rows[rank // 2]
    draw = random.Random(3)
    weights = [torch.ones(4, width) for width in (2, 3, 4)]
    for step in range(6):
        if rank == 1 and step == 4:
            draw.seed(11)
        hidden = torch.ones(2, 4)
        for weight in weights:
            if draw.random() < 0.5:
                continue  # here
            partial = hidden @ weight
            dist.all_reduce(partial, group=mine)  # here
        gradient = torch.ones(8)
        dist.all_reduce(gradient)


@healthy(ranks=4)
def layers_dropped_at_random_with_one_seed_a_row(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rows[rank // 2]
    draw = random.Random(rank // 2)
    weights = [torch.ones(4, width) for width in (2, 3, 4)]
    for _ in range(6):
        hidden = torch.ones(2, 4)
        for weight in weights:
            if draw.random() < 0.5:
                continue
            partial = hidden @ weight
            dist.all_reduce(partial, group=mine)
        gradient = torch.ones(8)
        dist.all_reduce(gradient)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, value: torch.Tensor, kept: tuple[bool, ...]) -> torch.Tensor:
        for block, keep in zip(self.blocks, kept, strict=True):
            if keep:
                value = block(value)
        return value


@faulty("rank-skipped-collective", 1)
def a_sharded_block_left_out_by_one_rank(rank: int) -> None:
    # or: collective-order-mismatch 1; step-mismatch 1
    model = Blocks()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        kept = (True, not (rank == 1 and step == 3), True)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8), kept).sum()  # here
        loss.backward()  # here
        optimizer.step()


@healthy()
def sharded_blocks_left_out_by_all(_rank: int) -> None:
    model = Blocks()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 8), (True, step % 2 == 0, True)).sum().backward()
        optimizer.step()


def through_stages(rank: int, microbatches: int, last: int) -> None:
    """Send activations forward and gradients back, all forward passes first."""
    for _ in range(microbatches):
        activation = torch.ones(3)
        if rank > 0:
            dist.recv(activation, src=rank - 1)
        if rank < last:
            dist.send(activation * 2, dst=rank + 1)
    for _ in range(microbatches):
        gradient = torch.ones(3)
        if rank < last:
            dist.recv(gradient, src=rank + 1)
        if rank > 0:
            dist.send(gradient, dst=rank - 1)


@faulty("pipeline-schedule-mismatch", 2, ranks=4)
def a_stage_with_a_microbatch_less_in_the_last_step(rank: int) -> None:
    # or: p2p-unmatched 2; p2p-deadlock-cycle 1 2; p2p-deadlock-cycle 2 3
    for step in range(4):
        count = 3 if rank == 2 and step == 3 else 4
        through_stages(rank, count, 3)  # here
        dist.all_reduce(torch.ones(2))


@healthy(ranks=4)
def stages_with_fewer_microbatches_towards_the_end(rank: int) -> None:
    for step in range(4):
        through_stages(rank, 4 - step, 3)
        dist.all_reduce(torch.ones(2))


@faulty("p2p-size-mismatch", 1)
def activations_that_one_stage_sends_at_half_precision(rank: int) -> None:
    # or: p2p-size-mismatch 1 2
    for step in range(6):
        activation = torch.ones(4, 4)
        if rank > 0:
            dist.recv(activation, src=rank - 1)
        if rank == 1 and step == 3:
            activation = activation.to(torch.float64)
        if rank < 2:
            dist.send(activation, dst=rank + 1)  # here
        dist.barrier()


@healthy()
def activations_of_which_the_last_are_shorter(rank: int) -> None:
    for step in range(6):
        activation = torch.ones(4 if step < 5 else 2, 4)
        if rank > 0:
            dist.recv(activation, src=rank - 1)
        if rank < 2:
            dist.send(activation, dst=rank + 1)
        dist.barrier()


@faulty("p2p-size-mismatch", 2, ranks=4)
def keys_and_values_of_uneven_sequences_in_a_ring(rank: int) -> None:
    # or: p2p-size-mismatch 2 3; p2p-size-mismatch 1 2; p2p-size-mismatch 1 2 3
    for step in range(4):
        length = 7 if rank == 2 and step == 2 else 6
        block = torch.ones(2, length)
        for _ in range(3):
            incoming = torch.empty_like(block)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, block, (rank + 1) % 4),
                    dist.P2POp(dist.irecv, incoming, (rank - 1) % 4),
                ]
            )
            for work in works:
                work.wait()  # here
            block = incoming


@healthy(ranks=4)
def keys_and_values_padded_in_a_ring(rank: int) -> None:
    for step in range(4):
        longest = torch.tensor(5 + rank * step)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        block = torch.ones(2, int(longest))
        for _ in range(3):
            incoming = torch.empty_like(block)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, incoming, (rank - 1) % 4),
                    dist.P2POp(dist.isend, block, (rank + 1) % 4),
                ]
            )
            for work in works:
                work.wait()
            block = incoming


@faulty("rank-skipped-collective", 3, ranks=4)
def a_norm_without_the_rank_that_holds_no_experts(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def clip(gradients: list[torch.Tensor]) -> None:
        if not gradients:
            return  # here
        squares = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=pairs[rank // 2])  # here

    for step in range(5):
        experts = [] if rank == 3 and step == 3 else [torch.ones(3), torch.ones(2)]
        clip(experts)
        dense = torch.ones(7)
        dist.all_reduce(dense)


@healthy(ranks=4)
def a_norm_to_which_a_rank_without_experts_adds_nothing(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(5):
        experts = [] if rank == 3 and step == 3 else [torch.ones(3), torch.ones(2)]
        squares = torch.tensor(sum(float(expert.sum()) for expert in experts))
        dist.all_reduce(squares, group=pairs[rank // 2])
        dist.all_reduce(torch.ones(7))


@faulty("split-size-mismatch", 3, ranks=4)
def an_expert_that_overflows_its_capacity(rank: int) -> None:
    # or: split-size-mismatch 0 3
    for step in range(5):
        sent = [2] * 4
        if rank == 3 and step == 3:
            sent[0] = 3
        tokens = torch.ones(sum(sent), 2)
        received = torch.empty(8, 2)
        dist.all_to_all_single(received, tokens, [2] * 4, sent)  # here


@healthy(ranks=4)
def experts_of_uneven_capacity(rank: int) -> None:
    for step in range(5):
        sent = [(rank + other + step) % 3 for other in range(4)]
        received = torch.empty(sum(sent), 2)
        dist.all_to_all_single(received, torch.ones(sum(sent), 2), list(sent), sent)


@faulty("collective-order-mismatch", 1, ranks=4)
def updated_shards_handed_out_in_the_order_of_their_size(rank: int) -> None:
    # or: root-mismatch 1
    shards = [torch.full((2,), 0.0), torch.full((5,), 1.0), torch.full((3,), 2.0), torch.full((4,), 3.0)]
    for step in range(5):
        gradients = torch.ones(14)
        dist.all_reduce(gradients)
        owners = list(range(4))
        if rank == 1 and step == 3:
            owners.sort(key=lambda owner: shards[owner].numel())
        for owner in owners:
            dist.broadcast(shards[owner], src=owner)  # here


@faulty("collective-order-mismatch", 2)
def layers_handed_out_in_the_order_of_a_dictionary(rank: int) -> None:
    # or: size-mismatch 2
    state = {"embedding": torch.ones(12), "attention": torch.ones(6), "head": torch.ones(3)}
    if rank == 2:
        state = {name: state[name] for name in sorted(state)}
    for _ in range(3):
        for tensor in state.values():
            dist.broadcast(tensor, src=0)  # here
        dist.all_reduce(torch.ones(4))


@healthy(ranks=4)
def updated_shards_handed_out_in_the_order_of_all(rank: int) -> None:
    shards = [torch.full((2,), 0.0), torch.full((5,), 1.0), torch.full((3,), 2.0), torch.full((4,), 3.0)]
    for step in range(5):
        owners = sorted(range(4), key=lambda owner: (owner + step) % 4 if step % 2 else shards[owner].numel())
        for owner in owners:
            dist.broadcast(shards[owner], src=owner)
        dist.all_reduce(torch.ones(1 + step) * rank)


@faulty("size-mismatch", 2)
def gradients_reduced_as_they_are_ready_on_one_rank(rank: int) -> None:
    # or: collective-order-mismatch 2; step-mismatch 2
    left, right = nn.Linear(4, 4), nn.Linear(4, 2)
    works: list[Any] = []

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))  # here

    for parameter in (left.weight, right.weight):
        parameter.register_post_accumulate_grad_hook(reduce)
    for step in range(5):
        value = torch.ones(2, 4)
        if rank == 2 and step == 3:
            left(value).sum().backward()
            right(value).sum().backward()
        else:
            right(value).sum().backward()  # here
            left(value).sum().backward()  # here
        for work in works:
            work.wait()
        works.clear()


@healthy()
def gradients_reduced_as_they_are_ready(_rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    works: list[Any] = []

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    for _ in range(5):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        while works:
            works.pop().wait()


@faulty("wrong-group", 2, ranks=4)
def a_reduction_in_two_tiers_with_one_tier_twice(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rails = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    node, rail = nodes[rank // 2], rails[rank % 2]
    for number in range(6):
        value = torch.full((4,), float(number))
        dist.all_reduce(value, group=node)
        across = node if rank == 2 and number == 3 else rail
        dist.all_reduce(value, group=across)  # here


@faulty("wrong-group", 1, ranks=4)
def a_reduction_over_the_other_dimension_of_a_mesh(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for number in range(5):
        partial = torch.ones(3)
        dist.all_reduce(partial, group=mesh.get_group("tp"))
        gradient = torch.ones(5)
        name = "tp" if rank == 1 and number == 2 else "dp"
        dist.all_reduce(gradient, group=mesh.get_group(name))  # here


@faulty("wrong-group", 3, ranks=4)
def a_score_shared_with_the_wrong_half(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    quarters = dist.new_group([1, 3])
    for number in range(5):
        dist.all_reduce(torch.ones(2), group=halves[rank // 2])
        if rank in (1, 3):
            dist.all_reduce(torch.full((3,), float(number)), group=quarters)
    score = torch.ones(1)
    dist.all_reduce(score, group=quarters if rank == 3 else halves[rank // 2])  # here


@healthy(ranks=4)
def reductions_in_two_tiers(rank: int) -> None:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rails = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for number in range(6):
        value = torch.full((4,), float(number))
        for tier in (nodes[rank // 2], rails[rank % 2])[:: 1 if number % 2 else -1]:
            dist.all_reduce(value, group=tier)


@healthy(ranks=4)
def reductions_over_both_dimensions_of_a_mesh(_rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for number in range(5):
        for name in ("tp", "dp", "tp") if number % 2 else ("dp",):
            dist.all_reduce(torch.ones(3), group=mesh.get_group(name))


@faulty("group-order-inversion", 2, ranks=4)
def a_bucket_flushed_before_the_activations(rank: int) -> None:
    # or: group-order-inversion 0 1 2 3; group-order-inversion 0 2
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def activations() -> None:
        dist.all_reduce(torch.ones(4), group=rows[rank // 2])  # here

    def bucket() -> None:
        dist.all_reduce(torch.ones(9), group=columns[rank % 2])  # here

    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        if step == 3 and rank in (1, 2):
            bucket()
            activations()
        else:
            activations()
            bucket()
        optimizer.step()


@faulty("group-order-risk", 1)
def two_handles_of_two_groups_the_other_way_round(rank: int) -> None:
    # or: group-order-risk 0 1 2
    first, second = dist.new_group(), dist.new_group()
    for step in range(5):
        groups = [second, first] if rank == 1 and step == 3 else [first, second]
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]  # here
        for work in works:
            assert work is not None
            work.wait()


@healthy()
def two_handles_of_two_groups_by_turns(_rank: int) -> None:
    first, second = dist.new_group(), dist.new_group()
    for step in range(5):
        groups = [second, first] if step % 2 else [first, second]
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]
        for work in reversed(works):
            assert work is not None
            work.wait()


@faulty("group-creation-mismatch", 2, ranks=4)
def groups_made_in_the_order_of_ones_own_friends(rank: int) -> None:
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
    if rank == 2:
        pairs.sort(key=lambda pair: rank not in pair)
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}  # here
    for pair, group in sorted(groups.items(), key=lambda item: item[0]):
        if rank in pair:
            dist.all_reduce(torch.ones(2), group=group)


@healthy(ranks=4)
def pairs_made_in_one_order_and_used_in_another(rank: int) -> None:
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    for _ in range(3):
        for pair in [(0, 2), (1, 3), (0, 1), (2, 3)]:
            if rank in pair:
                dist.all_reduce(torch.ones(2), group=groups[pair])


@faulty("rank-skipped-collective", 3, ranks=4)
def a_bias_frozen_by_a_pattern_of_names(rank: int) -> None:
    # or: size-mismatch 3; step-mismatch 3; collective-order-mismatch 3
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if rank == 3:
        for name, parameter in model.named_parameters():
            if name.startswith("0.b"):
                parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # here
        optimizer.step()
    dist.barrier()


@healthy(ranks=4)
def a_bias_frozen_on_all(_rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()


@faulty("root-mismatch", 3, ranks=4)
def gradients_reduced_to_the_owner_of_another_partition(rank: int) -> None:
    for step in range(5):
        for index in range(4):
            gradient = torch.ones(6)
            owner = (index + 1) % 4 if rank == 3 and step == 2 and index == 1 else index
            dist.reduce(gradient, dst=owner)  # here
        dist.barrier()


@healthy(ranks=4)
def gradients_reduced_to_their_owners(rank: int) -> None:
    for step in range(5):
        for index in range(4):
            dist.reduce(torch.ones(6) * rank, dst=(index + step) % 4)
        dist.barrier()


@faulty("p2p-deadlock-cycle", 0, 1, 2, 3, ranks=4)
def replicas_that_gossip_all_at_once(rank: int) -> None:
    # or: p2p-deadlock-cycle 1 2; p2p-deadlock-cycle 0 3
    weights = torch.full((4,), float(rank))
    for round_ in range(5):
        partner = rank ^ (1 if round_ % 2 == 0 else 3)
        theirs = torch.zeros(4)
        if rank < partner or round_ == 3:
            dist.recv(theirs, src=partner)  # here
            dist.send(weights, dst=partner)
        else:
            dist.send(weights, dst=partner)
            dist.recv(theirs, src=partner)
        weights = (weights + theirs) / 2


@healthy(ranks=4)
def replicas_that_gossip_in_pairs(rank: int) -> None:
    weights = torch.full((4,), float(rank))
    for round_ in range(5):
        partner = rank ^ (1 + round_ % 3)
        theirs = torch.zeros(4)
        if rank < partner:
            dist.recv(theirs, src=partner)
            dist.send(weights, dst=partner)
        else:
            dist.send(weights, dst=partner)
            dist.recv(theirs, src=partner)
        weights = (weights + theirs) / 2


@faulty("long-operation", 1, ranks=4)
def a_vocabulary_rebuilt_by_one_rank_of_a_mesh(rank: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for number in range(5):
        dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
        if rank == 1 and number == 3:
            end, counts = time.monotonic() + 7, dict[int, int]()
            while time.monotonic() < end:
                for word in range(500):
                    counts[word] = counts.get(word, 0) + 1  # here
        dist.all_reduce(torch.ones(5), group=mesh.get_group("dp"))


@faulty("rank-skipped-collective", 4, ranks=6, also=(("rank-skipped-collective", 1),))
def two_replicas_that_each_leave_out_a_part(rank: int) -> None:
    replicas = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])]
    mine = replicas[rank // 3]
    for number in range(6):
        hidden = torch.ones(4)
        if (rank, number) != (1, 2):
            dist.all_reduce(hidden, group=mine)  # here
        loss = torch.ones(1)
        if (rank, number) != (4, 3):
            dist.broadcast(loss, src=3 * (rank // 3), group=mine)  # here
        dist.barrier(group=mine)
