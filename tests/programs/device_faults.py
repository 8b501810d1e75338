"""Sound steps on the simulated accelerator, and then a fault of rank 1, or of the network, by name."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from tests.accelerator import simulated_device as sim

STEPS = 12
FAULT_AT = 8


def stays_away():
    time.sleep(1000)


def skips():
    return True


def calls_another():
    dist.all_reduce(torch.ones(4, device="sim"))
    return True


def runs_a_kernel_that_never_ends():
    sim.spin_forever()


def waits_for_its_device():
    sim.spin_forever()
    torch.ones(1, device="sim").item()


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def loses_the_network():
    sim.stall_network(0)


def is_late():
    time.sleep(2)


fault = globals()[sys.argv[1]]
dist.init_process_group("simccl")
rank = dist.get_rank()
for step in range(STEPS):
    gradients = torch.ones(8, device="sim")
    work = dist.all_reduce(gradients, async_op=True)
    torch.ones(64, device="sim").mul_(2)
    work.wait()
    skipped = fault() if step == FAULT_AT and (rank == 1 or fault is loses_the_network) else False
    if not skipped:
        dist.broadcast(gradients, 0)
    time.sleep(0.05)
    gradients[0].item()
dist.destroy_process_group()
