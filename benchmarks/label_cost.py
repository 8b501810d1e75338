"""What the hooks into frameworks add to a call that they watch: a label around it, or a span of a pipeline stage.

The functions are torch's own, on objects for which they return at once, so that their time is that of the call. Rounds
with the hook and without it (the function that it wraps) alternate in one process; CPU time of the thread.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pairs
from dtprof.launch import interpreter
from dtprof.launch.interpreter import HookChoice

PROGRAM = """
import sys, time, types, torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.stage import _PipelineStageBase
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "label":
    hooked, calls, rest = FSDPParamGroup.unshard, 2000, ()
    own = types.SimpleNamespace(_all_gather_result=1, _module_fqn="layers.4")
else:
    hooked, calls, rest = _PipelineStageBase.perform_reduce_grad, 200, (1,)
    own = types.SimpleNamespace(submod=None, stage_index=3)
def call_us(function):
    started = time.thread_time_ns()
    for _ in range(calls):
        function(own, *rest)
    return (time.thread_time_ns() - started) / (1000 * calls)
for _ in range(3):
    call_us(hooked), call_us(hooked.__wrapped__)
for _ in range(60):
    print(call_us(hooked.__wrapped__), call_us(hooked))
"""


def measure(hook: HookChoice, what: str) -> pairs.Comparison:
    """Return the rounds of one process, in us a call."""
    with tempfile.TemporaryDirectory() as folder:
        environment = interpreter.job_environment(run=Path(folder), hook=hook) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, what]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    rounds = [tuple(map(float, line.split())) for line in result.stdout.splitlines()]
    return pairs.Comparison(
        unit="us CPU a call", a=tuple(bare for bare, _ in rounds), b=tuple(hooked for _, hooked in rounds)
    )


def main() -> None:
    """Compare calls with and without a hook, recorded by the native hook."""
    native = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    pairs.report("a label around a call", measure(native, "label"), a="bare", b="hooked")
    pairs.report("an action of a pipeline stage", measure(native, "action"), a="bare", b="hooked")


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
