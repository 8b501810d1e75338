"""What a tap adds to the launch of one collective of 10 floats, async, in a group of one rank.

An all_reduce stands for the operations whose handle has a future, a reduce_scatter for those without (on gloo).
A group of one has no partner to wait for, so the time is that of the call alone. Bare and recorded rounds of 400
launches alternate within one process, so that both meet the same machine: in a bare round the dispatcher passes the
tap's kernels by and ProcessGroup has the methods it had before the tap. CPU time of the launching thread; 3 processes
of 60 pairs a tap. Each launch is awaited outside the timed part.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pairs
from dtprof.launch import interpreter
from dtprof.launch.interpreter import TapChoice

PROCESSES = 3
OPERATIONS = ("all_reduce", "reduce_scatter")
PROGRAM = """
import sys, time, torch, torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ours = dict(vars(ProcessGroup))
bare = {name: getattr(method, "_dtprof_shortcut", method) for name, method in ours.items()}
changed = [name for name in ours if ours[name] is not bare[name]]
if changed:  # as the class had them: bound like any method of the extension
    import ctypes
    new = ctypes.pythonapi.PyInstanceMethod_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.py_object]
    bare = {name: new(bare[name]) for name in changed}
exclude, key = torch._C._dispatch_tls_set_dispatch_key_excluded, torch._C.DispatchKey.BackendSelect
tensor, result = torch.ones(10), torch.ones(10)
launch = {
    "all_reduce": lambda: dist.all_reduce(tensor, async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter(result, [tensor], async_op=True),
}[sys.argv[1]]
def launch_us(recorded):
    for name in changed:
        setattr(ProcessGroup, name, (ours if recorded else bare)[name])
    works = []
    exclude(key, not recorded)
    begun = time.thread_time_ns()
    for _ in range(400):
        works.append(launch())
    taken = time.thread_time_ns() - begun
    exclude(key, False)
    for work in works:
        work.wait()
    return taken / 400_000
for _ in range(3):
    launch_us(False), launch_us(True)
for _ in range(60):
    print(launch_us(False), launch_us(True))
"""


def measure(tap: TapChoice, operation: str) -> pairs.Comparison:
    """Return the rounds of all processes, in us a launch."""
    rounds = []
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as folder:
            environment = interpreter.job_environment(run=Path(folder), tap=tap) | {"OMP_NUM_THREADS": "1"}
            result = subprocess.run(
                [sys.executable, "-c", PROGRAM, operation],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            )
            if not list(Path(folder).glob("rank-*")):
                raise RuntimeError(f"nothing was recorded: {result.stderr}")
            rounds += [tuple(map(float, line.split())) for line in result.stdout.splitlines()]
    return pairs.Comparison(
        unit="us CPU a launch", a=tuple(bare for bare, _ in rounds), b=tuple(recorded for _, recorded in rounds)
    )


def main() -> None:
    """Compare bare with each tap, for each operation."""
    native = interpreter.choose_tap(sys.executable, native=True, environment=dict(os.environ), say=print)
    python = TapChoice(library=None, torch_version=native.torch_version, message=None)
    for name, tap in (("native tap", native), ("Python tap", python)):
        for operation in OPERATIONS:
            pairs.report(f"launch of {operation}, {name}", measure(tap, operation), a="bare", b=name)


if __name__ == "__main__":
    main()
