"""The memory of the worst rank over the run, with the steps under it."""

import plotly.graph_objects as go

from dtprof.figures.drawing import Drawing, Nothing, as_label, new_figure
from dtprof.figures.quantities import SIZES, choose_unit, format_bytes
from dtprof.figures.source import Source


def draw_memory_course(source: Source) -> Drawing | Nothing:
    """Draw the samples of the rank with the highest peak over the steps."""
    memory = source.closeup.memory.ranks if source.closeup else {}
    peaks = {rank.rank: rank.peak_bytes or 0 for rank in source.summary.ranks}
    known = {rank: own for rank, own in memory.items() if own.total is not None}
    if not known:
        return Nothing(
            why="Memory was not sampled.",
            remedy="Samples are taken at each step: let the job end one, with an optimizer of torch or dtprof.step().",
        )
    worst = max(known, key=lambda rank: peaks.get(rank, 0))
    courses = known[worst].courses
    unit = choose_unit([float(course.value.max()) for course in courses.values()], SIZES)
    figure = new_figure(
        title=f"Memory of rank {worst} over the run", x_title="step", y_title=f"memory ({unit.name})", height=330
    )
    for position, (name, course) in enumerate(courses.items()):
        word = name.removesuffix("_bytes").replace("_", " ")
        figure.add_trace(
            go.Scatter(
                name=as_label(word),
                meta="ink" if name == known[worst].total else f"series {position % 6}",
                mode="lines+markers" if len(course.step) <= 60 else "lines",
                line={"width": 2.4 if name == known[worst].total else 1.4, "shape": "hv"},
                marker={"size": 4},
                x=course.step,
                y=course.value / unit.size,
                hoverinfo="text",
                hovertext=[
                    f"<b>{as_label(word)}</b><br>{format_bytes(value)} at step {step}"
                    for step, value in zip(course.step.tolist(), course.value.tolist(), strict=True)
                ],
            )
        )
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(showgrid=False)
    growth = known[worst].growth_bytes_per_step
    grows = "" if growth is None else f" Over the later half it changes by {_signed(growth)} a step."
    return Drawing(
        figure=figure,
        sentence=f"Rank {worst} has the highest peak, {format_bytes(peaks.get(worst, 0))}.{grows}",
        columns=("sample", "samples kept", "least", "most", "last"),
        rows=tuple(
            (
                name,
                str(len(course.value)),
                *(format_bytes(value) for value in (course.value.min(), course.value.max(), course.value[-1])),
            )
            for name, course in courses.items()
        ),
        zooms=True,
    )


def _signed(value: float) -> str:
    sign = "+" if value >= 0 else "\u2212"
    return f"{sign}{format_bytes(abs(value))}"
