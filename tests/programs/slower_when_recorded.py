"""Steps of 20 ms by the clock, MS more where a run is recorded: `slower_when_recorded.py MS STEPS`.

Stands for a profiler that costs something: the delay is in the program itself, so that its size is known.
"""

import os
import sys
import time

import torch

extra_s = float(sys.argv[1]) / 1000 if os.environ.get("DTPROF_RUN_DIR") else 0.0
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("noise on stdout")
for _ in range(int(sys.argv[2])):
    begin = time.monotonic()
    model(torch.ones(1, 2)).sum().backward()
    while (left := begin + 0.02 + extra_s - time.monotonic()) > 0:
        time.sleep(left)
    optimizer.step()
