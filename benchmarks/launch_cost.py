"""What a hook adds to the launch of one collective of 10 floats, async, in a group of one rank.

An all_reduce stands for the operations whose handle has a future, a reduce_scatter for those without (on gloo).
A group of one has no partner to wait for, so the time is that of the call alone. Bare and recorded rounds of 400
launches alternate within one process, so that both meet the same machine: in a bare round the dispatcher passes the
hook's kernels by and ProcessGroup has the methods it had before the hook. CPU time of the launching thread; 3 processes
of 60 pairs a hook, every second of which begins with the recorded round. One launch before each round warms the caches
after the switch; it is not timed, nor are the waits.

For the native hook there is a second figure, in quiet moments: rounds of 10 launches, 3,000 pairs a process, of which
the quickest tenth is taken, by the time of both rounds together, so that neither is favoured. A neighbour on the
machine slows such a pair as a whole or leaves it alone. Left out is what is seen only with many handles in flight, or
now and then: memory that the allocator must look for, a new segment, a line of code seen for the first time, cold
caches. The Python hook is not measured so: with each switch of its methods the interpreter specialises anew.

A synchronous call waits for a thread of gloo, which a group of one has, too. Its cost is measured in time of the clock,
the wakes of both threads included: their spread is that of the system's scheduler, so that the quickest tenth of the
rounds is given as well. A functional call enters the dispatcher from C++.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import pairs
from dtprof.launch import interpreter
from dtprof.launch.interpreter import HookChoice

PROCESSES = 3
LAUNCHES, PAIRS = 400, 60
QUIET_LAUNCHES, QUIET_PAIRS = 10, 3000
QUIET_SHARE = 0.1
OPERATIONS = ("all_reduce", "reduce_scatter")
WAITING = ("all_reduce on the stream", "functional all_reduce")
"""Synchronous: on a processor, the calling thread sleeps until the operation is complete."""
WITH_ALL_MARKS = ("all_reduce waited for", "all_reduce on the stream")
"""On a device, where a wait stalls the stream alone: 3 marks, of its begin and around the wait, and 2 marks."""
PROGRAM = """
import sys, time, torch, torch.distributed as dist
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import ProcessGroup
backend = sys.argv[4]
device = {"nccl": "cuda", "simccl": "sim"}.get(backend, "cpu")
if device == "sim":
    from tests.accelerator import simulated_device
    simulated_device.give_kernel_events()
    backend = "cpu:gloo,sim:simccl"
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
ours = dict(vars(ProcessGroup))
bare = {name: getattr(method, "_dtprof_shortcut", method) for name, method in ours.items()}
changed = [name for name in ours if ours[name] is not bare[name]]
if changed:  # as the class had them: bound like any method of the extension
    import ctypes
    new = ctypes.pythonapi.PyInstanceMethod_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.py_object]
    bare = {name: new(bare[name]) for name in changed}
exclude, key = torch._C._dispatch_tls_set_dispatch_key_excluded, torch._C.DispatchKey.BackendSelect
tensor, result = torch.ones(10, device=device), torch.ones(10, device=device)
group, functional = dist.group.WORLD.group_name, torch.ops._c10d_functional
clock = time.perf_counter_ns if sys.argv[5] == "wall" else time.thread_time_ns
def call_from_cpp():
    functional.wait_tensor(functional.all_reduce_(tensor, "sum", group))  # in place: without BackendSelect none is made
launch = {
    "functional all_reduce": call_from_cpp,
    "all_reduce": lambda: dist.all_reduce(tensor, async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter(result, [tensor], async_op=True),
    "all_reduce waited for": lambda: dist.all_reduce(tensor, async_op=True).wait() and None,
    "all_reduce on the stream": lambda: dist.all_reduce(tensor),
}[sys.argv[1]]
launches, pairs = map(int, sys.argv[2:4])
def launch_us(recorded):
    for name in changed:
        setattr(ProcessGroup, name, (ours if recorded else bare)[name])
    works = []
    if device == "sim":  # its streams are busy: the host wakes no thread of theirs
        simulated_device.spin_forever()
    exclude(key, not recorded)
    if (work := launch()) is not None:
        work.wait()
    started = clock()
    for _ in range(launches):
        works.append(launch())
    taken = clock() - started
    exclude(key, False)
    for work in works:
        if work is not None:
            work.wait()
    if device == "sim":
        simulated_device.release_all()
    if device != "cpu":
        torch.accelerator.synchronize()
    return taken / (1000 * launches)
for _ in range(min(1 + 1000 // launches, pairs // 2)):
    launch_us(False), launch_us(True)
rounds = []
for number in range(pairs):
    first = bool(number % 2)
    taken = {first: launch_us(first)} | {not first: launch_us(not first)}
    rounds.append((taken[False], taken[True]))
for bare_us, recorded_us in rounds:
    print(bare_us, recorded_us)
works = None
dist.destroy_process_group()
"""


def measure(
    hook: HookChoice,
    operation: str,
    *,
    launches: int = LAUNCHES,
    num_pairs: int = PAIRS,
    backend: str = "gloo",
    wall: bool = False,
    environment: Mapping[str, str] | None = None,
) -> pairs.Comparison:
    """Return the rounds of all processes, in us a launch."""
    rounds = []
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as folder:
            armed = interpreter.job_environment(run=Path(folder), hook=hook) | {"OMP_NUM_THREADS": "1"}
            result = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    PROGRAM,
                    operation,
                    str(launches),
                    str(num_pairs),
                    backend,
                    "wall" if wall else "cpu",
                ],
                env=armed | dict(environment or {}),
                capture_output=True,
                text=True,
                check=True,
                timeout=300,
            )
            if not list(Path(folder).glob("rank-*")):
                raise RuntimeError(f"nothing was recorded: {result.stderr}")
            rounds += [tuple(map(float, line.split())) for line in result.stdout.splitlines()]
    return pairs.Comparison(
        unit="us a call" if wall else "us CPU a launch",
        a=tuple(bare for bare, _ in rounds),
        b=tuple(recorded for _, recorded in rounds),
    )


def in_quiet_moments(comparison: pairs.Comparison) -> pairs.Comparison:
    """Return the quickest pairs, by the time of both rounds together."""
    quickest = sorted(zip(comparison.a, comparison.b, strict=True), key=sum)[: int(len(comparison.a) * QUIET_SHARE)]
    return pairs.Comparison(unit=comparison.unit, a=tuple(a for a, _ in quickest), b=tuple(b for _, b in quickest))


def main() -> None:
    """Compare bare with each hook, for each operation."""
    native = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    python = HookChoice(library=None, torch_version=native.torch_version, message=None)
    for name, hook in (("native hook", native), ("Python hook", python)):
        for operation in OPERATIONS:
            pairs.report(f"launch of {operation}, {name}", measure(hook, operation), a="bare", b=name)
            if hook is native:
                quiet = in_quiet_moments(measure(hook, operation, launches=QUIET_LAUNCHES, num_pairs=QUIET_PAIRS))
                pairs.report(f"launch of {operation}, {name}, in quiet moments", quiet, a="bare", b=name)
        for operation in WAITING:
            call = measure(hook, operation, launches=QUIET_LAUNCHES, num_pairs=QUIET_PAIRS, wall=True)
            pairs.report(f"call of {operation}, {name}", call, a="bare", b=name)
            pairs.report(f"call of {operation}, {name}, quickest tenth", in_quiet_moments(call), a="bare", b=name)


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
