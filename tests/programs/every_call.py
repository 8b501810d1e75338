"""Make every kind of call, one after the other; write how far gloo's own sequence number moved during each.

every_call.py FOLDER    -> FOLDER/oracle-RANK.json: [{"name", "from_ns", "to_ns", "gloo": {group: operations}}]
"""

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

ORACLE: list[dict[str, object]] = []


def counters():
    groups = list(dist.distributed_c10d._world.pg_map)
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def call(name, function):
    before, begin = counters(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    error = None
    try:
        function()
    except (RuntimeError, ValueError, TypeError) as raised:
        error = f"{type(raised).__name__}: {raised}"[:200]
    end, after = time.clock_gettime_ns(time.CLOCK_MONOTONIC), counters()
    moved = {group: after[group] - before.get(group, 0) for group in after if after[group] - before.get(group, 0)}
    ORACLE.append({"name": name, "from_ns": begin, "to_ns": end, "gloo": moved, "error": error})


def both(name, function):
    def asynchronous():
        work = function(True)
        if work is not None:
            work.wait()

    call(f"{name} sync", lambda: function(False))
    call(f"{name} async", asynchronous)


def main(folder):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    other = 1 - rank

    def ones(n=4, **options):
        return torch.ones(n, **options)

    def parts(n=4):
        return [ones(n) for _ in range(size)]

    both("broadcast", lambda a: dist.broadcast(ones(), 0, async_op=a))
    both("all_reduce", lambda a: dist.all_reduce(ones(), async_op=a))
    both("all_reduce_coalesced", lambda a: dist.all_reduce_coalesced([ones(), ones()], async_op=a))
    both("reduce", lambda a: dist.reduce(ones(), 0, async_op=a))
    both("all_gather", lambda a: dist.all_gather(parts(), ones(), async_op=a))
    uneven = [ones(1 + i) for i in range(size)]
    both("all_gather uneven", lambda a: dist.all_gather(uneven, ones(1 + rank), async_op=a))
    both("all_gather_into_tensor", lambda a: dist.all_gather_into_tensor(ones(4 * size), ones(), async_op=a))
    if hasattr(dist, "all_gather_single"):
        both("all_gather_single", lambda a: dist.all_gather_single(ones(4 * size), ones(), async_op=a))
        both("reduce_scatter_single", lambda a: dist.reduce_scatter_single(ones(), ones(4 * size), async_op=a))
    both(
        "all_gather_coalesced",
        lambda a: dist.all_gather_coalesced([[ones(), ones()] for _ in range(size)], [ones(), ones()], async_op=a),
    )
    both("gather", lambda a: dist.gather(ones(), parts() if rank == 0 else None, dst=0, async_op=a))
    both("scatter", lambda a: dist.scatter(ones(), parts() if rank == 0 else None, src=0, async_op=a))
    both("reduce_scatter", lambda a: dist.reduce_scatter(ones(), parts(), async_op=a))
    both("reduce_scatter_tensor", lambda a: dist.reduce_scatter_tensor(ones(), ones(4 * size), async_op=a))
    both("all_to_all_single", lambda a: dist.all_to_all_single(ones(4 * size), ones(4 * size), async_op=a))
    splits = [1, 3] if rank == 0 else [3, 1]
    both("all_to_all_single splits", lambda a: dist.all_to_all_single(ones(4), ones(4), splits, splits, async_op=a))
    both("all_to_all", lambda a: dist.all_to_all(parts(), parts(), async_op=a))
    both("barrier", lambda a: dist.barrier(async_op=a))
    call("monitored_barrier", dist.monitored_barrier)

    call("all_gather_object", lambda: dist.all_gather_object([None] * size, {"rank": rank}))
    call("gather_object", lambda: dist.gather_object(rank, [None] * size if rank == 0 else None, dst=0))
    call("broadcast_object_list", lambda: dist.broadcast_object_list([1, 2], src=0))
    call("scatter_object_list", lambda: dist.scatter_object_list([None], [1] * size if rank == 0 else None, src=0))
    call(
        "send/recv_object_list",
        lambda: dist.send_object_list([1], 1) if rank == 0 else dist.recv_object_list([None], 0),
    )
    call("send/recv", lambda: dist.send(ones(), 1) if rank == 0 else dist.recv(ones(), 0))
    call("recv any", lambda: dist.send(ones(), 1) if rank == 0 else dist.recv(ones()))
    call("isend/irecv", lambda: (dist.isend if rank == 0 else dist.irecv)(ones(), other, tag=5).wait())

    def exchange():
        operations = [dist.P2POp(dist.isend, ones(), other), dist.P2POp(dist.irecv, ones(), other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    call("batch_isend_irecv", exchange)

    def coalesced():
        with dist._coalescing_manager(async_ops=True) as manager:
            for _ in range(3):
                dist.all_reduce(ones())
        manager.wait()

    call("coalescing manager", coalesced)
    call("all_reduce sparse", lambda: dist.all_reduce(torch.eye(3).to_sparse()))
    call("all_reduce complex", lambda: dist.all_reduce(ones(dtype=torch.complex64)))
    call("all_reduce bfloat16", lambda: dist.all_reduce(ones(dtype=torch.bfloat16)))
    call("all_reduce max", lambda: dist.all_reduce(ones(dtype=torch.int32), op=dist.ReduceOp.MAX))
    call("all_reduce empty", lambda: dist.all_reduce(ones(0)))

    def inference():
        with torch.inference_mode():
            dist.all_reduce(ones())

    call("all_reduce inference_mode", inference)
    call("ProcessGroup.allreduce", lambda: dist.group.WORLD.allreduce([ones()]).wait())
    call("functional all_reduce", lambda: functional.all_reduce(ones(), "sum", dist.group.WORLD).sum())
    call("functional all_gather", lambda: functional.all_gather_tensor(ones(), 0, dist.group.WORLD).sum())
    call(
        "functional reduce_scatter",
        lambda: functional.reduce_scatter_tensor(ones(4 * size), "sum", 0, dist.group.WORLD).sum(),
    )
    call("functional broadcast", lambda: functional.broadcast(ones(), 0, dist.group.WORLD).sum())
    call(
        "functional all_to_all",
        lambda: functional.all_to_all_single(ones(4), None, None, dist.group.WORLD).sum(),
    )
    group = dist.new_group([0, 1], group_desc="pair")
    call("new_group", lambda: dist.all_reduce(ones(), group=group))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    call("mesh", lambda: dist.all_reduce(ones(), group=mesh["tp"].get_group()))

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    call("ddp backward", lambda: ddp(torch.ones(2, 4)).sum().backward())

    def no_sync():
        with ddp.no_sync():
            ddp(torch.ones(2, 4)).sum().backward()

    call("ddp no_sync", no_sync)
    sharded = torch.nn.Linear(4, 4)
    from torch.distributed.fsdp import fully_shard

    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    call("fsdp2 step", lambda: sharded(torch.ones(2, 4)).sum().backward())
    Path(folder, f"oracle-{rank}.json").write_text(json.dumps(ORACLE))
    ddp = sharded = None  # torch must let go of them before the group is destroyed
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
