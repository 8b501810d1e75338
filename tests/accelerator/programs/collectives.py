"""Every collective against its definition on 2 ranks, then what three of them cost on the streams, as JSON a rank."""

import json
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.accelerator import simulated_device as sim

MS = 1_000_000


def on_sim(*values: float) -> torch.Tensor:
    """Make a tensor on the device."""
    return torch.tensor(values, dtype=torch.float32, device="sim")


def check_collectives(rank: int) -> None:
    """Compare each with its definition; both ranks hold other values."""
    for op, expected in (("SUM", [3, 4]), ("AVG", [1.5, 2]), ("MAX", [2, 2])):
        reduced = on_sim(1.0 + rank, 2.0)
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op))
        assert reduced.tolist() == expected, op
    flags = on_sim(0.0, float(rank)).bool()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    assert flags.tolist() == [False, True]
    value = on_sim(5.0 + rank)
    dist.broadcast(value, 1)
    assert value.tolist() == [6]
    value = on_sim(1.0 + rank)
    dist.reduce(value, 0)
    assert value.tolist() == [3 if rank == 0 else 2]
    gathered = torch.empty(2, device="sim")
    dist.all_gather_into_tensor(gathered, on_sim(float(rank)))
    assert gathered.tolist() == [0, 1]
    listed = [torch.empty(1, device="sim") for _ in range(2)]
    dist.all_gather(listed, on_sim(float(rank)))
    assert [t.item() for t in listed] == [0, 1]
    part = torch.empty(1, device="sim")
    dist.reduce_scatter_tensor(part, on_sim(1.0 + rank, 10.0 + rank))
    assert part.item() == [3, 21][rank]
    dist.reduce_scatter(part, [on_sim(2.0 + rank), on_sim(20.0 + rank)])
    assert part.item() == [5, 41][rank]
    exchanged = torch.empty(2, device="sim")
    dist.all_to_all_single(exchanged, on_sim(10.0 * rank, 10.0 * rank + 1))
    assert exchanged.tolist() == [rank, 10 + rank]
    scattered = torch.empty(1, device="sim")
    dist.scatter(scattered, [on_sim(7.0), on_sim(8.0)] if rank == 0 else None)
    assert scattered.item() == 7 + rank
    dist.gather(on_sim(3.0 + rank), listed if rank == 1 else None, dst=1)
    assert rank == 0 or [t.item() for t in listed] == [3, 4]
    objects: list[dict[str, int]] = [{}, {}]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    group = dist.new_group([0, 1])
    assert functional.all_reduce(on_sim(1.0), "sum", group).tolist() == [2]
    first, second = on_sim(1.0), on_sim(2.0)
    with _coalescing_manager(device=torch.device("sim", 0), async_ops=True) as coalesced:
        dist.all_reduce(first)
        dist.all_reduce(second)
    coalesced.wait()
    assert (first.item(), second.item()) == (2, 4)
    dist.barrier()


def check_messages(rank: int) -> None:
    """Send to and fro, then both ways at once."""
    received = on_sim(0.0)
    if rank == 0:
        dist.send(on_sim(42.0), 1)
        dist.recv(received, 1)
        assert received.item() == 43
    else:
        dist.recv(received, 0)
        dist.send(received + 1, 0)
    sent, received = on_sim(float(rank)), on_sim(-1.0)
    both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert received.item() == 1 - rank


def start_together() -> None:
    """Let the current streams of all ranks stand until one time, 100 ms ahead of the hosts."""
    latest = torch.tensor([sim.now()])
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    sim.spin_until(int(latest.item()) + 100 * MS)


def measure(rank: int, late_ns: int, communicate: Callable[[torch.Tensor], dist.Work | None]) -> dict[str, float]:
    """Communicate over 4 ms of compute, rank 1's device `late_ns` late; return ms on the streams."""
    events = [torch.Event("sim", enable_timing=True) for _ in range(4)]
    tensor = on_sim(1.0)
    sim.synchronize()
    sim.take_trace()
    start_together()
    if rank == 1:
        sim.spin(late_ns)
    events[0].record()
    work = communicate(tensor)
    events[1].record()
    sim.spin(4 * MS)
    events[2].record()
    if work is not None:
        work.wait()
    events[3].record()
    completed = work is not None and work.is_completed()
    sim.synchronize()
    [task] = [task for task in sim.take_trace() if task.name.startswith("simccl")]
    call, _, wait = (a.elapsed_time(b) for a, b in pairwise(events))
    return {
        "call": call,
        "exposed": wait,
        "wait": (task.met_ns - task.start_ns) / MS,
        "transfer": (task.end_ns - task.met_ns) / MS,
        "completed_when_wait_returned": completed,
    }


def main() -> None:
    """Check, measure, print."""
    dist.init_process_group("cpu:gloo,sim:simccl")
    rank = dist.get_rank()
    sim.set_device(0)
    check_collectives(rank)
    check_messages(rank)
    sim.configure(trace=1)
    for name in ("ALLREDUCE", "SEND", "RECV"):
        sim.set_cost(f"simccl::{name}", 10 * MS)
    measured = {
        "async": measure(rank, 0, lambda t: dist.all_reduce(t, async_op=True)),
        "async_late": measure(rank, 5 * MS, lambda t: dist.all_reduce(t, async_op=True)),
        "sync_late": measure(rank, 5 * MS, dist.all_reduce),
        "message": measure(rank, 5 * MS, lambda t: dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)),
    }
    print(json.dumps({"rank": rank, **measured}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
