"""Stacked bars, one a rank: shared by the parts and the phases of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from dtprof.report.figures.drawing import Drawing, marker, new_figure, rank_names
from dtprof.report.figures.figure_numbers import (
    DURATIONS,
    Unit,
    choose_decimals,
    choose_unit,
    format_duration,
    format_share,
)
from dtprof.report.figures.palette import hue_of

MAX_LYING_BARS = 16
"""Up to here bars lie, one line a rank; more ranks stand side by side."""


def draw_stacks(
    *,
    title: str,
    names: Sequence[str],
    stacks: Mapping[int, Mapping[str, int | None]],
    steps: Mapping[int, int],
) -> Drawing:
    """Draw one stacked bar a rank; `stacks` gives nanoseconds by rank and name, `steps` the whole step.

    What is None is not known: it has no length, and its text says so.
    """
    ranks = sorted(stacks)
    shown = [name for name in names if any(stacks[rank].get(name, 0) for rank in ranks)]
    unit = choose_unit(steps.values(), DURATIONS)
    lying = len(ranks) <= MAX_LYING_BARS
    time_title = f"time per step ({unit.name}, mean of the measured steps)"
    figure = new_figure(
        title=title,
        x_title=time_title if lying else "rank",
        y_title="" if lying else time_title,
        height=104 + 34 * len(ranks) if lying else 400,
    )
    for name in shown:
        figure.add_trace(_bars(name, ranks, stacks, steps, unit, lying))
    figure.update_layout(barmode="stack", bargap=0.28 if lying else 0.12)
    if lying:
        figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
        figure.update_xaxes(rangemode="tozero")
    else:
        figure.update_yaxes(rangemode="tozero")
        figure.update_xaxes(showgrid=False, tickmode="auto", nticks=33)
    return Drawing(
        figure=figure,
        sentence=" ".join((f"{title}: {_describe_extremes(steps)}", *_describe_unknown(names, stacks, ranks))),
        columns=("rank", f"step ({unit.name})", *(f"{hue_of(name).label} ({unit.name})" for name in shown)),
        rows=_rows(ranks, shown, stacks, steps, unit),
    )


def _bars(
    name: str,
    ranks: Sequence[int],
    stacks: Mapping[int, Mapping[str, int | None]],
    steps: Mapping[int, int],
    unit: Unit,
    lying: bool,
) -> Any:
    hue = hue_of(name)
    spent = [stacks[rank].get(name, 0) for rank in ranks]
    lengths = [(ns or 0) / unit.size for ns in spent]
    where: list[Any] = rank_names(ranks) if lying else list(ranks)
    return go.Bar(
        name=hue.label,
        meta=name,
        orientation="h" if lying else "v",
        x=lengths if lying else where,
        y=where if lying else lengths,
        customdata=list(ranks),
        marker=marker(name),
        hoverinfo="text",
        hovertext=[
            f"<b>rank {rank}: {hue.label}</b><br>{_tell_length(ns, steps[rank])}<br>{hue.meaning}"
            for rank, ns in zip(ranks, spent, strict=True)
        ],
        textposition="none",
    )


def _describe_extremes(steps: Mapping[int, int]) -> str:
    shortest, longest = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
    if len(steps) == 1:
        return f"rank {shortest} takes {format_duration(steps[shortest])} a step."
    if format_duration(steps[shortest]) == format_duration(steps[longest]):
        return f"{format_duration(steps[shortest])} on every rank."
    return (
        f"from {format_duration(steps[shortest])} on rank {shortest} "
        f"to {format_duration(steps[longest])} on rank {longest}."
    )


def _tell_length(ns: int | None, step_ns: int) -> str:
    of_step = f"of a step of {format_duration(step_ns)}"
    return (
        f"{format_duration(ns)}, {format_share(ns / step_ns)} {of_step}" if ns is not None else f"not known, {of_step}"
    )


def _describe_unknown(
    names: Sequence[str], stacks: Mapping[int, Mapping[str, int | None]], ranks: Sequence[int]
) -> list[str]:
    found = {name: [rank for rank in ranks if stacks[rank].get(name, 0) is None] for name in names}
    return [
        f"Not known on {'every rank' if len(some) == len(ranks) else f'{len(some):,} of {len(ranks):,} ranks'}: "
        f"{hue_of(name).label}."
        for name, some in found.items()
        if some
    ]


def _rows(
    ranks: Sequence[int],
    names: Sequence[str],
    stacks: Mapping[int, Mapping[str, int | None]],
    steps: Mapping[int, int],
    unit: Unit,
) -> tuple[tuple[str, ...], ...]:
    decimals = choose_decimals([step / unit.size for step in steps.values()])
    return tuple(
        (
            str(rank),
            f"{steps[rank] / unit.size:.{decimals}f}",
            *(
                "\u2013" if (ns := stacks[rank].get(name, 0)) is None else f"{ns / unit.size:.{decimals}f}"
                for name in names
            ),
        )
        for rank in ranks
    )
