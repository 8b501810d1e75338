"""What a tap adds to the launch of one collective: dist.all_reduce of 10 floats, async, in a group of one rank.

A group of one has no partner to wait for, so the time is that of the call alone. Each measurement is a process of its
own, which launches 12 rounds of 400 and prints two medians over the rounds: the CPU time of the launching thread a
launch, which what else runs on the machine hardly changes, and the wall time a launch, which it does.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pairs
from dtprof.launch import interpreter
from dtprof.launch.interpreter import TapChoice

PAIRS = 12
PROGRAM = """
import statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(10)
def launch_us():
    works = []
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(400):
        works.append(dist.all_reduce(tensor, async_op=True))
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    for work in works:
        work.wait()
    return cpu / 400_000, wall / 400_000
launch_us()
rounds = [launch_us() for _ in range(12)]
print(*(statistics.median(column) for column in zip(*rounds)))
"""


def measure(environment: dict[str, str]) -> tuple[float, float]:
    """Return the CPU and the wall time of a launch in one process, in us."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    cpu, wall = map(float, result.stdout.split())
    return cpu, wall


def measure_tapped(tap: TapChoice, folder: str) -> tuple[float, float]:
    """Return the same under a tap, recorded into a fresh run."""
    run = Path(tempfile.mkdtemp(dir=folder))
    return measure(interpreter.job_environment(run=run, tap=tap) | {"OMP_NUM_THREADS": "1"})


def main() -> None:
    """Compare bare with each tap."""
    bare = os.environ | {"OMP_NUM_THREADS": "1"}
    native = interpreter.choose_tap(sys.executable, native=True, environment=dict(bare), say=print)
    python = TapChoice(library=None, torch_version=native.torch_version, message=None)
    for name, tap in (("native tap", native), ("Python tap", python)):
        with tempfile.TemporaryDirectory() as folder:
            tapped = functools.partial(measure_tapped, tap, folder)
            cpu, wall = pairs.in_turn_of_two(
                functools.partial(measure, bare), tapped, pairs=PAIRS, units=("us CPU a launch", "us wall a launch")
            )
            for compared in (cpu, wall):
                pairs.report(f"launch of a collective, {name}", compared, a="bare", b=name)


if __name__ == "__main__":
    main()
