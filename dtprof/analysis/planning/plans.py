"""Which layouts of a model fit a cluster, ranked by step time, and why others do not."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.planning.layout_costs import (
    GPIPE,
    INTERLEAVED,
    NONE,
    SCHEDULES,
    ZBV,
    Cluster,
    Layouts,
    measure_costs,
)
from dtprof.analysis.planning.model_shapes import ModelShape
from dtprof.formatting import format_bytes, plural
from dtprof.intervals import Mask

AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
MAX_LAYOUTS = 200_000
MAX_REFUSED = 100
MAX_SEQUENCES = 16
"""Of a microbatch on one rank."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout and its predicted costs; None where unknown."""

    dp: int
    fsdp: int
    tp: int
    pp: int
    cp: int
    ep: int
    schedule: str
    microbatches: int
    memory_bytes: dict[str, int]
    step_ns: int | None
    bubble_fraction: float
    exposed_ns: int | None
    fits: bool | None  # None: the memory of a rank is not known


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A layout that cannot be, and why."""

    layout: dict[str, int]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The plans, best first."""

    plans: tuple[Plan, ...]
    refused: tuple[Refused, ...]
    considered: int
    cannot_tell: tuple[str, ...]


def make_plans(
    model: ModelShape,
    cluster: Cluster,
    *,
    batch: int,
    most: int,
    recompute: bool = False,
    only: dict[str, int] | None = None,
) -> Plans:
    """Return the layouts of a model, those that fit first, by step time.

    Parameters:
        batch: sequences of a step.
        most: plans to return.
        only: sizes of axes, or microbatches, that are given.
    """
    given = only or {}
    refused: list[Refused] = []
    rows: list[tuple[int, ...]] = []
    sequences: list[float] = []
    for axes in _list_axes(cluster.ranks, given, model):
        reason = _refuse(model, axes, batch)
        if reason:
            refused.append(Refused(layout=dict(zip(AXES, axes, strict=True)), reason=reason))
            continue
        each = batch // (axes[0] * axes[1])
        for schedule, microbatches in _list_schedules(model, axes[3], each, given):
            if len(rows) < MAX_LAYOUTS:
                rows.append((*axes, schedule, microbatches))
                sequences.append(each / microbatches)
    if not rows:
        return Plans(
            plans=(), refused=tuple(refused[:MAX_REFUSED]), considered=0, cannot_tell=_unknowns(model, cluster)
        )
    layouts = Layouts(
        **dict(zip((*AXES, "schedule", "microbatches"), np.array(rows, np.int64).T, strict=True)),
        sequences=np.array(sequences),
    )
    costs = measure_costs(model, layouts, cluster, recompute=recompute)
    total = costs.memory_total
    fits: Mask = total <= cluster.memory_bytes if cluster.memory_bytes is not None else np.ones(len(total), np.bool_)
    # Without step times: the smallest bubble, then the least memory.
    time = np.where(np.isnan(costs.step_s), costs.bubble, costs.step_s)
    order = np.lexsort((total, layouts.pp * layouts.tp, time, ~fits))
    plans = []
    for row in order[fits[order]][:most].tolist():
        sizes = {axis: int(getattr(layouts, axis)[row]) for axis in AXES}
        plans.append(
            Plan(
                **sizes,
                schedule=SCHEDULES[layouts.schedule[row]],
                microbatches=int(layouts.microbatches[row]),
                memory_bytes={name: round(float(nbytes[row])) for name, nbytes in costs.memory.items()},
                step_ns=_ns(float(costs.step_s[row])),
                bubble_fraction=float(costs.bubble[row]),
                exposed_ns=_ns(float(costs.exposed_s[row])),
                fits=True if cluster.memory_bytes is not None else None,
            )
        )
    refused += _too_large(layouts, total, fits, cluster)
    return Plans(
        plans=tuple(plans),
        refused=tuple(refused[:MAX_REFUSED]),
        considered=len(rows),
        cannot_tell=(
            *_unknowns(model, cluster),
            *([f"refused: {plural(len(refused) - MAX_REFUSED, 'more layout')}"] if len(refused) > MAX_REFUSED else []),
        ),
    )


def _too_large(
    layouts: Layouts, total: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", fits: Mask, cluster: Cluster
) -> list[Refused]:
    """Return the layouts of which no schedule fits, with the least that one needs."""
    least: dict[tuple[int, ...], float] = {}
    some_fit = set()
    columns = [getattr(layouts, axis).tolist() for axis in AXES]
    for *axes, nbytes, fit in zip(*columns, total.tolist(), fits.tolist(), strict=True):
        least[tuple(axes)] = min(nbytes, least.get(tuple(axes), np.inf))
        if fit:
            some_fit.add(tuple(axes))
    return [
        Refused(
            layout=dict(zip(AXES, axes, strict=True)),
            reason=f"needs {format_bytes(nbytes)} of memory; a rank has {format_bytes(cluster.memory_bytes)}",
        )
        for axes, nbytes in sorted(least.items(), key=lambda item: item[1])
        if axes not in some_fit
    ]


def _ns(seconds: float) -> int | None:
    return None if np.isnan(seconds) else round(seconds * 1e9)


def _unknowns(model: ModelShape, cluster: Cluster) -> tuple[str, ...]:
    reasons = []
    if cluster.flops_per_s is None:
        reasons.append("step_ns: how fast ranks compute is not known; give --flops, or a run to measure it: --from RUN")
    if cluster.link_bytes_per_s is None or (
        cluster.ranks > cluster.ranks_per_host and cluster.network_bytes_per_s is None
    ):
        reasons.append("exposed_ns: bandwidths are not known; give --link and --network, or a run: --from RUN")
    if cluster.memory_bytes is None:
        reasons.append("fits: the memory of a rank is not known; give --memory")
    if model.inferred:
        reasons.append(
            f"model: a decoder of {plural(model.layers, 'layer')}, {model.hidden} wide, with "
            f"{plural(model.heads, 'head')}, is taken for {model.parameters:.3g} parameters; give its configuration: "
            "--config FILE"
        )
    return tuple(reasons)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _list_axes(ranks: int, given: dict[str, int], model: ModelShape) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of the axes of each layout; the ranks of an expert group are those of dp and fsdp."""
    for tp, pp, cp, fsdp in itertools.product(_divisors(ranks), repeat=4):
        dp, left = divmod(ranks, tp * pp * cp * fsdp)
        if left or not dp:
            continue
        for ep in _divisors(dp * fsdp) if model.experts > 1 else (1,):
            axes = (dp, fsdp, tp, pp, cp, ep)
            if all(given.get(axis, size) == size for axis, size in zip(AXES, axes, strict=True)):
                yield axes


def _refuse(model: ModelShape, axes: Sequence[int], batch: int) -> str:
    """Return why a layout cannot be; empty where it can."""
    dp, fsdp, tp, pp, cp, ep = axes
    if model.heads % tp or model.kv_heads % tp:
        return f"{model.heads} heads ({model.kv_heads} of keys) cannot be divided among tp {tp}"
    if model.layers < pp:
        return f"{plural(model.layers, 'layer')} cannot fill the {pp} stages of pp {pp}"
    if cp > 1 and model.sequence % (2 * cp):
        return f"sequences of {model.sequence} tokens cannot be divided into {2 * cp} parts for cp {cp}"
    if model.experts % ep:
        return f"{model.experts} experts cannot be divided among ep {ep}"
    if batch % (dp * fsdp):
        return f"a batch of {plural(batch, 'sequence')} cannot be divided among {dp * fsdp} data-parallel ranks"
    return ""


def _list_schedules(model: ModelShape, pp: int, each: int, given: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yield schedules and microbatches for a data-parallel rank's sequences of a step."""
    for microbatches in _divisors(each):
        if each // microbatches > MAX_SEQUENCES or given.get("microbatches", microbatches) != microbatches:
            continue
        if pp == 1:
            yield NONE, microbatches
            continue
        for schedule in range(GPIPE, len(SCHEDULES)):
            if schedule in (INTERLEAVED, ZBV) and model.layers < 2 * pp:
                continue
            if schedule == INTERLEAVED and microbatches % pp:
                continue
            yield schedule, microbatches
