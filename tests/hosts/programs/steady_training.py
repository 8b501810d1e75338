"""Train: each step computes, reduces gradients over all hosts, takes a step of an optimizer, and prints nothing.

The backward pass before it is what makes dtprof count the step.

Arguments: steps, 0 or none for ever; a rank that raises an exception halfway; rounds of a step's work (20).
A file /tmp/more-work, where it is there, has the rounds that a step of this host takes beside those.
"""

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]  # deepspeed adds options of its own
num_steps, raising, rounds = *numbers, *(0, None, 20)[len(numbers) :]
more_work = Path("/tmp/more-work")
torch.set_num_threads(1)
dist.init_process_group("gloo")
weights, parameter = torch.ones(200, 200), torch.nn.Parameter(torch.ones(40_000))
optimizer = torch.optim.SGD([parameter], lr=0.01)
print(f"rank {dist.get_rank()} trains", flush=True)
for step in range(num_steps) if num_steps else itertools.count():
    if num_steps and step == num_steps // 2 and dist.get_rank() == raising:
        raise ValueError("as asked")
    for _ in range(rounds + (int(more_work.read_text() or 0) if more_work.exists() else 0)):
        weights = (weights @ weights).clamp(-1, 1)
    optimizer.zero_grad()
    parameter.sum().backward()
    dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
