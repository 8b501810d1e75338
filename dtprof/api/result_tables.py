"""The tables of results, as the summary of a run has them: steps, throughput, ranks, collectives, and more."""

from collections.abc import Callable
from itertools import zip_longest
from math import isnan
from typing import Any

from dtprof.analysis.results import PARTS, Summary
from dtprof.api.record_tables import RANK
from dtprof.api.table import Column, Table, build_table

METRICS = "see docs/reference/metrics.md"
STEPS = (
    RANK,
    Column(name="step", dtype="int64", meaning="number of the step, from 1"),
    Column(name="duration_ns", dtype="int64", unit="ns", meaning="from the end of the step before to its own"),
    Column(name="used", dtype="bool", meaning="figures are taken from it: no warm-up, and every rank has it"),
)
THROUGHPUT = (
    Column(name="step", dtype="int64", meaning="number of the used step, from 1"),
    *(
        Column(
            name=f"{what}_per_s",
            dtype="float64",
            unit=f"{what}/s",
            meaning=f"{what} that the whole job consumed, by the step's mean duration over ranks; masked: not known",
        )
        for what in ("tokens", "samples")
    ),
)
RANKS = (
    RANK,
    Column(name="step_ns", dtype="int64", unit="ns", meaning="mean step; masked: no steps"),
    *(
        Column(name=f"{part}_ns", dtype="int64", unit="ns", meaning=f"{part.replace('_', ' ')}: mean part of a step")
        for part in PARTS
    ),
    Column(name="peak_bytes", dtype="int64", unit="bytes", meaning="peak memory; masked: not sampled"),
    Column(name="events", dtype="int64", meaning="records of the rank"),
    Column(name="ended", dtype="str", meaning="finished, exited N, killed by SIGNAL, running, unknown"),
)
COLLECTIVES = (
    Column(name="group", dtype="str", meaning="name of the process group"),
    Column(name="op", dtype="str", meaning="operation"),
    Column(name="api", dtype="str", meaning="what the program called; masked: not known"),
    Column(name="count", dtype="int64", meaning="operations, each once however many ranks took part"),
    Column(name="bytes", dtype="int64", unit="bytes", meaning="what one rank puts into one operation, mean"),
    *(
        Column(name=f"{name}_ns", dtype="int64", unit="ns", meaning=f"{name} time, mean per operation and rank")
        for name in ("duration", "wait", "transfer", "exposed")
    ),
    Column(name="overlap", dtype="float64", unit="fraction", meaning="share of it that was hidden by other work"),
    Column(name="busbw_gb_per_s", dtype="float64", unit="GB/s", meaning="bus bandwidth as nccl-tests define it"),
)
GROUPS = (
    Column(name="name", dtype="str", meaning="name of the process group"),
    Column(name="description", dtype="str", meaning="what the program or framework calls it"),
    Column(name="axis", dtype="str", meaning="axis of parallelism: dp, tp, pp, ...; masked: not known"),
    Column(name="size", dtype="int64", meaning="number of ranks"),
    Column(name="ranks", dtype="str", meaning="global ranks, separated by blanks"),
)
STRAGGLERS = (
    RANK,
    Column(
        name="last_share",
        dtype="float64",
        unit="fraction",
        meaning="of the steps in which somebody waited notably, those in which it was most to blame",
    ),
    Column(name="slowdown", dtype="float64", meaning="step over the step without its lag; masked: not known"),
    Column(name="blame_ns_per_step", dtype="int64", unit="ns", meaning="waits of all others for it, a step"),
)


def _steps(summary: Summary) -> list[tuple[Any, ...]]:
    first, last = summary.steps.used or (1, 0)
    return [
        (series.rank, step, duration, first <= step <= last)
        for series in summary.step_series
        for step, duration in zip(series.steps, series.duration_ns, strict=True)
    ]


def _throughput(summary: Summary) -> list[tuple[Any, ...]]:
    known = summary.throughput
    if known is None:
        return []
    rates = zip_longest(known.tokens_per_s_of_steps, known.samples_per_s_of_steps)
    return [
        (step, *(None if rate is None or isnan(rate) else rate for rate in both))
        for step, both in enumerate(rates, known.first_step)
    ]


def _ranks(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (
            rank.rank,
            rank.step_ns,
            *((rank.partition_ns or {}).get(part) for part in PARTS),
            rank.peak_bytes,
            rank.events,
            rank.ended,
        )
        for rank in summary.ranks
    ]


def _groups(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (one.name, one.description, one.axis, len(one.ranks), " ".join(map(str, one.ranks))) for one in summary.groups
    ]


RESULTS: dict[str, tuple[tuple[Column, ...], Callable[[Summary], list[tuple[Any, ...]]]]] = {
    "steps": (STEPS, _steps),
    "throughput": (THROUGHPUT, _throughput),
    "ranks": (RANKS, _ranks),
    "collectives": (
        COLLECTIVES,
        lambda summary: [tuple(getattr(row, c.name) for c in COLLECTIVES) for row in summary.collectives],
    ),
    "groups": (GROUPS, _groups),
    "stragglers": (
        STRAGGLERS,
        lambda summary: [tuple(getattr(row, c.name) for c in STRAGGLERS) for row in summary.stragglers],
    ),
}


def tabulate_results(name: str, summary: Summary) -> Table:
    """Return one of the tables of results."""
    columns, rows_of = RESULTS[name]
    rows = rows_of(summary)
    return build_table(name, columns, {column.name: [row[i] for row in rows] for i, column in enumerate(columns)})
