"""A matrix of ranks by ranks as a heatmap, for figures that compare pairs."""

from collections.abc import Callable

from dtprof.analysis.communication.rank_pairs import RankPairs
from dtprof.report.figures.drawing import new_figure
from dtprof.report.figures.figure_numbers import Unit, choose_unit
from dtprof.report.figures.plot import Plot, new_trace

MAX_PRINTED = 16
"""Ranks up to which each cell bears its value."""


def draw_matrix(
    pairs: RankPairs,
    *,
    titles: tuple[str, str, str],
    units: tuple[Unit, ...],
    write: Callable[[float], str],
    describe: Callable[[int, int, str], str],
) -> Plot:
    """Return the figure; a cell without a value stays empty.

    Parameters:
        titles: of the figure, its columns, its rows.
        write: a value, as a cell bears it.
        describe: what hovering shows, of the ranks of a row and a column and their value as it is written.
    """
    ranks, values = pairs.ranks, pairs.values
    names = [str(rank) for rank in ranks]
    unit = choose_unit([float(values.max())], units)
    title, x_title, y_title = titles
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
                [describe(row_rank, other, write(value)) for other, value in zip(ranks, row, strict=True)]
                for row_rank, row in zip(ranks, rows, strict=True)
            ],
        )
    )
    figure.update_xaxes(type="category", showgrid=False, side="top", nticks=33)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", nticks=33)
    return figure
