"""Make every kind of call on two ranks, one after the other, measured by the oracle.

python -m tests.completeness.programs.every_call FOLDER    -> FOLDER/oracle-RANK.json
"""

import datetime
import sys

import torch
import torch.distributed as dist

from tests.completeness.programs.calls import SIZE, Section, ones, parts
from tests.completeness.programs.calls_in_context import run_calls_in_context
from tests.completeness.programs.oracle import Oracle


class Subclass(torch.Tensor):
    """A tensor of another class."""


def run_collectives(at):
    root = at.rank == 0
    at.both("broadcast", lambda a: dist.broadcast(ones(), 0, async_op=a))
    at.both("broadcast group_src", lambda a: dist.broadcast(ones(), group_src=1, async_op=a))
    at.both("all_reduce", lambda a: dist.all_reduce(ones(), async_op=a))
    at.both("all_reduce_coalesced", lambda a: dist.all_reduce_coalesced([ones(), ones()], async_op=a))
    at.both("reduce", lambda a: dist.reduce(ones(), 0, async_op=a))
    at.both("all_gather", lambda a: dist.all_gather(parts(), ones(), async_op=a))
    at.both("all_gather_into_tensor", lambda a: dist.all_gather_into_tensor(ones(4 * SIZE), ones(), async_op=a))
    at.both("_all_gather_base", lambda a: dist._all_gather_base(ones(4 * SIZE), ones(), async_op=a))
    if hasattr(dist, "all_gather_single"):
        at.both("all_gather_single", lambda a: dist.all_gather_single(ones(4 * SIZE), ones(), async_op=a))
        at.both("reduce_scatter_single", lambda a: dist.reduce_scatter_single(ones(), ones(4 * SIZE), async_op=a))
    lists = [[ones(), ones()] for _ in range(SIZE)]
    at.both("all_gather_coalesced", lambda a: dist.all_gather_coalesced(lists, [ones(), ones()], async_op=a))
    at.both("gather", lambda a: dist.gather(ones(), parts() if root else None, dst=0, async_op=a))
    at.both("scatter", lambda a: dist.scatter(ones(), parts() if root else None, src=0, async_op=a))
    at.both("reduce_scatter", lambda a: dist.reduce_scatter(ones(), parts(), async_op=a))
    at.both("reduce_scatter_tensor", lambda a: dist.reduce_scatter_tensor(ones(), ones(4 * SIZE), async_op=a))
    at.both("_reduce_scatter_base", lambda a: dist._reduce_scatter_base(ones(), ones(4 * SIZE), async_op=a))
    at.both("all_to_all", lambda a: dist.all_to_all(parts(), parts(), async_op=a))
    at.both("all_to_all_single", lambda a: dist.all_to_all_single(ones(8), ones(8), async_op=a))
    splits = [1, 3] if root else [3, 1]
    at.both("all_to_all_single splits", lambda a: dist.all_to_all_single(ones(4), ones(4), splits, splits, async_op=a))
    rows, none = torch.ones(4, 3), [4, 0] if root else [0, 4]
    at.call("all_to_all_single splits of rows", lambda: dist.all_to_all_single(rows, rows.clone(), splits, splits))
    at.call("all_to_all_single empty splits", lambda: dist.all_to_all_single(ones(4), ones(4), none, none))
    at.both("barrier", lambda a: dist.barrier(async_op=a))
    at.call("monitored_barrier", dist.monitored_barrier)


def run_tensors_and_modes(at):
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64):
        at.call(f"all_reduce {str(dtype)[6:]}", lambda dtype=dtype: dist.all_reduce(ones(dtype=dtype)))
    at.call("broadcast bool", lambda: dist.broadcast(ones(dtype=torch.bool), 0))
    for name in ("MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)
        at.call(f"all_reduce {name.lower()}", lambda op=op: dist.all_reduce(ones(dtype=torch.int32), op=op))
    at.call("all_reduce avg", lambda: dist.all_reduce(ones(), op=dist.ReduceOp.AVG))
    at.call("all_reduce sparse", lambda: dist.all_reduce(torch.eye(3).to_sparse()))
    at.call("all_reduce empty", lambda: dist.all_reduce(ones(0)))
    at.call("all_reduce scalar", lambda: dist.all_reduce(torch.tensor(1.0)))
    at.call("all_reduce not contiguous", lambda: dist.all_reduce(torch.ones(4, 4).t()[::2]))
    at.call("all_reduce requires_grad", lambda: dist.all_reduce(ones(requires_grad=True)))
    at.call("all_reduce Parameter.data", lambda: dist.all_reduce(torch.nn.Parameter(ones()).data))
    at.call("all_reduce tensor subclass", lambda: dist.all_reduce(ones().as_subclass(Subclass)))
    at.call("all_reduce meta tensor", lambda: dist.all_reduce(ones(device="meta")))
    modes = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    for name, mode in modes.items():

        def in_mode(mode=mode):
            with mode():
                dist.all_reduce(ones())

        at.call(f"all_reduce {name}", in_mode)


def run_refused_calls(at):
    uneven = [ones(1 + i) for i in range(SIZE)]
    size = "invalid tensor size"
    at.both("all_gather uneven", lambda a: dist.all_gather(uneven, ones(1 + at.rank), async_op=a), size)
    at.call("all_gather of two dtypes", lambda: dist.all_gather([ones(dtype=torch.complex64)] * 2, ones()), size)
    at.call("all_gather into a short list", lambda: dist.all_gather([ones()], ones()), "expected length 2, got 1")
    pieces = [ones(1), ones(3)] if at.rank == 0 else [ones(3), ones(1)]
    at.both("all_to_all uneven", lambda a: dist.all_to_all(pieces, pieces, async_op=a), size)
    at.call(
        "all_to_all_single wrong splits",
        lambda: dist.all_to_all_single(ones(4), ones(4), [1, 1], [1, 1]),
        "Split sizes doesn't match total dim 0 size",
    )
    at.call("broadcast of a list", lambda: dist.broadcast([1.0], 0), "Expected parameter `tensor`")
    at.call("scatter without a list", lambda: dist.scatter(ones(), None, src=at.rank), "must be specified")
    at.call("isend to itself", lambda: dist.isend(ones(), at.rank), "RuntimeError")
    at.call("split_group without a device", lambda: dist.split_group(split_ranks=[[0, 1]]), "No device associated")


def run_objects(at):
    root = at.rank == 0
    at.call("all_gather_object", lambda: dist.all_gather_object([None] * SIZE, {"rank": at.rank}))
    at.call("gather_object", lambda: dist.gather_object(at.rank, [None] * SIZE if root else None, dst=0))
    at.call("broadcast_object_list", lambda: dist.broadcast_object_list([1, 2], src=0))
    at.call("scatter_object_list", lambda: dist.scatter_object_list([None], [1] * SIZE if root else None, src=0))
    at.pair("send/recv_object_list", lambda: dist.send_object_list([1], 1), lambda: dist.recv_object_list([None], 0))


def run_point_to_point(at):
    at.pair("send/recv", lambda: dist.send(ones(), 1), lambda: dist.recv(ones(), 0))
    at.pair("recv any", lambda: dist.send(ones(), 1), lambda: dist.recv(ones()))
    at.pair("isend/irecv", lambda: dist.isend(ones(), 1, tag=5).wait(), lambda: dist.irecv(ones(), 0, tag=5).wait())
    at.pair("irecv any", lambda: dist.send(ones(), 1), lambda: dist.irecv(ones()).wait())

    def exchange():
        operations = [dist.P2POp(dist.isend, ones(), at.other), dist.P2POp(dist.irecv, ones(), at.other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    at.call("batch_isend_irecv", exchange)

    def wait_for_all(issue, tags):
        for work in [issue(ones(), at.other, tag=tag) for tag in tags]:
            work.wait()

    at.pair(
        "isend/irecv, tags out of order",
        lambda: wait_for_all(dist.isend, (1, 2, 3)),
        lambda: wait_for_all(dist.irecv, (3, 1, 2)),
    )


def run_coalesced(at):
    kinds = {
        "all_reduce": lambda: dist.all_reduce(ones()),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ones(4 * SIZE), ones()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ones(), ones(4 * SIZE)),
    }

    def coalesced(issue, wait):
        with dist._coalescing_manager(async_ops=wait) as manager:
            for _ in range(3):
                issue()
        if wait:
            manager.wait()

    for name, issue in kinds.items():
        at.call(f"coalesced {name} sync", lambda issue=issue: coalesced(issue, False), tensors=3)
        at.call(f"coalesced {name} async", lambda issue=issue: coalesced(issue, True), tensors=3)


def main(folder):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, oracle = dist.get_rank(), Oracle(folder)
    for title, run in {
        "Collectives": run_collectives,
        "Tensors, reductions and modes": run_tensors_and_modes,
        "Calls that torch refuses": run_refused_calls,
        "Objects": run_objects,
        "Point to point": run_point_to_point,
        "Coalescing manager": run_coalesced,
    }.items():
        run(Section(oracle, rank, title))
    run_calls_in_context(oracle, rank)
    dist.barrier()
    oracle.destroy()
    oracle.write(rank)


if __name__ == "__main__":
    main(sys.argv[1])
