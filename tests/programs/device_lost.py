"""Phases of 3 ms on the simulated accelerator; its clock jumps ahead by 5 s, and in the end the device is lost.

Each part goes on until the log of the rank says what has come of it.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dtprof
from tests.accelerator import simulated_device as sim

MS = 1_000_000
ANCHORED_S = 1.5
"""Longer than it takes dtprof to compare the clocks again."""
PATIENCE_S = 60


def has_noted(words: str) -> bool:
    return any(words in file.read_text() for file in Path(os.environ["DTPROF_RUN_DIR"]).rglob("strings.jsonl"))


def compute() -> None:
    with dtprof.phase("of 3 ms"):
        sim.spin(3 * MS)
    sim.synchronize()


dist.init_process_group("simccl")
dist.all_reduce(torch.ones(1, device="sim"))  # from here on the device is followed
started = time.monotonic()
while time.monotonic() < started + ANCHORED_S:
    compute()
sim.configure(clock_ahead_ns=5000 * MS)
while not has_noted("jumped") and time.monotonic() < started + PATIENCE_S:
    compute()
for _ in range(20):
    compute()
Path(sys.argv[1]).write_text(str(time.monotonic_ns()))
sim.lose_device("Xid 79: the GPU has fallen off the bus")
while not has_noted("not recorded any more") and time.monotonic() < started + PATIENCE_S:
    with dtprof.phase("without a device"):
        time.sleep(0.001)
