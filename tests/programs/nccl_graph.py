"""Capture an all_reduce in a CUDA graph and replay it, 2 ranks on one GPU; print what came out."""

import os

os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")

import torch
import torch.distributed as dist

REPLAYS = 5

torch.cuda.set_device(0)
dist.init_process_group("nccl")
values = torch.ones(8, device="cuda")
other = torch.ones(8, device="cuda")
beside = torch.cuda.Stream()
beside.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(beside):
    for _ in range(3):
        dist.all_reduce(other)
torch.cuda.current_stream().wait_stream(beside)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_reduce(values)
for _ in range(REPLAYS):
    graph.replay()
    dist.all_reduce(other, async_op=True).wait()
torch.cuda.synchronize()
print(f"rank {dist.get_rank()} {values[0].item():g} {other[0].item():g}")
del graph
dist.destroy_process_group()
