"""How long a command takes before it does anything: `dtprof --help` and `import dtprof`, beside a bare interpreter.

And what recording adds to the start of a rank: the processor time until a process has imported torch, joined a group of
one and ended its first step, the compiled hook being in the cache.
"""

import functools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import pairs
from dtprof.launch import interpreter
from dtprof.launch.interpreter import HookChoice

PAIRS = 15
RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""


def measure(*arguments: str) -> float:
    """Return the wall time of one process, in ms."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    return (time.perf_counter() - begin) * 1000


def start_rank(environment: Mapping[str, str]) -> float:
    """Return the processor time of one rank, in ms."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", RANK], env=dict(environment), check=True, capture_output=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def compare_ranks() -> None:
    """Compare the start of a rank without dtprof with that under each hook."""
    native = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    python = HookChoice(library=None, torch_version=native.torch_version, message=None)
    bare = os.environ | {"OMP_NUM_THREADS": "1"}
    for label, hook in (("native hook", native), ("Python hook", python)):
        with tempfile.TemporaryDirectory() as folder:
            armed = interpreter.job_environment(run=Path(folder), hook=hook) | {"OMP_NUM_THREADS": "1"}
            compared = pairs.in_turn(
                functools.partial(start_rank, bare),
                functools.partial(start_rank, armed),
                pairs=PAIRS,
                unit="ms of processor time",
            )
        pairs.report(f"start of a rank, {label}", compared, a="bare", b="recorded", digits=1)


def main() -> None:
    """Compare both with an interpreter that does nothing."""
    for label, arguments in (("dtprof --help", ["-m", "dtprof", "--help"]), ("import dtprof", ["-c", "import dtprof"])):
        nothing = functools.partial(measure, "-c", "pass")
        compared = pairs.in_turn(nothing, functools.partial(measure, *arguments), pairs=PAIRS, unit="ms")
        pairs.report(label, compared, a="python -c pass", b=label, digits=1)
    compare_ranks()


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
