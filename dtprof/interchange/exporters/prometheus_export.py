"""The summary of a run in Prometheus' text format: for the Pushgateway, or a textfile collector.

What a nightly job wants to keep: each figure of `dtprof summary` once, as a gauge; ranks one by one as far as there are
no more than MAX_RANKS, operations the MAX_OPERATIONS that took most time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client import Metric

from dtprof.analysis.results import PARTS, CollectiveResult, RankResult, Summary
from dtprof.interchange.metric_families import GAUGE, DeclaredMetric, Values, exposition

MAX_RANKS = 32
MAX_OPERATIONS = 50
NS = 1e9


def write_prometheus(summary: Summary, path: Path) -> list[str]:
    """Write the file; return what is said of what is not in it."""
    path.write_bytes(exposition(list_families(summary)))
    told = []
    if len(summary.ranks) > MAX_RANKS:
        told.append(f"ranks one by one are left out: there are {len(summary.ranks):,}, more than {MAX_RANKS}")
    if len(summary.collectives) > MAX_OPERATIONS:
        told.append(f"of {len(summary.collectives)} kinds of operations, the {MAX_OPERATIONS} that took most time")
    return told


def list_families(summary: Summary) -> Iterator[Metric]:
    """Return every figure; what is not known has no sample."""
    run = Path(summary.run).name
    yield _one("info", "1; which run this is.", 1, run=run, backend=summary.backend or "", torch=summary.torch or "")
    yield _one("ranks", "Ranks of the job.", summary.world_size)
    yield _one("steps", "Steps that every rank has ended.", summary.steps.count)
    spread = summary.steps.duration_ns
    percentiles = {"10": spread.p10, "50": spread.median, "90": spread.p90} if spread is not None else {}
    yield _table("step_seconds", "Step time of all ranks in the used steps.", "percentile", _seconds(percentiles))
    if summary.ranks and all(rank.partition_ns is not None for rank in summary.ranks):
        means = {part: _mean([(rank.partition_ns or {})[part] for rank in summary.ranks]) for part in PARTS}
        yield _table("part_seconds", "Parts of the step, mean over ranks.", "part", _seconds(means))
    consumed = summary.throughput
    tokens, samples = (consumed.tokens_per_s, consumed.samples_per_s) if consumed is not None else (None, None)
    yield _one("tokens_per_second", "Tokens that the whole job takes in a second, median over steps.", tokens)
    yield _one("batch_samples_per_second", "Samples that it takes in a second, median over steps.", samples)
    yield from _ranks(summary.ranks)
    yield from _operations(summary.collectives)
    if summary.pipeline is not None:
        yield _one("bubble_ratio", "Bubbles, as a share of the windows.", summary.pipeline.bubble_fraction)
        parts = summary.pipeline.parts or {}
        yield _table("bubble_part_ratio", "What bubbles come from; the parts sum to them.", "part", parts)
    blame = {str(one.rank): one.blame_ns_per_step for one in summary.stragglers}
    yield _table("straggler_seconds", "What others wait a step for the rank.", "rank", _seconds(blame))
    yield _one("events", "Events recorded.", summary.events)
    yield _one("dropped_events", "Events whose records were dropped.", summary.dropped_events)
    yield _one("capture_seconds", "Time dtprof spent inside ranks.", summary.overhead.capture_ns_total / NS)
    share = summary.overhead.share_of_step
    yield _one("overhead_ratio", "The same as a share of the step, mean over ranks.", share)


def _ranks(ranks: Sequence[RankResult]) -> Iterator[Metric]:
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    yield _one("peak_memory_bytes", "Peak memory of the rank that has the highest.", max(peaks, default=None))
    if len(ranks) <= MAX_RANKS:
        steps = {str(rank.rank): rank.step_ns for rank in ranks}
        yield _table("rank_step_seconds", "Mean step time of the rank.", "rank", _seconds(steps))
        own = {str(rank.rank): rank.peak_bytes for rank in ranks}
        yield _table("rank_peak_memory_bytes", "Peak memory of the rank.", "rank", own)


def _operations(rows: Sequence[CollectiveResult]) -> Iterator[Metric]:
    longest = sorted(rows, key=lambda row: -(row.duration_ns or 0) * row.count)[:MAX_OPERATIONS]
    figures: tuple[tuple[str, str, Callable[[CollectiveResult], float | None], float], ...] = (
        ("operations", "Operations in the used steps, each once.", lambda row: row.count, 1),
        ("operation_bytes", "Bytes that a rank puts into one, mean.", lambda row: row.bytes, 1),
        ("operation_seconds", "Duration of one, mean over ranks.", lambda row: row.duration_ns, NS),
        ("operation_wait_seconds", "Of that, waiting for the last rank.", lambda row: row.wait_ns, NS),
        ("operation_exposed_seconds", "Of one, what no work hides.", lambda row: row.exposed_ns, NS),
        ("operation_bus_bytes_per_second", "Bus bandwidth.", lambda row: row.busbw_gb_per_s, 1e-9),
    )
    for name, text, figure, scale in figures:
        values: Values = {
            (row.group, row.op, row.api or ""): value if scale == 1 else value / scale
            for row in longest
            if (value := figure(row)) is not None
        }
        yield _metric(name, text, "group", "op", "api").family(values)


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
