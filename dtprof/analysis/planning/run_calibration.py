"""Calibrate plans from measured runs of a cluster, and compare a plan with the run that followed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtprof.analysis.planning.layout_costs import SCHEDULES, Cluster
from dtprof.analysis.planning.model_shapes import ModelShape, infer_shape
from dtprof.analysis.planning.plans import Plans, make_plans
from dtprof.analysis.results import Summary
from dtprof.columns import median
from dtprof.errors import UsageError

LARGE_BYTES = 1 << 16
"""Transfers of fewer bytes say nothing about a bandwidth."""
SHARDED = ("fsdp", "dp_shard")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured figures of the runs of a cluster; None where no run measured them."""

    flops_per_s: float | None
    link_bytes_per_s: float | None
    network_bytes_per_s: float | None
    parameters: float | None
    batch: int | None
    other_bytes: float = 0.0  # that a rank holds besides what is known, at its peak
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One figure of a plan beside the run that followed; None where one of them is not known."""

    figure: str
    planned: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        """Return the error of the plan as a share of the measured value."""
        if self.planned is None or not self.measured:
            return None
        return self.planned / self.measured - 1


def measure_sequence(summaries: Sequence[Summary]) -> int | None:
    """Return the tokens of a sequence in these runs; None where none of them shows tokens and samples of a step."""
    for summary in summaries:
        rates = summary.throughput
        if rates is not None and rates.tokens_per_step and rates.samples_per_step:
            return max(1, round(rates.tokens_per_step / rates.samples_per_step))
    return None


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The figures that one run gives plans of its cluster; None where it did not measure them."""

    run: str
    flops_per_s: float | None = None  # of a rank, on the model
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    other_bytes: float | None = None
    parameters: float | None = None  # of the model: says nothing about the cluster, as does the batch
    batch: int | None = None
    reason: str = ""  # why its computation is not known


def measure_run(summary: Summary, model: ModelShape | None, sequence: int) -> MeasuredRun:
    """Return the figures of a run; its computation is that of the model where one is given, else of its own shape."""
    parameters = _count_parameters(summary)
    tokens = summary.throughput.tokens_per_step if summary.throughput else None
    compute = [rank.partition_ns["compute"] for rank in summary.ranks if rank.partition_ns]
    known = [time for time in compute if time]
    shape = model or (infer_shape(parameters, sequence=sequence) if parameters else None)
    rate, reason = None, ""
    if tokens and known and shape is not None:
        rate = shape.flops_per_token * tokens / (summary.world_size * float(np.mean(known)) / 1e9)
    else:
        lacks = "tokens of a step" if not tokens else "time of computation" if not known else "parameters"
        reason = f"step_ns: {summary.run} does not show the {lacks}"
    others = [
        float(rank.peak_bytes - sum(nbytes or 0 for nbytes in rank.memory_categories.values()))
        for rank in summary.ranks
        if rank.peak_bytes and rank.memory_categories
    ]
    spans = len(summary.hosts) > 1
    busbw = [
        row.busbw_gb_per_s * 1e9
        for row in summary.collectives
        if row.busbw_gb_per_s and row.bytes and row.bytes >= LARGE_BYTES
    ]
    best = max(busbw, default=None)
    return MeasuredRun(
        run=summary.run,
        flops_per_s=rate,
        link_bytes_per_s=None if spans else best,
        network_bytes_per_s=best if spans else None,
        other_bytes=_known_median(others),
        parameters=parameters,
        batch=max(1, round(tokens / sequence)) if tokens else None,
        reason=reason,
    )


def calibrate(runs: Sequence[MeasuredRun]) -> Calibration:
    """Return medians of the measured figures over runs of one cluster."""
    return Calibration(
        flops_per_s=_known_median(run.flops_per_s for run in runs),
        link_bytes_per_s=_known_median(run.link_bytes_per_s for run in runs),
        network_bytes_per_s=_known_median(run.network_bytes_per_s for run in runs),
        parameters=_known_median(run.parameters for run in runs),
        batch=next((run.batch for run in runs if run.batch), None),
        other_bytes=max(0.0, _known_median(run.other_bytes for run in runs) or 0.0),
        reasons=tuple(run.reason for run in runs if run.reason),
    )


def _known_median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _count_parameters(summary: Summary) -> float | None:
    """Return the number of parameters of the model, from the shards that ranks hold."""
    axes = axes_of(summary)
    held = [rank.memory_categories.get("parameters") for rank in summary.ranks]
    known = [nbytes for nbytes in held if nbytes]
    if not known:
        return None
    state = [rank.memory_categories.get("optimizer_state") or 0 for rank in summary.ranks]
    # Two moments and a copy in 32 bits beside values of 16 bits; else values of 32 bits.
    value_bytes = 2 if sum(state) >= 5 * sum(known) else 4
    return float(np.mean(known)) / value_bytes * axes["fsdp"] * axes["tp"] * axes["pp"]


def axes_of(summary: Summary) -> dict[str, int]:
    """Return the size of each axis of a run."""
    sizes: dict[str, int] = {}
    for group in summary.groups:
        if group.axis:
            sizes[group.axis] = max(sizes.get(group.axis, 1), len(group.ranks))
    fsdp = max((sizes.get(axis, 1) for axis in SHARDED), default=1)
    rest = {axis: sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "ep")}
    model = fsdp * rest["tp"] * rest["pp"] * rest["cp"]
    return {"dp": max(1, summary.world_size // model), "fsdp": fsdp, **rest}


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Plans, the error of the plan for a run, and the figures that no run measured."""

    plans: Plans
    checked: tuple[Checked, ...] = ()
    reasons: tuple[str, ...] = ()


def check_plan(summary: Summary, model: ModelShape, cluster: Cluster, *, batch: int, recompute: bool) -> list[Checked]:
    """Return how far the plan of a run's own layout is off.

    Raises:
        UsageError: the layout of the run cannot be planned.
    """
    axes = axes_of(summary)
    pipeline = summary.pipeline
    only = dict(axes) | ({"microbatches": pipeline.microbatches} if pipeline else {})
    found = make_plans(
        model,
        replace(cluster, ranks=summary.world_size, memory_bytes=None),
        batch=batch,
        most=1000,
        recompute=recompute,
        only=only,
    )
    names = [plan for plan in found.plans if pipeline is None or plan.schedule == pipeline.schedule]
    if not names:
        layout = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        why = found.refused[0].reason if found.refused else f"its schedule is none of {', '.join(SCHEDULES[1:])}"
        raise UsageError(f"the layout of {summary.run} ({layout or 'one rank'}) cannot be planned: {why}")
    plan = names[0]
    step = summary.steps.duration_ns.median if summary.steps.duration_ns else None
    peaks = [rank.peak_bytes for rank in summary.ranks if rank.peak_bytes]
    return [
        Checked(figure="step_ns", planned=plan.step_ns, measured=step),
        Checked(
            figure="bubble_fraction",
            planned=plan.bubble_fraction,
            measured=pipeline.bubble_fraction if pipeline else None,
        ),
        Checked(
            figure="peak_bytes", planned=float(sum(plan.memory_bytes.values())), measured=max(peaks) if peaks else None
        ),
    ]
