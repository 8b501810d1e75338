"""Step time over the steps of the run: median and range of the ranks, with warm-up and unmeasured steps marked."""

import numpy as np

from dtprof.analysis.results import Summary
from dtprof.analysis.steps.step_lanes import MAX_POINTS, StepLanes, StepPoints, align_steps, reduce_steps
from dtprof.formatting import plural
from dtprof.report.figures.drawing import Drawing, Nothing, new_figure
from dtprof.report.figures.figure_numbers import (
    DURATIONS,
    Unit,
    choose_decimals,
    choose_unit,
    format_duration,
    format_share,
)
from dtprof.report.figures.plot import Plot, new_trace

MAX_RANK_LINES = 8


def draw_step_times(summary: Summary) -> Drawing | Nothing:
    """Draw the duration of every step; mark the steps that are not measured."""
    series = [times for times in summary.step_series if times.duration_ns]
    if not series:
        return Nothing(
            why="No step has both a begin and an end to measure.",
            remedy="Steps are counted from torch.optim optimizers: call step() of one of them on every rank.",
        )
    lanes = align_steps(series)
    points = reduce_steps(lanes)
    typical = summary.steps.duration_ns.median if summary.steps.duration_ns else float(np.nanmedian(lanes.durations))
    unit = choose_unit([typical], DURATIONS)
    figure = new_figure(title="Step time over steps", x_title="step", y_title=f"step time ({unit.name})", height=290)
    _add_band(figure, points, unit, len(series))
    if 1 < len(series) <= MAX_RANK_LINES and len(lanes.steps) <= MAX_POINTS:
        _add_rank_lines(figure, lanes, unit)
    _add_middle(figure, points, unit, len(series))
    _mark_unmeasured(figure, summary, lanes)
    _set_scale(figure, summary, lanes, unit)
    return Drawing(
        plot=figure,
        sentence=_describe(summary, lanes),
        columns=("steps", *(f"{name} ({unit.name})" for name in ("fastest", "median", "slowest")), "slowest rank"),
        rows=_rows(points, unit),
        zooms=True,
    )


def _add_band(figure: Plot, points: StepPoints, unit: Unit, num_ranks: int) -> None:
    if num_ranks == 1 and (points.last == points.first).all():
        return
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": "band"}
    x = points.last
    figure.add_trace(new_trace("scatter", x=x, y=points.low / unit.size, showlegend=False, meta="edge", **edge))
    figure.add_trace(
        new_trace(
            "scatter",
            x=x,
            y=points.high / unit.size,
            fill="tonexty",
            fillcolor="rgba(120,130,145,0.22)",
            name="fastest to slowest rank",
            meta="band",
            **edge,
        )
    )


def _add_rank_lines(figure: Plot, lanes: StepLanes, unit: Unit) -> None:
    for position, (rank, row) in enumerate(zip(lanes.ranks, lanes.durations, strict=True)):
        figure.add_trace(
            new_trace(
                "scatter",
                x=lanes.steps,
                y=row / unit.size,
                mode="lines",
                line={"width": 0.8, "color": "#8a919c"},
                opacity=0.7,
                name="each rank",
                showlegend=position == 0,
                legendgroup="ranks",
                meta="rank",
                hoverinfo="skip",
                customdata=[rank],
            )
        )


def _add_middle(figure: Plot, points: StepPoints, unit: Unit, num_ranks: int) -> None:
    figure.add_trace(
        new_trace(
            "scatter",
            x=points.last,
            y=points.middle / unit.size,
            mode="lines+markers" if len(points.last) <= 60 else "lines",
            line={"width": 1.8, "color": "#1c2430"},
            marker={"size": 4, "color": "#1c2430"},
            name="median of the ranks" if num_ranks > 1 else "step time",
            meta="ink",
            hoverinfo="text",
            hovertext=_explain(points),
        )
    )


def _explain(points: StepPoints) -> list[str]:
    """Return the hover text of each point."""
    texts = []
    for first, last, low, middle, high, rank in zip(
        points.first, points.last, points.low, points.middle, points.high, points.slowest_rank, strict=True
    ):
        name = f"<b>step {last}</b>" if first == last else f"<b>steps {first} to {last}</b>"
        extremes = f"<br>fastest {format_duration(low)}, slowest {format_duration(high)} (rank {rank})"
        texts.append(f"{name}<br>median {format_duration(middle)}{extremes if low != high else ''}")
    return texts


def _mark_unmeasured(figure: Plot, summary: Summary, lanes: StepLanes) -> None:
    if summary.steps.used is None:
        return
    first, last = summary.steps.used
    left, right = lanes.steps[0] - 0.5, lanes.steps[-1] + 0.5
    for begin, end, name in ((left, first - 0.5, "warm-up, not measured"), (last + 0.5, right, "not measured")):
        if end > begin:
            figure.add_shape(
                "rect", x0=begin, x1=end, fillcolor="rgba(120,130,145,0.14)", line={"width": 0}, layer="below"
            )
            figure.add_annotation(
                x=begin if begin == left else end,
                xref="x",
                xanchor="left" if begin == left else "right",
                y=0,
                yref="y domain",
                yanchor="bottom",
                text=name,
                font={"size": 11},
                showarrow=False,
                textangle=-90 if end - begin < 0.16 * (right - left) else 0,
            )


def _set_scale(figure: Plot, summary: Summary, lanes: StepLanes, unit: Unit) -> None:
    """Scale to the measured steps: a first step that takes 20 times longer would flatten the others."""
    steps, table = lanes.steps, lanes.durations
    figure.update_xaxes(range=[steps[0] - 0.5, steps[-1] + 0.5], showgrid=False)
    first, last = summary.steps.used or (int(steps[0]), int(steps[-1]))
    is_used = (steps >= first) & (steps <= last)
    used = table[:, is_used] if is_used.any() else table
    top = 1.12 * float(np.nanmax(used)) / unit.size
    figure.update_yaxes(range=[0, top])
    highest = float(np.nanmax(table))
    if highest / unit.size > top:
        step = int(steps[int(np.nanargmax(table)) % len(steps)])
        figure.add_annotation(
            x=step,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=f"\u2191 step {step}: {format_duration(highest)}, above the scale",
            showarrow=False,
            xanchor="left" if step <= steps.mean() else "right",
            font={"size": 11},
        )


def _describe(summary: Summary, lanes: StepLanes) -> str:
    spread = summary.steps.duration_ns
    if spread is None or summary.steps.used is None:
        return f"Duration of {plural(len(lanes.steps), 'step')}; none of them is measured."
    first, last = summary.steps.used
    return (
        f"Duration of {plural(len(lanes.steps), 'step')}. Steps {first} to {last} are measured: "
        f"median {format_duration(spread.median)}, {format_share(0.8)} of them "
        f"between {format_duration(spread.p10)} and {format_duration(spread.p90)}."
    )


def _rows(points: StepPoints, unit: Unit) -> tuple[tuple[str, ...], ...]:
    decimals = choose_decimals(points.high / unit.size)
    return tuple(
        (
            str(last) if first == last else f"{first} to {last}",
            *(f"{value / unit.size:.{decimals}f}" for value in (low, middle, high)),
            str(rank),
        )
        for first, last, low, middle, high, rank in zip(
            points.first, points.last, points.low, points.middle, points.high, points.slowest_rank, strict=True
        )
    )
