"""Calls on groups and meshes, by methods of a group, as functions with gradients, and within wrappers."""

import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.completeness.programs.calls import SIZE, Section, leaf, ones, parts


def run_group_methods(at, world):
    at.call("ProcessGroup.allreduce", lambda: world.allreduce([ones()]).wait())
    at.call("ProcessGroup.allreduce of one tensor", lambda: world.allreduce(ones(), dist.ReduceOp.SUM).wait())
    at.call("ProcessGroup.broadcast", lambda: world.broadcast(ones(), 0).wait())
    at.call("ProcessGroup.allgather", lambda: world.allgather([parts()], [ones()]).wait())
    at.call("ProcessGroup.reduce", lambda: world.reduce(ones(), 0).wait())
    at.call("ProcessGroup.alltoall_base", lambda: world.alltoall_base(ones(8), ones(8), [], []).wait())
    at.call("ProcessGroup.barrier", lambda: world.barrier().wait())
    at.pair(
        "ProcessGroup.send/recv", lambda: world.send([ones()], 1, 7).wait(), lambda: world.recv([ones()], 0, 7).wait()
    )
    at.call("Backend.allreduce", lambda: world._get_backend(torch.device("cpu")).allreduce([ones()]).wait())


def run_groups_and_meshes(at):
    pair = dist.new_group([0, 1], group_desc="pair")
    at.call("new_group", lambda: dist.all_reduce(ones(), group=pair))
    at.call("new_group, its creation", lambda: dist.new_group([0, 1]))
    listed, _ = dist.new_subgroups_by_enumeration([[0, 1]])
    at.call("new_subgroups_by_enumeration", lambda: dist.all_reduce(ones(), group=listed))
    own, _ = dist.new_subgroups(group_size=1)
    at.call("new_subgroups", lambda: dist.all_reduce(ones(), group=own))
    # Not ProcessGroup.split_group: in one run of a dozen, gloo never connects the ranks of the group (torch 2.13.0).
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "tp"))
    at.call("mesh", lambda: dist.all_reduce(ones(), group=mesh["tp"].get_group()))
    at.call("mesh, dimension of one rank", lambda: dist.all_reduce(ones(), group=mesh.get_group("dp")))
    flat = mesh["dp", "tp"]._flatten("both")
    at.call("mesh, flattened", lambda: dist.all_reduce(ones(), group=flat.get_group()))

    def from_threads():
        def issue(group):
            for _ in range(10):
                dist.all_reduce(ones(), group=group)

        threads = [threading.Thread(target=issue, args=(group,)) for group in (pair, listed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    at.call("two threads on two groups", from_threads)


def run_functional(at, world):
    kinds = {
        "all_reduce": lambda: functional.all_reduce(ones(), "sum", world),
        "all_gather_tensor": lambda: functional.all_gather_tensor(ones(), 0, world),
        "reduce_scatter_tensor": lambda: functional.reduce_scatter_tensor(ones(4 * SIZE), "sum", 0, world),
        "broadcast": lambda: functional.broadcast(ones(), 0, world),
        "all_to_all_single": lambda: functional.all_to_all_single(ones(4), None, None, world),
        "permute_tensor": lambda: functional.permute_tensor(ones(), [1, 0], world),
    }
    for name, make in kinds.items():
        at.call(f"functional {name}", lambda make=make: make().sum())
    at.call("functional all_reduce, never waited for", lambda: functional.all_reduce(ones(), "sum", world))
    two, wide = [ones(), ones()], [ones(4 * SIZE), ones(4 * SIZE)]
    kinds = {
        "all_reduce_coalesced": lambda: functional.all_reduce_coalesced(two, "sum", world),
        "all_gather_into_tensor_coalesced": lambda: functional.all_gather_into_tensor_coalesced(two, world),
        "reduce_scatter_tensor_coalesced": lambda: functional.reduce_scatter_tensor_coalesced(
            wide, "sum", [0, 0], world
        ),
    }
    for name, make in kinds.items():
        at.call(f"functional {name}", lambda make=make: [one.sum() for one in make()], tensors=2)
    operators, group = torch.ops._c10d_functional, world.group_name
    at.pair(
        "functional isend/irecv",
        lambda: operators.wait_tensor(operators.isend(ones(), 1, 0, group)),
        lambda: operators.wait_tensor(operators.irecv(ones(), 0, 0, group)),
    )


def run_differentiable(at, world):
    half = [4, 4]
    kinds = {
        "functional all_gather_tensor_autograd": lambda: functional.all_gather_tensor_autograd(leaf(), 0, world),
        "functional reduce_scatter_tensor_autograd": lambda: functional.reduce_scatter_tensor_autograd(
            leaf(8), "sum", 0, world
        ),
        "functional all_to_all_single_autograd": lambda: functional.all_to_all_single_autograd(
            leaf(8), half, half, world
        ),
        "nn.functional all_reduce": lambda: differentiable.all_reduce(leaf()),
        "nn.functional all_gather": lambda: torch.stack(list(differentiable.all_gather(leaf()))),
        "nn.functional broadcast": lambda: differentiable.broadcast(leaf(), 0),
        "nn.functional reduce_scatter": lambda: differentiable.reduce_scatter(ones(), [leaf(), leaf()]),
        "nn.functional all_to_all_single": lambda: differentiable.all_to_all_single(ones(8), leaf(8)),
    }
    for name, make in kinds.items():
        at.call(name, lambda make=make: make().sum().backward())


def run_wrappers(at):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    at.call("ddp backward", lambda: ddp(torch.ones(2, 4)).sum().backward())

    def no_sync():
        with ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()

    at.call("ddp no_sync", no_sync)
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (SIZE,)))
    at.call("fsdp2 step", lambda: sharded(torch.ones(2, 4)).sum().backward())


def run_calls_in_context(oracle, rank):
    world = dist.group.WORLD
    run_group_methods(Section(oracle, rank, "Methods of a group"), world)
    run_groups_and_meshes(Section(oracle, rank, "Groups and meshes"))
    run_functional(Section(oracle, rank, "Functional collectives"), world)
    run_differentiable(Section(oracle, rank, "Differentiable collectives, forward and backward"), world)
    run_wrappers(Section(oracle, rank, "Wrappers"))
