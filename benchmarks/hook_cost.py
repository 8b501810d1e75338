"""What the hooks of phases, steps and memory add to a step, in processor time of the thread that trains.

One recorded process trains a model of 20 layers, too small to hide anything, with a data loader, one optimizer and no
communication. It takes its hooks out and puts them back again, in turn, every 50 steps: neighbours make a pair.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pairs

PROGRAM = """
import json, time
import torch
import torch.optim.optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(20))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

BLOCK, BLOCKS, WARM_UP = 50, 60, 4
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)

def train(batches):
    began = time.thread_time_ns()
    for _ in range(BLOCK):
        model(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.thread_time_ns() - began) / BLOCK / 1000

batches = iter(DataLoader(torch.ones((BLOCKS + WARM_UP) * BLOCK * 2, 16), batch_size=1))
for _ in range(WARM_UP):
    train(batches)
places = [(torch.autograd, "backward"), (_BaseDataLoaderIter, "__next__"), (Model, "forward")]
hooked = [getattr(owner, name) for owner, name in places]
tables = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
kept = [dict(table) for table in tables]
assert all(map(len, kept))
pairs = []
for _ in range(BLOCKS):
    for (owner, name), function in zip(places, hooked):
        setattr(owner, name, function.__wrapped__)
    for table in tables:
        table.clear()
    bare = train(batches)
    for (owner, name), function in zip(places, hooked):
        setattr(owner, name, function)
    for table, hooks in zip(tables, kept):
        table.update(hooks)
    pairs.append((bare, train(batches)))
print(json.dumps(pairs))
"""


def measure(folder: Path, options: list[str]) -> pairs.Comparison:
    """Return microseconds of processor time a step without and with the hooks."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "dtprof", "run", "-o", str(run), *options, "--", sys.executable, "-c", PROGRAM]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800, env=environment)
    measured = json.loads(done.stdout)
    return pairs.Comparison(
        unit="us of processor time a step", a=tuple(a for a, _ in measured), b=tuple(b for _, b in measured)
    )


def main() -> None:
    """Compare steps with and without hooks, under both hooks."""
    with tempfile.TemporaryDirectory() as name:
        for label, options in (("native hook", []), ("Python hook", ["--no-native"])):
            compared = measure(Path(name), options)
            pairs.report(f"hooks of phases, steps and memory, {label}", compared, a="taken out", b="in place")


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
