"""What the native hook adds to an operation on a device with all its marks, on the simulated accelerator.

As `launch_cost` in quiet moments: processor time of the launching thread, while the streams are busy. A mark there is a
task of a stream; what the simulator takes to enqueue it is part of what is added, as a driver's time is on a GPU, where
`benchmarks.gpu.launch_on_device` measures the same.
"""

import os
import sys

from benchmarks import launch_cost, pairs
from dtprof.analysis.comparison.overhead_pairs import median_interval
from dtprof.launch import interpreter

LAUNCHES, PAIRS = 10, 100
MARKS = {"all_reduce": 1, "all_reduce waited for": 3, "all_reduce on the stream": 2}


def main() -> None:
    """Print what is added, for each way to issue an all_reduce."""
    hook = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    for operation, num_marks in MARKS.items():
        compared = launch_cost.in_quiet_moments(
            launch_cost.measure(hook, operation, launches=LAUNCHES, num_pairs=PAIRS, backend="simccl")
        )
        name = f"{operation}, {num_marks} mark(s)"
        pairs.report(name, compared, a="bare", b="recorded")
        added = median_interval(compared.differences)
        print(f"  added {added.median:.2f} us ({added.low:.2f} to {added.high:.2f})")


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
