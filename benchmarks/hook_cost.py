"""What the hooks of phases, steps and memory add to a step, in processor time of the thread that trains.

One process trains a model of 20 layers, too small to hide anything, with a data loader, one optimizer and no
communication. Bare and recorded processes in turn.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pairs

PAIRS = 8
PROGRAM = """
import statistics, sys, time
import torch
from torch.utils.data import DataLoader

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(20))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
times = []
for batch in DataLoader(torch.ones(4000, 16), batch_size=1):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.thread_time_ns())
steps = [b - a for a, b in zip(times[200:], times[201:])]
print(statistics.median(steps) / 1000)
"""


def measure(folder: Path, *, options: list[str] | None) -> float:
    """Return the median step of one process, in microseconds of processor time."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-c", PROGRAM]
    if options is not None:
        command = [sys.executable, "-m", "dtprof", "run", "-o", str(run), *options, "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=environment)
    return float(done.stdout)


def main() -> None:
    """Compare recorded with bare, and bare with bare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = functools.partial(measure, folder, options=None)
        variants: tuple[tuple[str, list[str] | None], ...] = (
            ("native tap", []),
            ("Python tap", ["--no-native"]),
            ("bare again", None),
        )
        for label, options in variants:
            other = functools.partial(measure, folder, options=options)
            compared = pairs.in_turn(bare, other, pairs=PAIRS, unit="us of processor time a step, median")
            pairs.report(f"hooks of phases, steps and memory, {label}", compared, a="bare", b=label)


if __name__ == "__main__":
    main()
