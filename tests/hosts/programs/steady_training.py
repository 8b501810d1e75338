"""Train: each step computes, reduces gradients over all hosts, and prints nothing.

Arguments: steps, without them for ever; a rank that raises an exception halfway.
"""

import itertools
import sys

import torch
import torch.distributed as dist

numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]  # deepspeed adds options of its own
num_steps, raising = (*numbers, None, None)[:2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
weights, gradient = torch.ones(200, 200), torch.ones(40_000)
print(f"rank {dist.get_rank()} trains", flush=True)
for step in itertools.count() if num_steps is None else range(num_steps):
    if num_steps and step == num_steps // 2 and dist.get_rank() == raising:
        raise ValueError("as asked")
    for _ in range(20):
        weights = (weights @ weights).clamp(-1, 1)
    dist.all_reduce(gradient)
dist.destroy_process_group()
