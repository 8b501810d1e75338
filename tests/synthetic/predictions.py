"""Measure predictions on generated jobs: `python -m tests.synthetic.predictions [--runs 20]`.

Each job runs, is replayed with a change, and runs again with the change made and the same noise.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dtprof.analysis.whatif.whatif_changes import parse_fix, parse_option
from dtprof.records.reader import open_run
from dtprof.session.engines import make_engine
from dtprof.session.whatif_prediction import predict
from tests.synthetic.job import Job
from tests.synthetic.writing import generate

LAYOUTS = (
    {"dp": 4},
    {"dp": 8, "overlapped": True},
    {"dp": 2, "tp": 4},
    {"pp": 4, "microbatches": 8},
    {"pp": 2, "dp": 2, "tp": 2, "microbatches": 4},
)


def list_changes(seed: int) -> Iterator[tuple[str, Job, str, Job]]:
    """Yield a name, a job, a change, and the job after it."""
    random = np.random.default_rng(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    job = Job(steps=12, layers=4, seed=seed, jitter=float(random.uniform(0.02, 0.2)), **layout)  # type: ignore[arg-type]
    slow = int(random.integers(job.world_size))
    yield "rank", replace(job, slow={slow: float(random.uniform(1.2, 2.0))}), f"rank={slow}", job
    if job.pp > 1:
        factors = tuple(1.0 for _ in range(job.pp - 1))
        yield "stage", replace(job, stage_factor=(*factors, 1.5)), "stage=last", job
        for more in (job.microbatches // 2, 2 * job.microbatches):
            changed = replace(job, microbatches=more, layer_ns=job.layer_ns * job.microbatches // more)
            yield "microbatches", job, f"microbatches={more}", changed
        yield "schedule", replace(job, interleave_backward=False), "schedule=1f1b", job


def measure_step(folder: Path, job: Job) -> float:
    """Return the mean measured step of a job."""
    generate(folder, job)
    found = predict(open_run(folder), make_engine("local"))
    assert found.measured_step_ns is not None
    return found.measured_step_ns


def main(arguments: list[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.synthetic.predictions", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args(arguments)
    found: dict[str, list[tuple[float, float, bool]]] = {}
    for seed in range(options.runs):
        for name, job, change, after in list_changes(seed):
            with tempfile.TemporaryDirectory() as scratch:
                generate(Path(scratch) / "before", job)
                what, value = change.split("=")
                fix = parse_fix(change) if what in ("rank", "stage") else parse_option(what, value)
                predicted = predict(open_run(Path(scratch) / "before"), make_engine("local"), [fix])
                truth = measure_step(Path(scratch) / "after", after)
            (scenario,) = predicted.scenarios
            if scenario.step_ns is None or scenario.interval is None or predicted.measured_step_ns is None:
                print(f"{name} {seed}: {scenario.reason}")
                continue
            gained = 1 - truth / predicted.measured_step_ns
            inside = scenario.interval[0] <= gained <= scenario.interval[1]
            off = abs(scenario.step_ns / truth - 1)
            found.setdefault(name, []).append((off, predicted.replay_error or 0.0, inside))
    print("| change | predictions | step off by, median | most | in the interval | replay error, most |")
    print("|---|---|---|---|---|---|")
    for name, rows in found.items():
        off, error, inside = (np.array(column) for column in zip(*rows, strict=True))
        print(
            f"| {name} | {len(off)} | {100 * np.median(off):.2f} % | {100 * off.max():.2f} % | {inside.sum()} | "
            f"{100 * error.max():.2f} % |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
