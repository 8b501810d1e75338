"""Train for ever: each step computes, reduces gradients over all hosts, and prints nothing."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
weights, gradient = torch.ones(200, 200), torch.ones(40_000)
print(f"rank {dist.get_rank()} trains", flush=True)
while True:
    for _ in range(20):
        weights = (weights @ weights).clamp(-1, 1)
    dist.all_reduce(gradient)
