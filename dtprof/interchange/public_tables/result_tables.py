"""The tables of results, as the summary of a run has them: steps, throughput, ranks, collectives, and more."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, TypeVar

from dtprof.analysis import metric_registry
from dtprof.analysis.metric_registry import Metric
from dtprof.analysis.results import Summary
from dtprof.interchange.public_tables.record_tables import RANK
from dtprof.interchange.public_tables.table import Column, Table, build_table

Of = TypeVar("Of")


def _columns(metrics: Sequence[Metric[Any]]) -> tuple[Column, ...]:
    return tuple(
        Column(
            name=metric.name,
            dtype="int64" if metric.is_whole else "float64",
            unit=metric.unit if metric.unit not in ("count", "ratio") else "",
            meaning=metric.meaning,
        )
        for metric in metrics
        if metric.is_column
    )


def _values(metrics: Sequence[Metric[Of]], of: Of) -> list[float | None]:
    return [metric.value(of) for metric in metrics if metric.is_column]


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
    *_columns(metric_registry.RANK),
    Column(name="ended", dtype="str", meaning="finished, exited N, killed by SIGNAL, running, unknown"),
)
COLLECTIVES = (
    Column(name="group", dtype="str", meaning="name of the process group"),
    Column(name="op", dtype="str", meaning="operation"),
    Column(name="api", dtype="str", meaning="what the program called; masked: not known"),
    *_columns(metric_registry.COLLECTIVE),
)
GROUPS = (
    Column(name="name", dtype="str", meaning="name of the process group"),
    Column(name="description", dtype="str", meaning="what the program or framework calls it"),
    Column(name="axis", dtype="str", meaning="axis of parallelism: dp, tp, pp, ...; masked: not known"),
    Column(name="size", dtype="int64", meaning="number of ranks"),
    Column(name="ranks", dtype="str", meaning="global ranks, separated by blanks"),
)
CALL_SITES = (
    Column(name="file", dtype="str", meaning="source file of the program; masked: no line is known"),
    Column(name="line", dtype="int64", meaning="line that issues the operations; masked: not known"),
    Column(name="function", dtype="str", meaning="function of the line; masked: not known"),
    Column(name="phase", dtype="str", meaning="phase of the step in which they are issued"),
    Column(name="axis", dtype="str", meaning="axis of parallelism, else description or name of the process group"),
    Column(name="op", dtype="str", meaning="operation"),
    Column(name="api", dtype="str", meaning="framework component or call that issues it; masked: not known"),
    *_columns(metric_registry.CALL_SITE),
)
COMMUNICATION_PHASES = (
    Column(name="phase", dtype="str", meaning="phase of the step in which operations are issued"),
    *_columns(metric_registry.PHASE),
)
MESSAGE_SIZES = (
    Column(name="axis", dtype="str", meaning="axis of parallelism, else description or name of the process group"),
    Column(name="ranks", dtype="int64", meaning="ranks of the process group"),
    Column(name="op", dtype="str", meaning="operation"),
    Column(name="from_bytes", dtype="int64", unit="bytes", meaning="smallest size of the class, a power of two or 0"),
    Column(name="below_bytes", dtype="int64", unit="bytes", meaning="first size above the class"),
    *_columns(metric_registry.SIZES),
)
STRAGGLERS = (RANK, *_columns(metric_registry.STRAGGLER))


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
    return [(rank.rank, *_values(metric_registry.RANK, rank), rank.ended) for rank in summary.ranks]


def _call_sites(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (
            *((site.line.file, site.line.line, site.line.function) if site.line else (None, None, None)),
            *(site.phase, site.axis, site.op, site.api),
            *_values(metric_registry.CALL_SITE, site),
        )
        for site in summary.call_sites
    ]


def _message_sizes(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (*(row.axis, row.ranks, row.op, row.from_bytes, row.below_bytes), *_values(metric_registry.SIZES, row))
        for row in summary.message_sizes
    ]


def _groups(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (group.name, group.description, group.axis, len(group.ranks), " ".join(map(str, group.ranks)))
        for group in summary.groups
    ]


RESULTS: dict[str, tuple[tuple[Column, ...], Callable[[Summary], list[tuple[Any, ...]]]]] = {
    "steps": (STEPS, _steps),
    "throughput": (THROUGHPUT, _throughput),
    "ranks": (RANKS, _ranks),
    "collectives": (
        COLLECTIVES,
        lambda summary: [
            (row.group, row.op, row.api, *_values(metric_registry.COLLECTIVE, row)) for row in summary.collectives
        ],
    ),
    "call_sites": (CALL_SITES, _call_sites),
    "communication_phases": (
        COMMUNICATION_PHASES,
        lambda summary: [(row.phase, *_values(metric_registry.PHASE, row)) for row in summary.communication_phases],
    ),
    "message_sizes": (MESSAGE_SIZES, _message_sizes),
    "groups": (GROUPS, _groups),
    "stragglers": (
        STRAGGLERS,
        lambda summary: [(row.rank, *_values(metric_registry.STRAGGLER, row)) for row in summary.stragglers],
    ),
}


def tabulate_results(name: str, summary: Summary) -> Table:
    """Return one of the tables of results."""
    columns, rows_of = RESULTS[name]
    rows = rows_of(summary)
    return build_table(name, columns, {column.name: [row[i] for row in rows] for i, column in enumerate(columns)})
