"""What recording adds to a step of the trainer on 4 ranks, of the tiny preset or of that which BENCHMARK_PRESET names.

Steps of one job are recorded and bare in turn (`alternating_steps`), so that both meet the same machine: from job to
job a step of 4 ranks on 2 cores differs by 5 % and more, recorded or not. Wall time of a step on rank 0, which waits
for all others, and processor time of a step, mean of the ranks. Bare steps against the bare steps next to them say what
noise alone gives. A step of a larger preset takes ten times as long: there are fewer pairs then, of the native hook
alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import alternating_steps, pairs
from dtprof.launch import interpreter
from dtprof.launch.interpreter import HookChoice

PRESET = os.environ.get("BENCHMARK_PRESET", "tiny")
PAIRS = int(os.environ.get("BENCHMARK_PAIRS", "400" if PRESET == "tiny" else "100"))
RANKS = 4


def measure(
    hook: HookChoice,
    *arguments: str,
    num_ranks: int = RANKS,
    num_pairs: int = PAIRS,
) -> list[dict[str, list[tuple[int, int]]]]:
    """Return what each rank measured; `arguments` are the trainer's."""
    steps = alternating_steps.SETTLED + 1 + num_pairs // 2 * len(alternating_steps.ORDER)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    trainer = ["-m", "benchmarks.alternating_steps", *arguments, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        armed = interpreter.job_environment(run=Path(folder), hook=hook)
        later = {f"{alternating_steps.LATER}{name}": armed[name] for name in armed if name.startswith("DTPROF_")}
        environment = os.environ | later | {alternating_steps.RESULTS: folder}
        command = [sys.executable, *torchrun, *trainer]
        job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=7200, check=False)
        if job.returncode:
            raise RuntimeError(f"the trainer ended with {job.returncode}: {job.stderr[-2000:]}")
        documents = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
        if not documents[0]["operators"] or not [path for path in Path(folder).glob("rank-*") if path.is_dir()]:
            raise RuntimeError("nothing was recorded")
    return [document["times"] for document in documents]


def compare(ranks: list[dict[str, list[tuple[int, int]]]], what: int) -> tuple[pairs.Comparison, pairs.Comparison]:
    """Compare bare with recorded, and bare with the next bare; `what` is 0 for wall time, 1 for processor time."""

    def steps(kind: str) -> list[float]:
        used = ranks if what else ranks[:1]
        return [
            statistics.mean(step[what] for step in steps) / 1e6 for steps in zip(*(r[kind] for r in used), strict=True)
        ]

    bare, recorded = steps("bare"), steps("recorded")
    unit = "ms of processor time a step" if what else "ms a step"
    count = min(len(bare), len(recorded))
    noise = pairs.Comparison(unit=unit, a=tuple(bare[0 : len(bare) // 2 * 2 : 2]), b=tuple(bare[1::2]))
    return pairs.Comparison(unit=unit, a=tuple(bare[:count]), b=tuple(recorded[:count])), noise


def main() -> None:
    """Compare bare with each hook."""
    native = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    python = HookChoice(library=None, torch_version=native.torch_version, message=None)
    hooks = [("native hook", native)] + [("Python hook", python)] * (PRESET == "tiny")
    for label, hook in hooks:
        ranks = measure(hook, "--preset", PRESET)
        for what in (0, 1):
            recorded, noise = compare(ranks, what)
            name = f"step of --preset {PRESET} on {RANKS} ranks"
            pairs.report(f"{name}, {label}", recorded, a="bare", b="recorded")
            pairs.report(f"{name}, bare again", noise, a="bare", b="bare again")


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
