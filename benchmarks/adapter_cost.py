"""What the adapters of frameworks add: to the start of a rank, and to an operation of a job that uses none of them.

Each process first imports the modules of torch that adapters hook, so that installing them hooks all at once; its start
is the CPU time of importing and installing the adapters. Launches are timed before and after that, over gloo, CPU time.
"""

import subprocess
import sys
from statistics import median

from benchmarks import pairs

PROGRAM = """
import time
import torch.distributed as dist, torch
import torch.distributed.fsdp, torch.distributed.tensor, torch.distributed.pipelining, torch.distributed.rpc
import torch.distributed.checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(10)
def launch_us(calls=1000):
    started = time.thread_time_ns()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(calls)]
    taken = time.thread_time_ns() - started
    for work in works:
        work.wait()
    return taken / (1000 * calls)
def best():
    return min(launch_us() for _ in range(20))
launch_us()
before = best()
import dtprof.capture.recorder  # a rank has it without adapters
started = time.process_time_ns()
from dtprof.capture import frameworks
imported = time.process_time_ns()
frameworks.install(lambda _: None)
installed = time.process_time_ns()
print((imported - started) / 1e6, (installed - imported) / 1e6, before, best())
"""
ROUNDS = 5


def main() -> None:
    """Measure some processes, one after the other."""
    rounds = []
    for _ in range(ROUNDS):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        rounds.append(tuple(map(float, done.stdout.split())))
    imports, installs, before, after = zip(*rounds, strict=True)
    pairs.show("adapters", "import at the start of a rank, ms CPU", imports)
    pairs.show("adapters", "installation, all of torch's modules there, ms CPU", installs)
    compared = pairs.Comparison(unit="us CPU", a=before, b=after)
    pairs.report("adapters, a launch of all_reduce", compared, a="before", b="after")
    print(f"together {median(imports) + median(installs):.1f} ms")


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
