"""Known times on the simulated accelerator; what its tasks really did goes to a file of each rank in a folder."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import dtprof
from tests.accelerator import simulated_device as sim

MS = 1_000_000
LEAD_NS = 40 * MS
TOO_MANY = 9_000
REPLAYS = 3

dist.init_process_group("simccl")
rank = dist.get_rank()
values = torch.ones(4, device="sim")
dist.all_reduce(values)
sim.synchronize()
sim.set_cost("simccl::ALLREDUCE", 10 * MS)
sim.configure(trace=1)
for _ in range(4):
    sim.spin(LEAD_NS + 5 * MS * rank)  # the hosts get ahead, and the device of rank 1 comes 5 ms later
    work = dist.all_reduce(values, async_op=True)
    sim.spin(4 * MS)
    work.wait()
    dist.all_reduce(values)
    sim.synchronize()
other = 1 - rank
sim.spin(LEAD_NS)
messages = [dist.P2POp(dist.isend, values, other), dist.P2POp(dist.irecv, torch.ones(4, device="sim"), other)]
for request in dist.batch_isend_irecv(messages):
    request.wait()
sim.synchronize()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([task._asdict() for task in sim.take_trace()]))

sim.spin(LEAD_NS)
with dtprof.phase("of 3 ms"):
    sim.spin(3 * MS)
torch._C._CUDAGraph.replay = lambda _graph: sim.spin(2 * MS)  # there are no graphs here: what a replay costs
graph = object.__new__(torch.cuda.CUDAGraph)
graph._tracker = None  # of the inputs, where torch has one
for _ in range(REPLAYS):
    graph.replay()
with sim.capturing(), dtprof.phase("in a graph"):
    pass
if os.fork() == 0:
    with dtprof.phase("in a child"):
        os._exit(0)
os.wait()

sim.spin_forever()
for _ in range(TOO_MANY):
    with dtprof.phase("one of many"):
        pass
sim.release_all()
sim.synchronize()
dist.destroy_process_group()
