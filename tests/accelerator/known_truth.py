"""What the devices of a job did, by the simulator's own trace, beside what the summary of its records says.

    python -m tests.accelerator.known_truth [LAYOUT[,OPTION...]...]      # prints a table; default: all of JOBS

The truth is taken from tasks of streams alone, not from anything that dtprof records: the stream that computes works
on a task or stands; where it stands while an operation of the rank is under way, that is exposed, before the last
member has started as wait, after that as transfer; else the host had given it nothing.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtprof.analysis.results import CollectiveResult, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run
from tests import jobs
from tests.accelerator.programs import layout_costs as costs

JOBS = (
    *("ddp", "ddp,late", "ddp,bound", "ddp,polled", "ddp,hook", "fsdp2", "fsdp2,late", "fsdp2,polled"),
    *("fsdp1", "fsdp1,late", "fsdp1,polled", "hsdp1", "hsdp2", "hsdp2,late"),
    *("pipeline", "pipeline,late", "tensor_parallel", "tensor_parallel,late", "ring"),
    *("ddp,compiled", "fsdp2,compiled", "tensor_parallel,compiled"),
)
"""Layouts and options of programs/known_layouts.py."""
TOLERANCE, SMALL_NS = 0.02, 300_000
"""How far a figure may be off: this share of it, or so many ns, twice what two devices' times are apart."""
LOOSE = {"polled": 1_000_000, "bound": 1_000_000}
"""The same of jobs with these options: ends found by polling, or stretches that end when a host is ready."""
_OPS = {
    "simccl::ALLREDUCE": "all_reduce",
    "simccl::_ALLGATHER_BASE": "all_gather",
    "simccl::_REDUCE_SCATTER_BASE": "reduce_scatter",
    "simccl::SEND": "send",
    "simccl::RECV": "recv",
    "simccl::COALESCED": "recv",  # a batch of a send and a receive, whose handle waits for what is received
}
_FIRST_TRACED = 2
"""The step that the trace begins with."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure as it is and as dtprof says."""

    name: str
    unit: str
    truth: float
    measured: float | None
    small_ns: int = SMALL_NS

    @property
    def off_by(self) -> float | None:
        """By how much it is off, as a share of the truth."""
        return None if self.measured is None or not self.truth else self.measured / self.truth - 1

    @property
    def holds(self) -> bool:
        """Say whether it is right."""
        small = self.small_ns if self.unit == "ns" else 0.005 if self.unit == "fraction" else 0
        return self.measured is not None and abs(self.measured - self.truth) <= max(TOLERANCE * self.truth, small)


def record(folder: Path, layout: str, *options: str) -> tuple[Summary, list[list[dict[str, Any]]]]:
    """Run and record a job of known steps; return its summary, and the tasks of the devices of all ranks."""
    num_ranks = 4 if layout.startswith("hsdp") else 2
    program = ("-m", "tests.accelerator.programs.known_layouts", str(folder), layout, *options)
    jobs.recorded(folder / "run", jobs.forked(num_ranks, *program))
    tasks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return summarise(open_run(folder / "run")), tasks


def compare(folder: Path, job: str) -> list[Figure]:
    """Record one of JOBS; return its central figures, each beside the truth."""
    layout, *options = job.split(",")
    figures = _list_figures(*record(folder, layout, *options), is_pipeline=layout == "pipeline")
    small_ns = max(SMALL_NS, *(LOOSE.get(option, 0) for option in ("", *options)))
    return [replace(figure, small_ns=small_ns) for figure in figures]


def _list_figures(summary: Summary, tasks: Sequence[Sequence[Mapping[str, Any]]], *, is_pipeline: bool) -> list[Figure]:
    assert summary.steps.used is not None, summary.cannot_tell
    truths = [_Rank.of(rank_tasks, *summary.steps.used) for rank_tasks in tasks]
    figures = []
    for rank, truth in zip(summary.ranks, truths, strict=True):
        parts = dict(truth.parts)
        if is_pipeline:
            parts = _with_bubble(truth, truths)
        measured = rank.partition_ns or {}
        figures.append(Figure(name=f"step, rank {rank.rank}", unit="ns", truth=truth.step_ns, measured=rank.step_ns))
        figures += [
            Figure(name=f"{part}, rank {rank.rank}", unit="ns", truth=ns / truth.steps, measured=measured.get(part))
            for part, ns in parts.items()
        ]
    return [*figures, *_of_operations(summary, truths), *(_of_pipeline(summary, truths) if is_pipeline else ())]


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What the device of one rank did in the measured steps."""

    steps: int
    step_ns: float
    windows: list[tuple[int, int]]
    actions: list[list[tuple[int, int]]]  # forward and backward, step by step
    parts: dict[str, int]  # ns of all steps
    operations: dict[str, list[Mapping[str, Any]]]
    exposed: dict[str, int]  # of each operation

    @classmethod
    def of(cls, tasks: Sequence[Mapping[str, Any]], first: int, last: int) -> "_Rank":
        computed = sorted((task["start_ns"], task["end_ns"]) for task in tasks if task["stream"] == 0)
        ends = [end for begin, end in computed if end - begin == costs.OPTIMIZER_NS]
        windows = [(ends[step - _FIRST_TRACED - 1], ends[step - _FIRST_TRACED]) for step in range(first, last + 1)]
        communicated = sorted((task for task in tasks if task["name"] in _OPS), key=lambda task: task["end_ns"])
        parts = dict.fromkeys(("compute", "exposed_transfer", "exposed_wait", "optimizer", "host"), 0)
        exposed: dict[str, int] = defaultdict(int)
        operations: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        actions: list[list[tuple[int, int]]] = []
        for begin, end in windows:
            inside = [(since, until) for since, until in computed if begin <= since < end and until > since]
            actions.append([one for one in inside if one[1] - one[0] != costs.OPTIMIZER_NS])
            parts["compute"] += sum(until - since for since, until in actions[-1])
            parts["optimizer"] += costs.OPTIMIZER_NS
            for task in communicated:
                if begin <= task["start_ns"] < end:
                    operations[_OPS[task["name"]]].append(task)
            for gap in _gaps(inside, begin, end):
                at = gap[0]
                for task in communicated:
                    since, until = max(at, task["start_ns"]), min(task["end_ns"], gap[1])
                    if until <= since:
                        continue
                    met = min(max(task["met_ns"], since), until)
                    parts["host"] += since - at
                    parts["exposed_wait"] += met - since
                    parts["exposed_transfer"] += until - met
                    exposed[_OPS[task["name"]]] += until - since
                    at = until
                parts["host"] += gap[1] - at
        steps = len(windows)
        return cls(
            steps=steps,
            step_ns=(windows[-1][1] - windows[0][0]) / steps,
            windows=windows,
            actions=actions,
            parts=parts,
            operations=operations,
            exposed=exposed,
        )


def _gaps(busy: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    at = begin
    for since, until in busy:
        if since > at:
            yield at, since
        at = max(at, until)
    if end > at:
        yield at, end


def _bubble_windows(ranks: Sequence[_Rank]) -> list[tuple[int, int]]:
    """Return the time from the first forward of any rank to the last backward of any, step by step."""
    return [
        (min(acts[0][0] for acts in of_step), max(acts[-1][1] for acts in of_step))
        for of_step in zip(*(rank.actions for rank in ranks), strict=True)
    ]


def _with_bubble(rank: _Rank, ranks: Sequence[_Rank]) -> dict[str, int]:
    """Return the parts of a step of a pipeline: what it stands within the window is bubble, whatever it waits for.

    An optimizer step within the window, as that of a rank that is done early, is in the bubble as well.
    """
    windows = _bubble_windows(ranks)
    busy = sum(end - begin for acts in rank.actions for begin, end in acts)
    return {"compute": busy, "bubble": sum(end - begin for begin, end in windows) - busy}


def _of_pipeline(summary: Summary, ranks: Sequence[_Rank]) -> Iterator[Figure]:
    length = sum(end - begin for begin, end in _bubble_windows(ranks)) * len(ranks)
    busy = sum(end - begin for rank in ranks for acts in rank.actions for begin, end in acts)
    measured = summary.pipeline.bubble_fraction if summary.pipeline else None
    yield Figure(name="bubble_fraction", unit="fraction", truth=1 - busy / length, measured=measured)


def _of_operations(summary: Summary, ranks: Sequence[_Rank]) -> Iterator[Figure]:
    rows: dict[str, list[CollectiveResult]] = defaultdict(list)
    for row in summary.collectives:
        rows[row.op].append(row)  # of each group
    # HSDP gathers, scatters and reduces at one time: only what all of them expose together is a fact.
    together = list(ranks[0].operations) if {"reduce_scatter", "all_reduce"} <= ranks[0].operations.keys() else []
    if together:
        truth = sum(rank.exposed[op] for rank in ranks for op in together)
        said = [_total(rows[op], "exposed_ns") for op in together]
        known = [total for total in said if total is not None]
        # A row counts an operation once, not once a member: all groups are of 2.
        measured = 2 * sum(known) if len(known) == len(said) else None
        yield Figure(name="all exposed_ns", unit="ns", truth=truth, measured=measured)
    for op in ranks[0].operations:
        tasks = [task for rank in ranks for task in rank.operations[op]]
        count, seen = len(tasks), sum(row.count for row in rows[op])
        duration = sum(task["end_ns"] - task["start_ns"] for task in tasks)
        transfer = sum(task["end_ns"] - task["met_ns"] for task in tasks)
        exposed = sum(rank.exposed[op] for rank in ranks)
        for name, total_ns in (
            ("duration_ns", duration),
            ("wait_ns", duration - transfer),
            ("transfer_ns", transfer),
            *((("exposed_ns", exposed),) if op not in together else ()),
        ):
            total = _total(rows[op], name)
            measured = total / seen if total is not None else None
            yield Figure(name=f"{op} {name}", unit="ns", truth=total_ns / count, measured=measured)
        if op not in together:
            overlap = rows[op][0].overlap if len(rows[op]) == 1 else None
            yield Figure(name=f"{op} overlap", unit="fraction", truth=1 - exposed / duration, measured=overlap)
        # Of groups of 2 ranks the factors of nccl-tests are 1, and 1/2 of the bytes of both.
        factor = {"all_gather": 2 * 0.5, "reduce_scatter": 0.5}.get(op, 1.0)
        busbw = rows[op][0].bytes * factor * count / transfer
        for row in rows[op]:
            yield Figure(name=f"{op} busbw", unit="GB/s", truth=busbw, measured=row.busbw_gb_per_s)


def _total(rows: Sequence[CollectiveResult], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if None in values else sum(value * row.count for value, row in zip(values, rows, strict=True))


def main() -> None:
    """Record jobs and print how far each figure is off."""
    print("| job | figures | off by, most | figure | is | dtprof |")
    print("|---|---|---|---|---|---|")
    for job in sys.argv[1:] or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            figures = compare(Path(folder), job)
        worst = max(figures, key=_badness)
        scale, unit = (1e6, "ms") if worst.unit == "ns" else (1, worst.unit)
        off = "not known" if worst.measured is None else f"{abs(worst.off_by or 0):.2%}".replace("%", " %")
        said = "null" if worst.measured is None else f"{worst.measured / scale:.4g}"
        print(f"| `{job}` | {len(figures)} | {off} | {worst.name} | {worst.truth / scale:.4g} {unit} | {said} |")
        for figure in figures:
            if not figure.holds:
                print(f"wrong: {figure}", file=sys.stderr)


def _badness(figure: Figure) -> float:
    """Return by how much a figure is off, of those that are 0 nothing."""
    return float("inf") if figure.measured is None else abs(figure.off_by or 0)


if __name__ == "__main__":
    main()
