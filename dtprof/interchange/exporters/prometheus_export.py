"""The summary of a run in Prometheus' text format: for the Pushgateway, or a textfile collector.

What a nightly job wants to keep: each figure of `dtprof summary` once, as a gauge; ranks one by one as far as there are
no more than MAX_RANKS, operations the MAX_OPERATIONS that took most time.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from prometheus_client import Metric

from dtprof.analysis import metric_registry
from dtprof.analysis.results import PARTS, CollectiveResult, Summary
from dtprof.interchange.metric_families import GAUGE, DeclaredMetric, Values, exposition

Of = TypeVar("Of")
MAX_RANKS = 32
MAX_OPERATIONS = 50
NS = 1e9


def write_prometheus(summary: Summary, path: Path) -> list[str]:
    """Write the file; return remarks on omitted figures."""
    path.write_bytes(exposition(list_families(summary)))
    omitted = []
    if len(summary.ranks) > MAX_RANKS:
        omitted.append(f"ranks one by one are left out: there are {len(summary.ranks):,}, more than {MAX_RANKS}")
    if len(summary.collectives) > MAX_OPERATIONS:
        omitted.append(f"of {len(summary.collectives)} kinds of operations, the {MAX_OPERATIONS} that took most time")
    return omitted


def list_families(summary: Summary) -> Iterator[Metric]:
    """Return every figure; unknown ones have no sample."""
    run = Path(summary.run).name
    yield _one("info", "1; which run this is.", 1, run=run, backend=summary.backend or "", torch=summary.torch or "")
    for metric in metric_registry.JOB:
        if metric.prometheus:
            yield _one(metric.prometheus, metric.definition, metric.in_base_unit(summary))
    spread = summary.steps.duration_ns
    percentiles = {"10": spread.p10, "50": spread.median, "90": spread.p90} if spread is not None else {}
    yield _table("step_seconds", "Step time of all ranks in the measured steps.", "percentile", _seconds(percentiles))
    if summary.ranks and all(rank.partition_ns is not None for rank in summary.ranks):
        means = {part: _mean([(rank.partition_ns or {})[part] for rank in summary.ranks]) for part in PARTS}
        yield _table("part_seconds", "Parts of the step, mean over ranks.", "part", _seconds(means))
    if len(summary.ranks) <= MAX_RANKS:
        yield from _rows(metric_registry.RANK, {(str(rank.rank),): rank for rank in summary.ranks}, "rank")
    longest = sorted(summary.collectives, key=lambda row: -(row.duration_ns or 0) * row.count)[:MAX_OPERATIONS]
    operations: dict[tuple[str, ...], CollectiveResult] = {(row.group, row.op, row.api or ""): row for row in longest}
    yield from _rows(metric_registry.COLLECTIVE, operations, "group", "op", "api")
    if summary.pipeline is not None:
        parts = summary.pipeline.parts or {}
        yield _table("bubble_part_ratio", "What bubbles come from; the parts sum to them.", "part", parts)
    yield from _rows(
        metric_registry.STRAGGLER, {(str(straggler.rank),): straggler for straggler in summary.stragglers or ()}, "rank"
    )


def _rows(
    metrics: Sequence[metric_registry.Metric[Of]], rows: Mapping[tuple[str, ...], Of], *labels: str
) -> Iterator[Metric]:
    """Return the figures of ranks, operations or stragglers, each by its labels."""
    for metric in metrics:
        if metric.prometheus:
            values: Values = {
                key: value for key, row in rows.items() if (value := metric.in_base_unit(row)) is not None
            }
            yield _metric(metric.prometheus, metric.definition, *labels).family(values)


def _metric(name: str, text: str, *labels: str) -> DeclaredMetric:
    return DeclaredMetric(name=f"dtprof_finished_{name}", kind=GAUGE, help=text, labels=labels)


def _one(name: str, text: str, value: float | None, **labels: str) -> Metric:
    return _metric(name, text, *labels).single(value, *labels.values())


def _table(name: str, text: str, label: str, values: Mapping[str, float | None]) -> Metric:
    return _metric(name, text, label).family({(key,): value for key, value in values.items() if value is not None})


def _seconds(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: None if value is None else value / NS for key, value in values.items()}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of all; None where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
