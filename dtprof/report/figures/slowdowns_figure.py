"""By how much each operation, rank and stage alone makes steps longer than ideal ones."""

from dtprof.report.figures.change_gains_figure import find_prediction
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, new_figure
from dtprof.report.figures.figure_numbers import format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of

MAX_PARTS = 6
"""Of a kind: the largest."""


def draw_slowdowns(source: Source) -> Drawing | Nothing:
    """Draw one bar a part: what it adds to the ideal step, all else being ideal."""
    found = find_prediction(source)
    if isinstance(found, Nothing):
        return found
    slow = found.slowdowns
    if slow is None or slow.slowdown is None:
        return Nothing(
            why="The run has no ideal step to compare with.",
            remedy="Record steps in which ranks compute, with begin and end.",
        )
    parts = [
        *(
            (hue_of(name).label or name, share, "forward")
            for name, share in list(slow.by_operation.items())[:MAX_PARTS]
        ),
        *((f"rank {rank}", share, "exposed_wait") for rank, share in list(slow.by_rank.items())[:MAX_PARTS]),
        *((f"stage {stage}", share, "bubble") for stage, share in list(slow.by_stage.items())[:MAX_PARTS]),
    ]
    figure = new_figure(
        title="Beyond the ideal step", x_title="longer than ideal (%)", y_title="", height=104 + 26 * len(parts)
    )
    for legend, hue in (("operations", "forward"), ("ranks", "exposed_wait"), ("stages", "bubble")):
        some = [(name, share) for name, share, own in parts if own == hue]
        if some:
            figure.add_trace(
                bars(
                    legend,
                    hue,
                    [as_label(name) for name, _ in some],
                    [100 * (share - 1) for _, share in some],
                    [f"<b>{as_label(name)}</b><br>steps {share:.3f} times the ideal" for name, share in some],
                )
            )
    figure.update_layout(barmode="overlay", bargap=0.28)
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    return Drawing(
        plot=figure,
        sentence=f"The run is {slow.slowdown:.3f} times as slow as its ideal step of {format_duration(slow.ideal_ns)}.",
        columns=("part", "slowdown"),
        rows=tuple((name, f"{share:.4f}") for name, share, _ in parts),
    )
