"""Exposed communication of the measured steps as dtprof reports it, against kernels in a trace of the same steps.

By kernels it is the time in which a kernel of NCCL runs and no other kernel does. Where the host is late, the device
stands beside a running kernel of NCCL without waiting for it: that counts by kernels, and rightly not for dtprof; the
program keeps the device busy.
"""

import json
from pathlib import Path

import numpy as np

from benchmarks.gpu.figures import Figure, emit
from benchmarks.gpu.placement import backend, recorded, run_job, scratch, torchrun
from dtprof.analysis.comparison.comparison_series import EXPOSED, JOB, RunFigures, measure_run
from dtprof.analysis.comparison.comparison_series import Figure as Quantity
from dtprof.interchange.importers.kineto_events import COLLECTIVE, KERNEL, KinetoEvent, read_events
from dtprof.intervals import Intervals, intersect, pair, subtract, total, union
from dtprof.records.reader import open_run

NUM_RANKS = 2
GOAL = 0.05


def main() -> None:
    """Print both, and how far they are apart."""
    with scratch() as folder:
        run_job(
            recorded(folder / "run", torchrun(NUM_RANKS, "-m", "benchmarks.gpu.profiled_steps", str(folder), backend()))
        )
        figures = measure_run(open_run(folder / "run"))
        by_kernels = [exposed_by_kernels(folder, rank, figures) for rank in range(NUM_RANKS)]
    exposed = figures.estimates.get(Quantity(JOB, EXPOSED))
    why = figures.unknown.get(Quantity(JOB, EXPOSED), "")
    ours = exposed.mean if exposed is not None else None
    emit(Figure(name="exposed a step as reported", value=_us(ours), unit="us", note=why or f"steps {figures.used}"))
    known = [value for value in by_kernels if value is not None]
    theirs = sum(known) / len(known) if len(known) == NUM_RANKS else None
    note = "" if theirs is not None else "no kernels in the trace"
    emit(Figure(name="exposed a step by kernels", value=_us(theirs), unit="us", note=note))
    apart = (ours - theirs) / theirs if ours is not None and theirs else None
    emit(
        Figure(
            name="exposed: reported against kernels",
            value=None if apart is None else 100 * apart,
            unit="%",
            goal="within 5 %",
            met=apart is not None and abs(apart) <= GOAL,
        )
    )


def exposed_by_kernels(folder: Path, rank: int, figures: RunFigures) -> float | None:
    """Return the exposed time of a measured step of one rank, in ns; None where the trace holds no kernel of NCCL."""
    measured = json.loads((folder / f"{rank}.json").read_text())
    if figures.used is None:
        return None
    first, last = figures.used
    ends = measured["ends_ns"]
    return find_exposed(
        folder / f"{rank}.pt.trace.json",
        begin_ns=ends[first - 2],
        end_ns=ends[last - 1],
        clock_ns=measured["monotonic_less_realtime_ns"],
        num_steps=last - first + 1,
    )


def find_exposed(trace_path: Path, *, begin_ns: int, end_ns: int, clock_ns: int, num_steps: int) -> float | None:
    """Return the time, in ns a step, in which kernels of NCCL ran and no others, between two times of the host."""
    kernels: dict[int, list[tuple[float, float]]] = {KERNEL: [], COLLECTIVE: []}

    def take(by_class: list[list[KinetoEvent]]) -> None:
        for number, found in kernels.items():
            found.extend((event.ts, event.ts + event.dur) for event in by_class[number])

    trace = read_events(trace_path, take)
    if not kernels[COLLECTIVE]:
        return None

    def placed(found: list[tuple[float, float]]) -> Intervals:
        times = np.round(np.array(found).reshape(-1, 2) * 1000).astype(np.int64) + trace.base_ns + clock_ns
        return intersect(union(pair(times[:, 0], times[:, 1])), np.array([[begin_ns, end_ns]]))

    return total(subtract(placed(kernels[COLLECTIVE]), placed(kernels[KERNEL]))) / num_steps


def _us(ns: float | None) -> float | None:
    return None if ns is None else ns / 1000


if __name__ == "__main__":
    main()
