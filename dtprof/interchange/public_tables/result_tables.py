"""The tables of results, as the summary of a run has them: steps, throughput, ranks, collectives, and more."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, TypeVar

from dtprof.analysis import metric_registry
from dtprof.analysis.memory.rank_memory import CATEGORIES
from dtprof.analysis.metric_registry import Metric
from dtprof.analysis.rank_exits import EndState
from dtprof.analysis.results import CallLine, Summary
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
    Column(name="step", dtype="int64", meaning="number of the measured step, from 1"),
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
    Column(name="ended", dtype="str", meaning=", ".join(state.example for state in EndState)),
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
    Column(
        name="caller_file", dtype="str", meaning="source file of the line that calls the function; masked: none known"
    ),
    Column(name="caller_line", dtype="int64", meaning="that line; masked: none is known"),
    Column(name="caller_function", dtype="str", meaning="function of that line; masked: none is known"),
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
PIPELINE = (
    Column(name="stage", dtype="int64", meaning="stage of the pipeline, from 0"),
    Column(name="microbatch", dtype="int64", meaning="microbatch, from 0; masked: after the last action of the rank"),
    *_columns(metric_registry.PIPELINE_ACTION),
)
PIPELINE_STEPS = (
    Column(name="step", dtype="int64", meaning="number of the measured step, from 1"),
    *_columns(metric_registry.PIPELINE_STEP),
)
MEMORY = (
    RANK,
    Column(name="peak_bytes", dtype="int64", unit="bytes", meaning="highest memory of the rank; masked: not sampled"),
    *(
        Column(
            name=f"{category}_bytes",
            dtype="int64",
            unit="bytes",
            meaning=f"most that {category.replace('_', ' ')} held; masked: not recorded",
        )
        for category in CATEGORIES
    ),
    Column(name="fragmentation", dtype="float64", unit="fraction", meaning="of reserved device memory; masked: none"),
    Column(name="scheme", dtype="str", meaning="none, zero1, zero2, zero3: how the state is sharded; masked: unknown"),
    Column(name="state_bytes", dtype="int64", unit="bytes", meaning="parameters, gradients and optimizer state"),
    Column(name="state_formula_bytes", dtype="int64", unit="bytes", meaning="the same by the formula of the scheme"),
    Column(name="activation_formula_bytes", dtype="int64", unit="bytes", meaning="by formula; masked: sizes unknown"),
    Column(name="growth_bytes_per_step", dtype="float64", unit="bytes", meaning="masked: too few samples"),
)
CRITICAL_PATH = (
    Column(name="kind", dtype="str", meaning="work: by phase; transfer: by operation; rank: work by rank"),
    Column(name="name", dtype="str", meaning="phase or operation; masked: of a rank"),
    Column(name="group", dtype="str", meaning="name of the process group of a transfer; masked: none"),
    Column(name="rank", dtype="int64", meaning="global rank; masked: not by rank"),
    Column(name="time_ns", dtype="int64", unit="ns", meaning="on the critical path of a mean step"),
    Column(name="fraction", dtype="float64", unit="fraction", meaning="of the step"),
)
LATENESS = (
    Column(name="group", dtype="str", meaning="name of the process group"),
    *_columns(metric_registry.LATENESS),
    Column(name="last_rank", dtype="int64", meaning="that arrives last most often; masked: all arrive together"),
)
PART_BANDS = (
    Column(name="part", dtype="str", meaning="part of the step"),
    *_columns(metric_registry.PART_BAND),
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


def _place(line: CallLine | None) -> tuple[str | None, int | None, str | None]:
    return (line.file, line.line, line.function) if line else (None, None, None)


def _call_sites(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (
            *_place(site.line),
            *(site.phase, site.axis, site.op, site.api),
            *_values(metric_registry.CALL_SITE, site),
            *_place(site.line.caller if site.line else None),
        )
        for site in summary.call_sites
    ]


def _message_sizes(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (*(row.axis, row.ranks, row.op, row.from_bytes, row.below_bytes), *_values(metric_registry.SIZES, row))
        for row in summary.message_sizes
    ]


def _memory(summary: Summary) -> list[tuple[Any, ...]]:
    rows = []
    for rank in summary.ranks:
        formula, growth = rank.memory_formula, rank.memory_growth
        rows.append(
            (
                rank.rank,
                rank.peak_bytes,
                *(rank.memory_categories.get(category) for category in CATEGORIES),
                rank.fragmentation,
                formula and formula.scheme,
                formula and formula.state_bytes,
                formula and formula.state_formula_bytes,
                formula and formula.activation_formula_bytes,
                growth and growth.bytes_per_step,
            )
        )
    return rows


def _critical_path(summary: Summary) -> list[tuple[Any, ...]]:
    path = summary.critical_path
    if path is None or path.step_ns <= 0:
        return []
    rows: list[tuple[Any, ...]] = [("work", phase, None, None, ns) for phase, ns in path.phases_ns.items()]
    rows += [("transfer", operation.op, operation.group, None, operation.transfer_ns) for operation in path.operations]
    rows += [("rank", None, None, rank.rank, rank.work_ns) for rank in path.ranks]
    return [(*row, row[-1] / path.step_ns) for row in rows]


def _pipeline(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (one.stage, one.microbatch, *_values(metric_registry.PIPELINE_ACTION, one))
        for one in (summary.pipeline.per_action if summary.pipeline else ())
    ]


def _pipeline_steps(summary: Summary) -> list[tuple[Any, ...]]:
    return [
        (one.step, *_values(metric_registry.PIPELINE_STEP, one))
        for one in (summary.pipeline.per_step if summary.pipeline else ())
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
    "part_bands": (
        PART_BANDS,
        lambda summary: [(band.part, *_values(metric_registry.PART_BAND, band)) for band in summary.part_bands],
    ),
    "pipeline": (PIPELINE, _pipeline),
    "pipeline_steps": (PIPELINE_STEPS, _pipeline_steps),
    "memory": (MEMORY, _memory),
    "critical_path": (CRITICAL_PATH, _critical_path),
    "lateness": (
        LATENESS,
        lambda summary: [
            (row.group, *_values(metric_registry.LATENESS, row), row.last_rank) for row in summary.lateness
        ],
    ),
    "groups": (GROUPS, _groups),
    "stragglers": (
        STRAGGLERS,
        lambda summary: [(row.rank, *_values(metric_registry.STRAGGLER, row)) for row in summary.stragglers or ()],
    ),
}


def tabulate_results(name: str, summary: Summary) -> Table:
    """Return one of the tables of results."""
    columns, rows_of = RESULTS[name]
    rows = rows_of(summary)
    return build_table(name, columns, {column.name: [row[i] for row in rows] for i, column in enumerate(columns)})
