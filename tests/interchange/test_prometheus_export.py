"""A run as Prometheus' metrics: its figures are those of the summary."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtprof.analysis.results import PARTS, Summary, Throughput
from dtprof.interchange.exporters.prometheus_export import MAX_OPERATIONS, MAX_RANKS, write_prometheus
from tests.interchange.test_metric_families import parse
from tests.monitor import prometheus


def figures(path: Path) -> dict[tuple[str, ...], float]:
    """Return the samples by name and values of labels."""
    return {(name, *labels.values()): value for name, labels, value in parse(path.read_text(encoding="utf-8"))}


def test_figures_are_those_of_the_summary(summary: Summary, out: Path) -> None:
    assert write_prometheus(summary, out) == []
    found = figures(out)
    spread, pipeline = summary.steps.duration_ns, summary.pipeline
    assert spread is not None
    assert pipeline is not None
    assert found["dtprof_finished_step_seconds", "50"] == spread.median / 1e9
    assert found["dtprof_finished_steps",] == summary.steps.count
    assert found["dtprof_finished_bubble_ratio",] == pipeline.bubble_fraction
    for part in PARTS:
        mean_ns = sum((rank.partition_ns or {})[part] for rank in summary.ranks) / len(summary.ranks)
        assert found["dtprof_finished_part_seconds", part] == pytest.approx(mean_ns / 1e9)
    for rank in summary.ranks:
        assert found["dtprof_finished_rank_step_seconds", str(rank.rank)] == (rank.step_ns or 0) / 1e9
    for row in summary.collectives:
        key = row.api or "", row.group, row.op  # labels come in the order of their names
        assert found[("dtprof_finished_operations", *key)] == row.count
        for name, value in (
            ("operation_seconds", row.duration_ns),
            ("operation_wait_seconds", row.wait_ns),
            ("operation_exposed_seconds", row.exposed_ns),
        ):
            assert found.get((f"dtprof_finished_{name}", *key)) == (None if value is None else value / 1e9)
        if row.busbw_gb_per_s is not None:
            bandwidth = found[("dtprof_finished_operation_bus_bytes_per_second", *key)]
            assert bandwidth == pytest.approx(row.busbw_gb_per_s * 1e9)
    (straggler,) = summary.stragglers
    assert found["dtprof_finished_straggler_seconds", "3"] == (straggler.blame_ns_per_step or 0) / 1e9


def test_throughput_is_that_of_the_whole_job(summary: Summary, out: Path) -> None:
    throughput = Throughput(
        tokens_per_s=4096.5,
        samples_per_s=None,
        tokens_per_step=512,
        samples_per_step=None,
        mean_tokens_per_s=4096.5,
        mean_samples_per_s=None,
        first_step=2,
        tokens_per_s_of_steps=(),
        samples_per_s_of_steps=(),
    )
    write_prometheus(replace(summary, throughput=throughput), out)
    found = figures(out)
    assert found["dtprof_finished_tokens_per_second",] == 4096.5
    assert ("dtprof_finished_batch_samples_per_second",) not in found


def test_what_is_written_passes_promtool(summary: Summary, out: Path) -> None:
    write_prometheus(summary, out)
    assert prometheus.check_metrics(out.read_text(encoding="utf-8")) == ""


def test_what_is_too_much_is_skipped_and_said(summary: Summary, out: Path) -> None:
    many = replace(
        summary,
        ranks=summary.ranks * (MAX_RANKS // len(summary.ranks) + 1),
        collectives=tuple(replace(summary.collectives[0], group=f"{i}") for i in range(MAX_OPERATIONS + 9)),
    )
    ranks, operations = write_prometheus(many, out)
    assert "ranks one by one are left out" in ranks
    assert f"the {MAX_OPERATIONS} that took most time" in operations
    assert sum(name == "dtprof_finished_operations" for name, *_ in figures(out)) == MAX_OPERATIONS


def test_what_is_not_known_has_no_sample(summary: Summary, out: Path) -> None:
    bare = replace(
        summary,
        ranks=tuple(replace(rank, partition_ns=None, step_ns=None, peak_bytes=None) for rank in summary.ranks),
        pipeline=None,
        stragglers=(),
    )
    write_prometheus(bare, out)
    names = {name for name, *_ in figures(out)}
    assert "dtprof_finished_steps" in names
    assert names.isdisjoint(
        {"dtprof_finished_part_seconds", "dtprof_finished_bubble_ratio", "dtprof_finished_peak_memory_bytes"}
    )
