"""The result of a figure function, and the shared parts of figures: label text and the plain layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.plot import Plot, new_trace

MAX_LABEL_LINE = 120
TITLE_STANDOFF = 8
"""Pixels between the labels of an axis and its title; without it Plotly lets long labels run into the title."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A plot and the same in words and numbers, for those who cannot see it.

    Every trace carries in `meta` the name of its hue, so that a page can colour it for a dark background.
    """

    plot: Plot
    sentence: str  # what is to be seen
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    zooms: bool = False  # the horizontal axis is long: keys and wheel move along it

    @property
    def figure(self) -> Any:
        """The plot as a plotly.graph_objects.Figure, validated; plotly has no types."""
        import plotly.graph_objects as go

        return go.Figure({"data": self.plot.traces, "layout": self.plot.layout})


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Why there is nothing to show, and how to get it."""

    why: str
    remedy: str


def as_label(text: str) -> str:
    """Return text that Plotly shows as it is: it would read tags and entities in it otherwise."""
    lines = text.split("\n")
    short = [line if len(line) <= MAX_LABEL_LINE else line[: MAX_LABEL_LINE - 3] + "..." for line in lines]
    return "<br>".join(line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for line in short)


def new_figure(*, title: str, x_title: str, y_title: str, height: int) -> Plot:
    """Return an empty figure with titled axes."""
    layout = {
        "template": {"data": {"scatter": [{"type": "scatter"}]}},  # what Plotly calls "none"
        "title": {"text": title, "x": 0, "xanchor": "left"},
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 40, "b": 48},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif", "size": 12},
        "hoverlabel": {"align": "left", "namelength": -1},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "xaxis": {"title": {"text": x_title, "standoff": TITLE_STANDOFF}, "zeroline": False, "automargin": True},
        "yaxis": {"title": {"text": y_title, "standoff": TITLE_STANDOFF}, "zeroline": False, "automargin": True},
    }
    return Plot(layout)


def marker(name: str) -> dict[str, Any]:
    """Return the marker of bars of a part, phase or kind."""
    hue = hue_of(name)
    look: dict[str, Any] = {"color": hue.light, "line": {"width": 0}}
    if hue.pattern:
        look["pattern"] = {"shape": hue.pattern, "size": 6, "solidity": 0.22, "fillmode": "overlay"}
    return look


def bars(
    name: str,
    hue: str,
    places: Any,
    lengths: Sequence[float] | Any,
    hover: Sequence[str],
    *,
    lying: bool = True,
    **more: Any,
) -> Any:
    """Return the bars of a part, phase or kind, horizontal or vertical; `more` is of Plotly's bars."""
    return new_trace(
        "bar",
        name=name,
        meta=hue,
        orientation="h" if lying else "v",
        x=lengths if lying else places,
        y=places if lying else lengths,
        marker=more.pop("marker", None) or marker(hue),
        hoverinfo="text",
        hovertext=hover,
        textposition=more.pop("textposition", "none"),
        **more,
    )


def stack_bars(figure: Plot, *, gap: float, lying: bool = True) -> None:
    """Stack the bars of a figure: horizontal ones from the top row on, vertical ones with one rank a place."""
    figure.update_layout(barmode="stack", bargap=gap)
    if lying:
        figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
        figure.update_xaxes(rangemode="tozero")
    else:
        figure.update_yaxes(rangemode="tozero")
        figure.update_xaxes(showgrid=False, nticks=33)


def name_rows(figure: Plot, places: Sequence[float], names: Sequence[str], *, bottom: float, top: float) -> None:
    """Name the rows of a chart of intervals, whose bars lie where they were; `top` and `bottom` are its edges."""
    figure.update_layout(barmode="overlay", bargap=0, hovermode="closest", dragmode="zoom")
    figure.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=names,
        range=[bottom, top],
        fixedrange=True,
        showgrid=False,
        ticks="",
    )


def axis_below(title: str, domain: tuple[float, float], *, num_ticks: int) -> dict[str, Any]:
    """Return a further vertical axis, which takes a part of the height of the plot."""
    return {
        "domain": domain,
        "title": {"text": title, "standoff": TITLE_STANDOFF},
        "rangemode": "tozero",
        "zeroline": False,
        "automargin": True,
        "nticks": num_ticks,
    }


def rank_names(ranks: Sequence[int]) -> list[str]:
    """Return the names of ranks on an axis."""
    return [f"rank {rank}" for rank in ranks]
