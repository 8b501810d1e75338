"""Changes made in programs against `dtprof whatif`: `python -m benchmarks.changed_programs [--repeats 8] [NAME...]`.

Each program of 2 ranks on gloo is recorded as it is, and the change is predicted. Then it runs without dtprof, in
turns as it is and changed: the ratio of their medians in a turn depends little on how busy the machine is.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks import pairs

STEPS, TURN, RIGHT = 30, 6, 0.10
CHANGES = {
    "accumulation": "--sync last",
    "buffers": "--without broadcast",
    "barrier": "--without barrier",
    "by-hand": "--buckets 25MB",
    "buckets": "--buckets 25MB",
    "data": "--fix phase=data",
    "collections": "--fix phase=garbage_collection",
    "slow-rank": "--fix rank=1",
}
"""What `whatif` is asked for each program."""


def make_step(name: str, *, changed: bool) -> Callable[[], None]:
    """Return a step of a program, as it is or changed."""
    import gc

    import torch
    import torch.distributed as dist
    from torch import _utils, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    utilities, delays, sleep = (cast(Any, one) for one in (_utils, [0.02] * 1000, time.sleep))
    rows = iter(DataLoader(delays, batch_size=None, collate_fn=sleep))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()) for _ in range(6)]
    model: Any = nn.Sequential(*layers)
    if name != "by-hand":
        size = 1 if name == "buckets" and not changed else 25
        buffers = name == "buffers" and not changed
        model = DistributedDataParallel(model, broadcast_buffers=buffers, bucket_cap_mb=size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(64, 512)
    passes = 4 if name == "accumulation" else 1

    def step() -> None:
        if name == "data" and not changed:
            next(rows)
        if name == "slow-rank" and not changed and dist.get_rank() == 1:
            time.sleep(0.03)
        for number in range(passes):
            is_last = number == passes - 1 or not changed
            with contextlib.nullcontext() if is_last else model.no_sync():
                model(inputs).square().mean().backward()
        if name == "by-hand":
            gradients = [parameter.grad for parameter in model.parameters()]
            reduced = [utilities._flatten_dense_tensors(gradients)] if changed else gradients
            for one in reduced:
                dist.all_reduce(one)
            parts = utilities._unflatten_dense_tensors(reduced[0], gradients) if changed else gradients
            torch._foreach_copy_(gradients, parts)
        if name == "barrier" and not changed:
            dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
        if name == "collections" and not changed:
            gc.collect()

    return step


def work(name: str, turns: int) -> None:
    """Run a program in this rank: as it is, or in so many turns, of which rank 0 prints the ratios."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    programs = [make_step(name, changed=changed) for changed in ((False, True) if turns else (False,))]
    ratios = []
    for _ in range(turns + 1 if turns else STEPS // TURN):
        medians = [statistics.median(timeit.repeat(step, number=1, repeat=TURN)) for step in programs]
        ratios.append(medians[-1] / medians[0])
    if turns and dist.get_rank() == 0:
        print("RATIOS", json.dumps(ratios[1:]))  # the first turn warms up
    programs.clear()
    dist.destroy_process_group()


def run(command: Sequence[str]) -> str:
    """Run a command; return what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def compare(name: str, folder: Path, turns: int) -> str:
    """Return the row of a program."""
    tools = Path(sys.executable).parent
    ranks = [str(tools / "torchrun"), "--standalone", "--nproc-per-node", "2", __file__, "--work", name]
    recorded = str(folder / name)
    run([str(tools / "dtprof"), "run", "--force", "-o", recorded, "--", *ranks])
    found = json.loads(run([str(tools / "dtprof"), "whatif", recorded, *CHANGES[name].split(), "--json"]))
    printed = next(line for line in run([*ranks, "--turns", str(turns)]).splitlines() if line.startswith("RATIOS"))
    low, real, high = statistics.quantiles(json.loads(printed.partition(" ")[2]), n=4)
    shown = f"| {name} | `{CHANGES[name]}` | {real:.2f} ({low:.2f} to {high:.2f}) |"
    scenario = next(iter(found["scenarios"]), None)
    if scenario is None or scenario["gain"] is None:
        return f"{shown} none: {found['cannot_tell'][-1]} | - | abstained |"
    ratio, (least, most) = 1 - scenario["gain"], scenario["interval"]
    is_right = abs(ratio / real - 1) <= RIGHT or least <= 1 - real <= most
    return f"{shown} {ratio:.2f} | {1 - most:.2f} to {1 - least:.2f} | {'right' if is_right else 'wrong'} |"


def main(arguments: Sequence[str]) -> int:
    """Print a table: the changed step over the present one, as measured and as predicted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changed_programs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHANGES)} (default: all)")
    parser.add_argument("--repeats", type=int, default=8, help="turns of each program (default: 8)")
    parser.add_argument("--folder", type=Path, default=Path("changed-programs"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.work, options.turns)
        return 0
    print(pairs.machine())
    print("| program | change | step after / before, real | predicted | interval | |\n|---|---|---|---|---|---|")
    for name in options.names or CHANGES:
        print(compare(name, options.folder, options.repeats), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
