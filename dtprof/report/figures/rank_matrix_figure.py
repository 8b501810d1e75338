"""A matrix of pairs of ranks as a heatmap, for figures that compare them."""

from collections.abc import Callable

from dtprof.analysis.communication.rank_pairs import RankPairs
from dtprof.report.figures.drawing import new_figure
from dtprof.report.figures.figure_numbers import Unit, choose_unit
from dtprof.report.figures.plot import Plot, new_trace

MAX_PRINTED = 16
"""Rows up to which each cell bears its value."""


def draw_matrix(
    pairs: RankPairs,
    *,
    title: str,
    axis_titles: tuple[str, str],
    units: tuple[Unit, ...],
    write: Callable[[float], str],
    describe: Callable[[str, str, str], str],
) -> Plot:
    """Return the figure; a cell without a value stays empty.

    Parameters:
        axis_titles: what columns and rows do, before their unit: "to" becomes "to rank".
        write: a value, as a cell bears it.
        describe: what hovering shows, of the names of a row and a column and their value as it is written.
    """
    names, values = list(pairs.names), pairs.values
    labels = [pairs.label(row) for row in range(len(names))]
    unit = choose_unit([float(values.max())], units)
    x_title, y_title = (f"{does} {pairs.unit}".strip() for does in axis_titles)
    figure = new_figure(
        title=title, x_title=x_title, y_title=y_title,
        height=min(760, 90 + max(18, min(44, 360 // len(names))) * len(names)),
    )  # fmt: skip
    figure.update_layout(margin={"b": 12})  # its axis lies above
    is_printed = len(names) <= MAX_PRINTED
    rows = values.tolist()
    figure.add_trace(
        new_trace(
            "heatmap",
            z=values / unit.size,
            x=names,
            y=names,
            meta="scale",
            zmin=0,
            colorbar={"title": {"text": unit.name}, "thickness": 12, "outlinewidth": 0},
            xgap=1,
            ygap=1,
            text=[[write(value) if value else "" for value in row] for row in rows] if is_printed else None,
            texttemplate="%{text}" if is_printed else None,
            hoverinfo="text",
            hovertext=[
                [describe(label, other, write(value)) for other, value in zip(labels, row, strict=True)]
                for label, row in zip(labels, rows, strict=True)
            ],
        )
    )
    figure.update_xaxes(type="category", showgrid=False, side="top", nticks=33)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", nticks=33)
    return figure
