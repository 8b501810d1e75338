"""The reference trainer against a plain loop of the same model with DistributedDataParallel, in the same processes.

Both take turns in one job of four ranks, each with a process group of its own, on the same tokens with the same
optimizer and clipping. A figure is the median of the steps after the first five; the trainer also averages its loss
over the ranks, counts tokens, and writes its metrics.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks import pairs
from reference_trainer.options import Options, parse_options
from reference_trainer.placement import Placement, read_placement
from reference_trainer.token_file import TokenFile

PAIRS = 8
STEPS = 25
WARM_UP = 5
NUM_RANKS = 4
FOLDER = "TRAINER_SPEED_FOLDER"
OPTIONS = ["--preset", "tiny", "--steps", str(STEPS)]


def main() -> None:
    """Start the job, which reports."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        command = [sys.executable, *launcher, "-m", "benchmarks.trainer_speed"]
        subprocess.run(command, check=True, env=os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1"}, timeout=1800)


def work(folder: Path) -> None:
    """Take turns, as one of the ranks."""
    from reference_trainer.windows import read_tokens

    placement = read_placement(os.environ)
    tokens = read_tokens(parse_options(OPTIONS, placement))
    rounds = iter(range(2 * (PAIRS + 1)))

    def measure_plain() -> float:
        _join(folder, placement, next(rounds))
        return run_plain(parse_options(OPTIONS, placement), tokens, placement)

    def measure_trainer() -> float:
        number = next(rounds)
        _join(folder, placement, number)
        return run_trainer(folder / f"{number}.jsonl", tokens, placement)

    compared = pairs.in_turn(measure_plain, measure_trainer, pairs=PAIRS, unit="ms a step")
    if placement.rank == 0:
        pairs.report(f"trainer on {NUM_RANKS} ranks against a plain loop", compared, a="plain loop", b="trainer")


def run_trainer(metrics: Path, tokens: TokenFile, placement: Placement) -> float:
    """Return the median step of the trainer, in ms; other ranks than the first have none."""
    from reference_trainer.train import train

    options = parse_options([*OPTIONS, "--metrics", str(metrics)], placement)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        train(options, tokens, placement)
    if placement.rank:
        return 1.0
    rates = [json.loads(line)["tokens_per_s"] for line in metrics.read_text().splitlines()]
    return float(statistics.median(options.tokens_per_step / rate for rate in rates[WARM_UP:]) * 1000)


def run_plain(options: Options, tokens: TokenFile, placement: Placement) -> float:
    """Return the median step of a loop as one writes it by hand, in ms."""
    import torch
    from torch import distributed, nn
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from reference_trainer.models import build_model, initialise_weights

    torch.set_num_threads(1)
    model = build_model(options.shape)
    initialise_weights(model, seed=options.seed, num_layers=options.shape.num_layers)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, fused=True)
    length, rows = options.sequence_length, options.rank_batch_size
    text = torch.from_numpy(tokens.tokens[: STEPS * options.batch_size * length + 1].astype("int64"))
    durations_s = []
    for step in range(STEPS):
        started_s = time.perf_counter()
        first = (step * options.batch_size + placement.rank * rows) * length
        inputs = text[first : first + rows * length].view(rows, length)
        targets = text[first + 1 : first + rows * length + 1].view(rows, length)
        loss = functional.cross_entropy(replica(inputs=inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        durations_s.append(time.perf_counter() - started_s)
    distributed.destroy_process_group()
    return statistics.median(durations_s[WARM_UP:]) * 1000


def _join(folder: Path, placement: Placement, number: int) -> None:
    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(str(folder / f"{number}.store"), placement.world_size)
    distributed.init_process_group("gloo", store=store, rank=placement.rank, world_size=placement.world_size)


if __name__ == "__main__":
    work(Path(os.environ[FOLDER]))
