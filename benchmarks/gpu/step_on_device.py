"""What recording adds to a step of the trainer, steps bare and recorded in turn, on one rank and on two.

One rank has the device to itself; two share it, and send over sockets: their kernels take turns, which is noise that
neither of both is spared. `benchmarks.step_cost` says how a step is made bare within a recorded job.
"""

import os
import sys

from benchmarks import pairs, step_cost
from benchmarks.gpu.figures import emit_ratio
from benchmarks.gpu.placement import rehearsed
from dtprof.launch import interpreter

GOAL = 0.002
CORPUS = ("--corpus", "docs")  # small: what there is of Python to read takes long
JOBS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    (
        "step of 181 M parameters, one rank",
        1,
        100,  # of which 300 pairs did not end in 110 s
        ("--preset", "gpu", "--batch-size", "16", "--share-devices", *CORPUS),
    ),
    (
        "step of 5 M parameters, 2 ranks",
        2,
        60,
        ("--preset", "small", "--precision", "bf16", "--batch-size", "64", "--share-devices", *CORPUS),
    ),
)
REHEARSAL = (("step, 2 ranks", 2, 8, ("--preset", "tiny")),)


def main() -> None:
    """Print what is added to wall and processor time, and what bare steps differ by among themselves."""
    hook = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    for name, num_ranks, num_pairs, arguments in REHEARSAL if rehearsed() else JOBS:
        ranks = step_cost.measure(hook, *arguments, num_ranks=num_ranks, num_pairs=num_pairs)
        for what, kind in enumerate(("wall time", "processor time")):
            recorded, noise = step_cost.compare(ranks, what)
            emit_ratio(f"{name}, {kind}", recorded, most=GOAL if what == 0 else None)
            emit_ratio(f"{name}, {kind}, bare against bare", noise)
            print(pairs.spread(recorded.a), pairs.spread(recorded.b))


if __name__ == "__main__":
    main()
