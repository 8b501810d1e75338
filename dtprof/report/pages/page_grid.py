"""The ranks as a grid, laid out by their axes of parallelism, coloured by a metric of choice."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtprof.analysis.results import PARTS, RankResult, Summary
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_numbers import (
    DURATIONS,
    SIZES,
    Unit,
    choose_decimals,
    choose_unit,
    format_bytes,
    format_duration,
    format_share,
)
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.pages.page_dashboard import Panel
from dtprof.report.pages.page_markup import Markup, element
from dtprof.report.pages.page_tables import render_numbers

PanelDrawing = tuple[Markup, Mapping[str, Any]]
WRAP = 32
"""Ranks a row at most."""
MOST_WIDE = 16
"""Ranks a row up to which every cell has room for its unit."""
_SHARES = (Unit(name="%", size=0.01),)
_UNITS = {"exposed": _SHARES, "peak": SIZES}
"""By metric; those of others are durations."""
OUTER_AXES = ("pp", "dp_replicate", "dp", "dp_shard", "fsdp", "ddp", "hsdp")
INNER_AXES = ("cp", "sp", "ep", "tp")
"""Axes are laid out from the outer to the inner ones, those of neither kind between."""


def render_rank_grid(panel: Panel, source: Source) -> PanelDrawing | Nothing:
    """Return the placeholder of the grid with its values as a table, and its data for the browser."""
    summary = source.summary
    ranks = [rank for rank in summary.ranks if rank.step_ns or rank.peak_bytes]
    if not ranks:
        return Nothing(
            why="Nothing was measured that ranks could be compared by.",
            remedy="Let the job end at least two optimizer steps on every rank.",
        )
    coordinates = source.closeup.coordinates if source.closeup else {}
    axes = _choose_axes(coordinates, [rank.rank for rank in ranks])
    places = _place([rank.rank for rank in ranks], coordinates, axes)
    num_columns = max(column for _, column in places.values()) + 1
    metrics = _metrics(summary, ranks, is_dense=num_columns > MOST_WIDE)
    document = {
        "axes": list(axes),
        "columns": num_columns,
        "cells": [
            {
                "rank": rank.rank,
                "row": places[rank.rank][0],
                "column": places[rank.rank][1],
                "where": ", ".join(f"{axis} {place}" for axis, place in coordinates.get(rank.rank, {}).items()),
            }
            for rank in ranks
        ],
        "metrics": metrics,
    }
    names = [str(metric["name"]) for metric in metrics]
    rows = [(str(rank.rank), *(metric["texts"][position] for metric in metrics)) for position, rank in enumerate(ranks)]
    markup = element(
        "figure",
        element("div", id=f"grid-{panel.anchor}", class_="grid-place"),
        element("figcaption", _describe(axes, len(ranks))),
        render_numbers(panel.title, ("rank", *names), rows),
    )
    return markup, {"grid": document}


def _choose_axes(coordinates: Mapping[int, Mapping[str, int]], ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the axes that tell all ranks apart, outermost first: pipeline, then data, then the inner ones."""
    present = {axis for rank in ranks for axis in coordinates.get(rank, {})}
    between = sorted(present - {*OUTER_AXES, *INNER_AXES})
    axes = tuple(axis for axis in (*OUTER_AXES, *between, *INNER_AXES) if axis in present)
    known = {tuple(coordinates.get(rank, {}).get(axis, -1) for axis in axes) for rank in ranks}
    return axes if len(known) == len(ranks) else ()


def _place(
    ranks: Sequence[int], coordinates: Mapping[int, Mapping[str, int]], axes: Sequence[str]
) -> dict[int, tuple[int, int]]:
    """Return row and column of each rank: the first axis goes down, the others together go right."""
    if len(axes) < 2:
        return {rank: divmod(position, WRAP) for position, rank in enumerate(ranks)}
    keys = {rank: tuple(coordinates[rank].get(axis, 0) for axis in axes) for rank in ranks}
    rows = {value: row for row, value in enumerate(sorted({key[0] for key in keys.values()}))}
    columns = {value: column for column, value in enumerate(sorted({key[1:] for key in keys.values()}))}
    folds = -(-len(columns) // WRAP)
    return {
        rank: (rows[key[0]] * folds + columns[key[1:]] // WRAP, columns[key[1:]] % WRAP) for rank, key in keys.items()
    }


def _metrics(summary: Summary, ranks: Sequence[RankResult], *, is_dense: bool) -> list[dict[str, Any]]:
    blame = {straggler.rank: straggler.blame_ns_per_step for straggler in summary.stragglers or ()}

    metrics = [
        _metric("step", "step time", [rank.step_ns for rank in ranks], format_duration),
        *(_metric(name, hue_of(name).label, [_part(rank, name) for rank in ranks], format_duration) for name in PARTS),
        _metric("exposed", "exposed communication", [rank.exposed_share for rank in ranks], format_share, top=1.0),
        _metric("peak", "peak memory", [rank.peak_bytes for rank in ranks], format_bytes),
        _metric("blame", "cost to others", [_as_float(blame.get(rank.rank)) for rank in ranks], format_duration),
    ]
    if is_dense:
        metrics = [
            {**metric, **_in_one_unit(metric["values"], _UNITS.get(metric["key"], DURATIONS))} for metric in metrics
        ]
    return [metric for metric in metrics if metric["top"] > 0]


def _part(rank: RankResult, name: str) -> float | None:
    return _as_float((rank.partition_ns or {}).get(name))


def _as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _in_one_unit(values: Sequence[float | None], units: tuple[Unit, ...]) -> dict[str, Any]:
    """Return the unit of the largest value, and all values in it as a small cell has room for."""
    unit = choose_unit(values, units)
    counts = [None if value is None else value / unit.size for value in values]
    decimals = min(2, choose_decimals(counts))
    return {"unit": unit.name, "short": [_write_short(count, decimals) for count in counts]}


def _write_short(count: float | None, decimals: int) -> str:
    if not count:
        return "\u2013" if count is None else "0"
    smallest = 10**-decimals
    return f"{count:.{decimals}f}" if count >= smallest / 2 else f"<{smallest:g}".replace("0.", ".")


def _metric(
    key: str, name: str, values: Sequence[float | None], write: Callable[[float], str], *, top: float | None = None
) -> dict[str, Any]:
    """Return one metric: its scale is fixed, from 0 to the largest value of any rank."""
    largest = max((value for value in values if value is not None), default=0.0)
    return {
        "key": key,
        "name": name,
        "top": top if top is not None and largest > 0 else largest,
        "scale": write(top if top is not None else largest),
        "values": [None if value is None else float(f"{value:.4g}") for value in values],
        "texts": ["not known" if value is None else write(value) for value in values],
    }


def _describe(axes: Sequence[str], num_ranks: int) -> str:
    if num_ranks == 1:
        return "One rank. Choose it to mark it in every figure below and on the other pages."
    if len(axes) > 1:
        return (
            f"{num_ranks:,} ranks: {axes[0]} goes down, {' and '.join(axes[1:])} to the right. "
            "Choose a rank to mark it in every figure below and on the other pages."
        )
    return f"{num_ranks:,} ranks in order. Choose one to mark it in every figure below and on the other pages."
