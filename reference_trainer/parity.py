"""Show that every layout trains alike: `python -m reference_trainer.parity`.

Runs the real trainer, in float64, once in a single process and once on each layout, and compares loss and gradient
norm of every step. The processes are forked from one that has loaded torch, and kept from layout to layout: loading it
takes longer than the steps.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from reference_trainer.parity_layouts import LAYOUTS, MODELS, SINGLE, ParityLayout
from reference_trainer.placement import Placement

BASE = "--preset deep"
TIMEOUT_S = 900.0  # of a layout that hangs; on a busy machine the largest need minutes
QUANTITIES = ("loss", "grad_norm")
LOADED_ONCE = ["reference_trainer.train", "torch.distributed.optim"]

Curve = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Say how far a layout is from one process: the largest relative difference of any step, or why it has none."""

    loss: float = float("inf")
    grad_norm: float = float("inf")
    error: str = ""


class Ranks:
    """Keep processes that take the parts of ranks, in one layout after the other; a failed layout ends them all."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # libraries that start threads when loaded could not be forked
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(LOADED_ONCE)
        self.workers: list[tuple[BaseProcess, Connection]] = []

    def train(self, arguments: Sequence[str], num_ranks: int, metrics: Path, *, timeout_s: float = TIMEOUT_S) -> str:
        """Run the trainer; return the error of the first rank that failed, or nothing."""
        while len(self.workers) < num_ranks:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            self.workers.append((process, ours))
        store = metrics.with_suffix(".store")
        for rank in range(num_ranks):
            self.workers[rank][1].send((arguments, num_ranks, rank, str(metrics), str(store)))
        waiting = {connection for _, connection in self.workers[:num_ranks]}
        deadline_s = time.monotonic() + timeout_s
        error = ""
        while waiting and not error:
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            error = "" if ready else f"no end after {timeout_s:.0f} s"
            for connection in ready:
                assert isinstance(connection, Connection)
                waiting.discard(connection)
                error = error or _receive(connection)
        if error:
            self.end()
        return error

    def end(self) -> None:
        """End all processes."""
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()


def serve(connection: Connection) -> None:
    """Train with each command that comes, and answer with the error, or nothing."""
    while True:
        arguments, num_ranks, rank, metrics, store = connection.recv()
        try:
            _train(arguments, Placement(rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks,
                                        launched=num_ranks > 1), metrics, store)  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - whatever it was, the parent has to say it
            traceback.print_exc()
            connection.send(f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return
        connection.send("")


def compare(curve: Curve, expected: Curve) -> Outcome:
    """Return the largest relative differences over all steps."""
    if len(curve) != len(expected):
        return Outcome(error=f"{len(curve)} steps, but {len(expected)} expected")
    loss, grad_norm = (
        max(abs(row[name] - other[name]) / abs(other[name]) for row, other in zip(curve, expected, strict=True))
        for name in QUANTITIES
    )
    return Outcome(loss=loss, grad_norm=grad_norm)


def main(arguments: Sequence[str]) -> int:
    """Run the layouts, print a line for each, and return 0 where all are inside their bounds."""
    parser = argparse.ArgumentParser(prog="python -m reference_trainer.parity", description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="only this model (default: both)")
    parser.add_argument("--layouts", default="", metavar="TEXT", help="only layouts that contain TEXT")
    parser.add_argument("--max-ranks", type=int, default=16, metavar="N", help="only layouts on up to N ranks")
    parser.add_argument("--covering", action="store_true", help="only the set that covers each kind once")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each (default: 20)")
    parser.add_argument("--metrics", type=Path, metavar="DIR", help="keep the metrics of every layout in this folder")
    given = parser.parse_args(arguments)
    wanted = [
        layout
        for layout in LAYOUTS
        if given.layouts in layout.arguments
        and layout.num_ranks <= given.max_ranks
        and (layout.covering or not given.covering)
    ]
    if not wanted:
        parser.error(
            f"no layout has {given.layouts!r} and at most {given.max_ranks} ranks; leave out --layouts for all"
        )
    failed = 0
    with ExitStack() as stack:
        folder = given.metrics or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        ranks = Ranks()
        stack.callback(ranks.end)
        for model in [given.model] if given.model else MODELS:
            failed += _compare_model(model, wanted, ranks, steps=given.steps, folder=folder)
    print(f"{failed} outside of their bounds" if failed else "every layout is inside its bound")
    return 1 if failed else 0


def _compare_model(model: str, layouts: Sequence[ParityLayout], ranks: Ranks, *, steps: int, folder: Path) -> int:
    expected: dict[str, Curve] = {}
    failed = 0
    for number, layout in enumerate(layouts):
        common = [*shlex.split(BASE), "--model", model, "--steps", str(steps), *shlex.split(layout.both)]
        if layout.both not in expected:
            error, expected[layout.both] = _run(common, SINGLE, ranks, folder / f"{model}-{number}-single.jsonl")
            if error:
                print(f"{model:<5}{layout.both} in one process: {error}", flush=True)
                return 1
        started_s = time.monotonic()
        error, curve = _run(
            [*common, *shlex.split(layout.arguments)], layout, ranks, folder / f"{model}-{number}.jsonl"
        )
        outcome = Outcome(error=error) if error else compare(curve, expected[layout.both])
        inside = outcome.loss <= layout.bound and outcome.grad_norm <= layout.grad_norm_bound
        failed += not inside
        figures = outcome.error.strip() or f"loss {outcome.loss:.1e}  grad norm {outcome.grad_norm:.1e}"
        verdict = "ok  " if inside else "FAIL"
        print(
            f"{verdict} {model:<5}{layout.num_ranks} ranks  {figures:<36} bound {layout.bound:.0e}  "
            f"{time.monotonic() - started_s:4.1f} s  {layout.arguments} {layout.both}",
            flush=True,
        )
    return failed


def _run(arguments: Sequence[str], layout: ParityLayout, ranks: Ranks, metrics: Path) -> tuple[str, Curve]:
    error = ranks.train(arguments, layout.num_ranks, metrics)
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return error, [json.loads(line) for line in lines]


def _receive(connection: Connection) -> str:
    try:
        return str(connection.recv())
    except EOFError:
        return "a rank exited without printing anything"


def _train(arguments: Sequence[str], placement: Placement, metrics: str, store: str) -> None:
    import torch
    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from reference_trainer.options import parse_options
    from reference_trainer.train import train
    from reference_trainer.windows import read_tokens

    torch.set_num_threads(1)
    options = parse_options([*arguments, "--metrics", metrics], placement)
    tokens = read_tokens(options)
    if placement.launched:
        # A store of its own for each layout: nothing of the one before is left in it.
        distributed.init_process_group(
            "gloo",
            store=FileStore(store, placement.world_size),
            rank=placement.rank,
            world_size=placement.world_size,
        )
    # What one layout says for people is not wanted from each of a hundred.
    with Path(os.devnull).open("w") as nowhere:
        stdout, stderr = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            train(options, tokens, placement)
        finally:
            sys.stdout, sys.stderr = stdout, stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
