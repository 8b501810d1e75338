"""What each straggler costs the others, and in which phase it loses the time."""

import plotly.graph_objects as go

from dtprof.analysis.results import PHASES
from dtprof.report.figures.drawing import Drawing, Nothing, marker, new_figure, rank_names
from dtprof.report.figures.figure_numbers import DURATIONS, choose_unit, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of


def draw_blame(source: Source) -> Drawing | Nothing:
    """Draw one bar a straggler: its excess over the others by phase."""
    rows = [one for one in source.summary.stragglers if any(value > 0 for value in one.phases_ns.values())]
    if not rows:
        return Nothing(
            why="No rank's own work holds the others up.",
            remedy="A straggler is a rank whose own work is long and for which others wait, often and at a cost.",
        )
    unit = choose_unit([sum(one.phases_ns.values()) for one in rows], DURATIONS)
    names = rank_names([one.rank for one in rows])
    figure = new_figure(
        title="Time lost by stragglers", x_title=f"more than the other ranks, per step ({unit.name})", y_title="",
        height=104 + 34 * len(rows),
    )  # fmt: skip
    for phase in (phase for phase in PHASES if any(one.phases_ns.get(phase, 0) > 0 for one in rows)):
        hue = hue_of(phase)
        figure.add_trace(
            go.Bar(
                name=hue.label,
                meta=phase,
                orientation="h",
                x=[max(0, one.phases_ns.get(phase, 0)) / unit.size for one in rows],
                y=names,
                customdata=[one.rank for one in rows],
                marker=marker(phase),
                hoverinfo="text",
                hovertext=[
                    f"<b>{name}: {hue.label}</b><br>"
                    f"{format_duration(one.phases_ns.get(phase, 0))} more a step than others"
                    f"<br>to blame in {format_share(one.last_share)} of the steps waited in"
                    for name, one in zip(names, rows, strict=True)
                ],
                textposition="none",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.28)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_xaxes(rangemode="tozero")
    worst = rows[0]
    return Drawing(
        figure=figure,
        sentence=f"Rank {worst.rank} loses most in {hue_of(worst.phase or '').label or 'no single phase'}"
        + (f", since step {worst.since_step}." if worst.since_step is not None else "."),
        columns=("rank", *(f"{hue_of(phase).label} ({unit.name})" for phase in PHASES)),
        rows=tuple(
            (str(one.rank), *(f"{one.phases_ns.get(phase, 0) / unit.size:.2f}" for phase in PHASES)) for one in rows
        ),
    )
