"""What a tap adds to the launch of one collective: dist.all_reduce of 10 floats, async, in a group of one rank.

A group of one has no partner to wait for, so the time is that of the call alone. Each measurement is a process of its
own, which times 4,800 calls one by one and prints their median: what a busy machine takes away does not count.
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
def launches_us():
    works, times = [], []
    for _ in range(400):
        begin = time.perf_counter_ns()
        work = dist.all_reduce(tensor, async_op=True)
        times.append((time.perf_counter_ns() - begin) / 1000)
        works.append(work)
    for work in works:
        work.wait()
    return times
launches_us()
print(statistics.median(us for _ in range(12) for us in launches_us()))
"""


def measure(environment: dict[str, str]) -> float:
    """Return the median launch time of one process, in us."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return float(result.stdout)


def measure_tapped(tap: TapChoice, folder: str) -> float:
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
            compared = pairs.in_turn(functools.partial(measure, bare), tapped, pairs=PAIRS, unit="us a launch")
            pairs.report(f"launch of a collective, {name}", compared, a="bare", b=name)


if __name__ == "__main__":
    main()
