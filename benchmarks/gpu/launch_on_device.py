"""What the hook adds to the launch of one asynchronous collective of NCCL on the host: processor time of the thread.

As `benchmarks.launch_cost`, in a group of one rank on the device, which is synchronised between rounds. Another figure
is a bare launch, in another process, without the timing of NCCL's events that `dtprof run` turns on.
"""

import os
import sys

from benchmarks import launch_cost
from benchmarks.gpu.figures import Figure, emit, is_below
from benchmarks.gpu.placement import backend
from dtprof.analysis.comparison.overhead_pairs import median_interval
from dtprof.launch import interpreter

LAUNCHES, PAIRS = 50, 150
MOST_US = 2.0
WITHOUT_TIMING = {"TORCH_NCCL_ENABLE_TIMING": "0"}


def main() -> None:
    """Print what is added, for each operation."""
    hook = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    for operation in (*launch_cost.OPERATIONS, *launch_cost.WITH_ALL_MARKS):
        compared = launch_cost.measure(hook, operation, launches=LAUNCHES, num_pairs=PAIRS, backend=backend())
        bare, added = median_interval(compared.a), median_interval(compared.differences)
        emit(Figure(name=f"launch of {operation}, bare", value=bare.median, unit="us", low=bare.low, high=bare.high))
        emit(
            Figure(
                name=f"launch of {operation}: added",
                value=added.median,
                unit="us",
                low=added.low,
                high=added.high,
                count=len(compared.a),
                goal=f"at most {MOST_US:g} us",
                met=is_below(added, MOST_US),
            )
        )
    untimed = launch_cost.measure(
        hook, "all_reduce", launches=LAUNCHES, num_pairs=PAIRS, backend=backend(), environment=WITHOUT_TIMING
    )
    bare = median_interval(untimed.a)
    emit(Figure(name="launch of all_reduce, bare, untimed", value=bare.median, unit="us", low=bare.low, high=bare.high))


if __name__ == "__main__":
    main()
