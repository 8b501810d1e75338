"""Predictions of `dtprof whatif` and `plan` against reruns: `python -m benchmarks.predictions [--repeat 2] [NAME...]`.

Each job of 2 to 4 ranks is recorded, a change is predicted, and the job runs again with the change made. Computation
sleeps (benchmarks/sleeping_trainer.py), so that results hold on a busy machine, too. A prediction is right where the
step is off by at most 10 %, or the gain lies in the stated interval. Jobs are kept in --folder and not run twice.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import pairs
from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.analysis.whatif.prediction import Replayable
from dtprof.analysis.whatif.run_graph import read_graph
from dtprof.analysis.whatif.whatif_changes import parse_fix, parse_option
from dtprof.errors import UsageError
from dtprof.intervals import Floats
from dtprof.records.reader import open_run
from dtprof.session.engines import make_engine
from dtprof.session.layout_plans import PlanRequest, plan
from dtprof.session.run_measurement import summarise_opened
from dtprof.session.whatif_prediction import predict

STEPS = 12
SEQUENCE = 64
SLEEP_MS = "60"
RIGHT = 0.10
MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
PLAN = "plan"
"""The change is a layout, which `dtprof plan --from RUN` predicts."""


@dataclass(frozen=True)
class Job:
    """A job of the trainer: its number of ranks, options and variables."""

    ranks: int
    options: str
    variables: tuple[tuple[str, str], ...] = ()
    batch: int = 8

    def name(self, number: int) -> str:
        """Return the name of the folder of its run."""
        words = [str(self.ranks), self.options, str(self.batch), *("=".join(pair) for pair in self.variables)]
        return "_".join("-".join(words).replace("--", "").replace(":", ".").split()) + f"#{number}"


@dataclass(frozen=True)
class Change:
    """A job, a change as typed, and the job after it."""

    name: str
    before: Job
    fix: str
    after: Job


def slow(rank: int, factor: float) -> tuple[tuple[str, str], ...]:
    """Return the variables by which a rank computes so many times as long."""
    return (("SLEEP_SLOW", f"{rank}:{factor}"),)


DDP2, DDP4 = Job(2, "--dp 2"), Job(4, "--dp 4", batch=16)
FSDP2, FSDP4 = Job(2, "--dp 2 --dp-mode fsdp"), Job(4, "--dp 4 --dp-mode fsdp", batch=16)
HSDP4 = Job(4, "--dp 4 --dp-mode hsdp", batch=16)
TP2 = Job(2, "--tp 2")


def pipeline(ranks: int, schedule: str, microbatches: int, more: str = "", batch: int = 16) -> Job:
    """Return a job with a pipeline over all its ranks, or half of them with --dp 2."""
    degree = ranks // 2 if "--dp 2" in more else ranks
    return Job(ranks, f"--pp {degree} --schedule {schedule} --microbatches {microbatches} {more}".strip(), batch=batch)


def with_fault(job: Job, fault: str) -> Job:
    """Return a job with an injected fault."""
    return Job(job.ranks, f"{job.options} --fault {fault}", job.variables, job.batch)


def with_variables(job: Job, variables: tuple[tuple[str, str], ...]) -> Job:
    """Return a job with variables."""
    return Job(job.ranks, job.options, variables, job.batch)


PP2, PP4 = pipeline(2, "1f1b", 4), pipeline(4, "1f1b", 8)
CHANGES = (
    Change("DDP, a rank sleeps 120 ms before each step", with_fault(DDP2, "slow-rank:rank=1,ms=120"), "rank=1", DDP2),
    Change("DDP, a slow backward", with_fault(DDP4, "slow-rank-backward:rank=2,ms=200"), "rank=2", DDP4),
    Change("DDP, input 120 ms late", with_variables(DDP2, (("SLEEP_LATE_MS", "120"),)), "phase=data", DDP2),
    Change("FSDP, a rank computes 1.5 times as long", with_variables(FSDP2, slow(1, 1.5)), "rank=1", FSDP2),
    Change("HSDP, a rank computes 1.4 times as long", with_variables(HSDP4, slow(3, 1.4)), "rank=3", HSDP4),
    Change("TP, a rank computes 1.4 times as long", with_variables(TP2, slow(1, 1.4)), "rank=1", TP2),
    Change("1F1B, a slow stage", with_fault(PP2, "slow-stage:rank=1,ms=40"), "stage=last", PP2),
    Change("1F1B on 4 ranks, a slow rank", with_variables(PP4, slow(2, 1.5)), "rank=2", PP4),
    Change("1F1B, 2 to 8 microbatches", pipeline(2, "1f1b", 2), "microbatches=8", pipeline(2, "1f1b", 8)),
    Change("1F1B on 4 ranks, 16 to 4 microbatches", pipeline(4, "1f1b", 16), "microbatches=4", pipeline(4, "1f1b", 4)),
    Change("GPipe, 2 to 4 microbatches", pipeline(2, "gpipe", 2), "microbatches=4", pipeline(2, "gpipe", 4)),
    Change("GPipe to interleaved", pipeline(2, "gpipe", 4), "schedule=interleaved", pipeline(2, "interleaved1f1b", 4)),
    Change("1F1B to interleaved", PP2, "schedule=interleaved", pipeline(2, "interleaved1f1b", 4)),
    Change("interleaved to 1F1B", pipeline(2, "interleaved1f1b", 4), "schedule=1f1b", PP2),
    Change("ZBV to 1F1B", pipeline(2, "zbv", 4), "schedule=1f1b", PP2),
    Change("1F1B to ZBV", PP2, "schedule=zbv", pipeline(2, "zbv", 4)),
    Change("stages of 6 and 2 layers to 4 and 4", pipeline(2, "1f1b", 4, "--pp-split 6,2"), "split=even", PP2),
    Change("DDP, 2 to 4 ranks", DDP2, "ranks=4", DDP4),
    Change("FSDP, 2 to 4 ranks", FSDP2, "ranks=4", FSDP4),
    Change(
        "DDP, buckets of 0.4 to 4 MB", Job(2, "--dp 2 --bucket-mb 0.4"), "buckets=4MB", Job(2, "--dp 2 --bucket-mb 4")
    ),
    Change(
        "DDP on 4 ranks, computation 1.5 times as fast",
        DDP4,
        "compute=1.5x",
        with_variables(DDP4, (("SLEEP_MS", "40"),)),
    ),
    Change("layout: DDP to TP", DDP2, PLAN, TP2),
    Change("layout: DDP to a pipeline x DDP", Job(4, "--dp 4", batch=16), PLAN, pipeline(4, "1f1b", 4, "--dp 2")),
    Change("layout: a pipeline to FSDP", PP2, PLAN, Job(2, "--dp 2 --dp-mode fsdp", batch=16)),
)  # fmt: skip


def record(folder: Path, job: Job, number: int) -> Path:
    """Run a job under dtprof, unless its run is there.

    Raises:
        RuntimeError: it failed.
    """
    path = folder / job.name(number)
    if (path / "done").is_file():
        return path
    launcher = ["torchrun", "--standalone", "--nproc-per-node", str(job.ranks), "-m", "benchmarks.sleeping_trainer"]
    sizes = [
        "--preset",
        "tiny" if "bucket" in job.options else "deep",
        "--steps",
        str(STEPS),
        "--batch-size",
        str(job.batch),
        "--sequence-length",
        str(SEQUENCE),
    ]
    command = ["dtprof", "run", "--force", "-o", str(path), "--", *launcher, *sizes, *job.options.split()]
    variables = {"OMP_NUM_THREADS": "1", "SLEEP_MS": SLEEP_MS} | dict(job.variables)
    environment = os.environ | variables | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{path.name} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    (path / "done").touch()
    return path


def measure_step(run: Path) -> float:
    """Return the mean measured step of a run; ns."""
    found = predict(open_run(run), make_engine("local"))
    if found.measured_step_ns is None:
        raise RuntimeError(f"{run.name} was not measured: {found.cannot_tell}")
    return found.measured_step_ns


def averaged_error(graph: OperationGraph) -> float:
    """Return the replay error by the measure before 2026-11-25: every member of an operation takes their mean."""
    modelled: Floats = graph.modelled[0].copy()  # in which waits have the mean time to wake up, as they had then
    redrawn = np.any([draw != graph.durations for draw in graph.modelled], axis=0)
    rows = np.flatnonzero(redrawn & (graph.instance >= 0))
    sums = np.bincount(graph.instance[rows], graph.durations[rows])
    counts = np.bincount(graph.instance[rows])
    modelled[rows] = (sums / np.maximum(counts, 1))[graph.instance[rows]]
    return abs(float(graph.replay_means([modelled])[0]) / float(graph.measured_ns.mean()) - 1)


@dataclass(frozen=True)
class Outcome:
    """A prediction and what the rerun showed; steps in ns."""

    change: Change
    before_ns: float
    predicted_ns: float | None
    after_ns: float
    interval: tuple[float, float] | None
    error: float | None  # of the replay
    averaged_error: float | None
    reason: str = ""

    @property
    def off(self) -> float | None:
        """The error of the predicted step."""
        return None if self.predicted_ns is None else self.predicted_ns / self.after_ns - 1

    @property
    def gained(self) -> float:
        """The share of the step that went."""
        return 1 - self.after_ns / self.before_ns

    @property
    def is_inside(self) -> bool:
        """Say whether the gain lies in the interval."""
        return self.interval is not None and self.interval[0] <= self.gained <= self.interval[1]


def compare(folder: Path, change: Change, repeat: int) -> Outcome:
    """Record a job and the changed job, and predict."""
    recorded = [(record(folder, change.before, n), record(folder, change.after, n)) for n in range(repeat)]
    # Other jobs of the machine only ever add time: the least disturbed run of each is compared.
    before = min((run for run, _ in recorded), key=measure_step)
    after = min(measure_step(run) for _, run in recorded)
    source = read_graph(open_run(before))
    averaged = averaged_error(source.graph) if isinstance(source, Replayable) else None
    if change.fix == PLAN:
        texts = dict.fromkeys(
            ("params", "ranks", "hosts", "memory", "batch", "sequence", "flops", "link", "network", "top")
        ) | {"sequence": str(SEQUENCE), "batch": str(change.after.batch)}
        config = folder / "config.json"  # of the preset "deep"
        config.write_text(json.dumps(MODEL))
        request = PlanRequest(texts=texts, config=config, runs=(before,), check=record(folder, change.after, 0))
        step = next(one for one in plan(request, make_engine("local")).checked if one.figure == "step_ns")
        summary = summarise_opened(open_run(before), make_engine("local"))
        measured = float(summary.steps.duration_ns.median) if summary.steps.duration_ns else 0.0
        return Outcome(change, measured, step.planned, after, None, None, None)
    what, _, value = change.fix.partition("=")
    fix = parse_fix(change.fix) if what in ("rank", "stage", "phase") else parse_option(what, value)
    found = predict(open_run(before), make_engine("local"), [fix])
    measured = found.measured_step_ns or 0.0
    if not found.scenarios:
        reason = found.cannot_tell[-1] if found.cannot_tell else ""
        return Outcome(change, measured, None, after, None, found.replay_error, averaged, reason)
    (scenario,) = found.scenarios
    return Outcome(
        change, measured, scenario.step_ns, after, scenario.interval, found.replay_error, averaged, scenario.reason
    )


def main(arguments: Sequence[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="changes whose names contain one of these")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each job, the fastest counts (default: 2)")
    parser.add_argument("--folder", type=Path, default=Path("predictions"), help="of the runs (default: predictions)")
    options = parser.parse_args(arguments)
    print(pairs.machine())
    print("| change | step now | predicted | rerun | off by | gain, interval | real gain | replay error | averaged |")
    print("|---|---|---|---|---|---|---|---|---|")
    right = made = 0
    for change in CHANGES:
        if options.names and not any(name in change.name for name in options.names):
            continue
        try:
            outcome = compare(options.folder, change, options.repeat)
        except (RuntimeError, UsageError, subprocess.TimeoutExpired) as failed:
            print(f"{change.name}: {failed}", file=sys.stderr)
            continue
        print(_row(outcome), flush=True)
        if outcome.off is not None:
            made += 1
            right += abs(outcome.off) <= RIGHT or outcome.is_inside
    print(f"{right} of {made} within {100 * RIGHT:.0f} % or inside their interval; {pairs.machine()}")
    return 0


def _row(outcome: Outcome) -> str:
    def ms(value: float | None) -> str:
        return "none" if value is None else f"{value / 1e6:.0f} ms"

    interval = outcome.interval
    cells = (
        outcome.change.name + (f" ({outcome.reason})" if outcome.reason else ""),
        ms(outcome.before_ns),
        ms(outcome.predicted_ns),
        ms(outcome.after_ns),
        "-" if outcome.off is None else f"{100 * outcome.off:+.1f} %",
        "-" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} %",
        f"{100 * outcome.gained:.1f} %",
        "-" if outcome.error is None else f"{100 * outcome.error:.2f} %",
        "-" if outcome.averaged_error is None else f"{100 * outcome.averaged_error:.2f} %",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
