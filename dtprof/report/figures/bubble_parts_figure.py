"""The bubble of the pipeline, split by cause and by when it was."""

from typing import Any

from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, new_figure
from dtprof.report.figures.figure_numbers import NBSP, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.pipeline_figure import explain_no_pipeline

CAUSES = ("schedule", "imbalance", "exposed_p2p", "jitter")
TIMES = ("warm_up", "steady", "drain")
LEAST_GAIN = 0.0005
"""As a share of the window: parts that would read 0.0 % are not mentioned."""


def draw_bubble_parts(source: Source) -> Drawing | Nothing:
    """Draw one bar for the causes and one for the times; both sum to the bubble."""
    result = source.summary.pipeline
    if result is None:
        return explain_no_pipeline(source.summary)
    rows: list[tuple[str, tuple[str, ...], dict[str, float]]] = []
    if result.parts is not None:
        rows.append(("by cause", CAUSES, result.parts))
    if result.by_time:
        rows.append(("by time", TIMES, result.by_time))
    if not rows:
        return Nothing(
            why="The bubble cannot be split.",
            remedy="The actions of all ranks of a pipeline must fit together to be replayed.",
        )
    figure = new_figure(
        title="Bubble by cause and by time", x_title="share of the window (%)", y_title="", height=104 + 40 * len(rows)
    )
    for name, parts, values in rows:
        for part in parts:
            figure.add_trace(_bar(name, part, 100 * values.get(part, 0.0)))
    figure.update_layout(barmode="relative", bargap=0.3)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    if result.theory_fraction is not None:
        theory_percent = 100 * result.theory_fraction
        figure.add_shape(
            "line", x0=theory_percent, x1=theory_percent, line={"width": 1.5, "dash": "dot", "color": "#707c8e"}
        )
        figure.add_annotation(
            x=theory_percent, y=1, yref="paper", yanchor="bottom", xanchor="left", showarrow=False,
            text=f"theory {format_share(result.theory_fraction)}", font={"size": 11},
        )  # fmt: skip
    gains = [hue_of(part).label for part in CAUSES if (result.parts or {}).get(part, 0.0) < -LEAST_GAIN]
    gain = f" Left of 0 is what makes it smaller: {' and '.join(gains)}." if gains else ""
    theory = f", {format_share(result.theory_fraction)} by theory" if result.theory_fraction is not None else ""
    return Drawing(
        plot=figure,
        sentence=f"The bubble is {format_share(result.bubble_fraction)} of the window{theory}.{gain}",
        columns=("split", "part", "share of the window (%)"),
        rows=tuple(
            (name, hue_of(part).label, f"{100 * values.get(part, 0.0):.2f}")
            for name, parts, values in rows
            for part in parts
        ),
    )


def _bar(name: str, part: str, percent: float) -> Any:
    hue = hue_of(part)
    hover = f"<b>{hue.label}</b>: {percent:.1f}{NBSP}% of the window<br>{hue.meaning}"
    return bars(as_label(hue.label), part, [name], [percent], [hover])
