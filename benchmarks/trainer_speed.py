"""The reference trainer against a plain loop with DistributedDataParallel, and against the loop of accelerate.

They take turns in one job of two ranks, each with a process group of its own, with the same model, tokens, optimizer
and clipping. A figure is the median of the steps after the first five; the trainer also averages its loss over the
ranks, counts tokens, and writes its metrics. A ratio above 1 says that the trainer is the faster one. accelerate is
compared with where it is installed (`pip install accelerate`). BENCHMARK_PAIRS sets the number of pairs.
"""

import functools
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks import pairs
from reference_trainer.options import Options, parse_options
from reference_trainer.placement import Placement, read_placement
from reference_trainer.token_file import TokenFile

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", "12"))
STEPS = 25
WARM_UP = 5
NUM_RANKS = 2
FOLDER = "TRAINER_SPEED_FOLDER"
OPTIONS = ["--preset", "tiny", "--steps", str(STEPS)]
Loop = Callable[[Options, TokenFile, Placement], float]


def main() -> None:
    """Start the job, which reports."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        command = [sys.executable, *launcher, "-m", "benchmarks.trainer_speed"]
        subprocess.run(command, check=True, env=os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1"}, timeout=1800)


def work(folder: Path) -> None:
    """Take turns, as one of the ranks."""
    from reference_trainer.parallelism.devices import leave_job
    from reference_trainer.windows import read_tokens

    placement = read_placement(os.environ)
    tokens = read_tokens(parse_options(OPTIONS, placement))
    rounds = itertools.count()

    def measure(loop: Loop) -> float:
        _join(folder, placement, next(rounds))
        took_ms = loop(parse_options(OPTIONS, placement), tokens, placement)
        leave_job()  # only here: a DDP module that outlives its group ends it with the GIL held, which may hang
        return took_ms

    def measure_trainer() -> float:
        number = next(rounds)
        _join(folder, placement, number)
        return run_trainer(folder / f"{number}.jsonl", tokens, placement)

    others: dict[str, Loop] = {"plain loop": run_plain}
    if importlib.util.find_spec("accelerate") is not None:
        others["accelerate"] = run_accelerate
    elif placement.rank == 0:
        print("accelerate is not installed: not compared with", flush=True)
    for name, loop in others.items():
        compared = pairs.in_turn(measure_trainer, functools.partial(measure, loop), pairs=PAIRS, unit="ms a step")
        if placement.rank == 0:
            pairs.report(f"trainer on {NUM_RANKS} ranks against {name}", compared, a="trainer", b=name)


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
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = _model_and_optimizer(options)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rows = options.rank_batch_size
    inputs, targets = _sequences(options, tokens)

    def step(number: int) -> None:
        first = number * options.batch_size + placement.rank * rows
        loss = _loss(replica, inputs[first : first + rows], targets[first : first + rows])
        loss.backward()
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return _time_steps(step)


def run_accelerate(options: Options, tokens: TokenFile, placement: Placement) -> float:
    """Return the median step of the loop that accelerate's documentation shows, in ms."""
    del placement  # accelerate asks torch.distributed
    from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]
    from accelerate.state import (  # type: ignore[import-not-found,unused-ignore]
        AcceleratorState,
        GradientState,
        PartialState,
    )
    from torch.utils.data import DataLoader, TensorDataset

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # of the round before
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(*_sequences(options, tokens))
    batches = DataLoader(dataset, batch_size=options.rank_batch_size)
    model, optimizer, loader = accelerator.prepare(*_model_and_optimizer(options), batches)
    batches_of_rank = iter(loader)

    def step(_: int) -> None:
        inputs, targets = next(batches_of_rank)
        loss = _loss(model, inputs, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return _time_steps(step)


def _model_and_optimizer(options: Options) -> tuple[Any, Any]:
    import torch

    from reference_trainer.models import build_model, initialise_weights

    torch.set_num_threads(1)
    model = build_model(options.shape)
    initialise_weights(model, seed=options.seed, num_layers=options.shape.num_layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _sequences(options: Options, tokens: TokenFile) -> tuple[Any, Any]:
    """Return inputs and targets of all steps of all ranks."""
    import torch

    rows, length = STEPS * options.batch_size, options.sequence_length
    text = torch.from_numpy(tokens.tokens[: rows * length + 1].astype("int64"))
    return text[:-1].view(rows, length), text[1:].view(rows, length)


def _loss(model: Any, inputs: Any, targets: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(inputs=inputs).flatten(0, 1), targets.flatten())


def _time_steps(step: Callable[[int], None]) -> float:
    """Return the median step after the warm-up, in ms."""
    durations_s = []
    for number in range(STEPS):
        started_s = time.perf_counter()
        step(number)
        durations_s.append(time.perf_counter() - started_s)
    return statistics.median(durations_s[WARM_UP:]) * 1000


def _join(folder: Path, placement: Placement, number: int) -> None:
    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(str(folder / f"{number}.store"), placement.world_size)
    distributed.init_process_group("gloo", store=store, rank=placement.rank, world_size=placement.world_size)


if __name__ == "__main__":
    if FOLDER in os.environ:
        work(Path(os.environ[FOLDER]))
    else:
        pairs.run_alone(main, __doc__)
