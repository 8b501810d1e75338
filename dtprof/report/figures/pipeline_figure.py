"""The schedule of one step of a pipeline: planned above, measured below, on one scale of time."""

from collections.abc import Sequence
from typing import Any

from dtprof.analysis.pipeline.bubbles import has_unknown_bubble
from dtprof.analysis.pipeline.schedule_chart import ChartAction, PipelineChart
from dtprof.analysis.results import Summary
from dtprof.report.figures.drawing import Drawing, Nothing, bars, marker, name_rows, new_figure
from dtprof.report.figures.figure_numbers import NBSP, format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.plot import Plot

KINDS = {
    "F": ("forward", "forward"),
    "L": ("loss", "loss"),
    "B": ("backward", "backward"),
    "I": ("backward", "gradient of the inputs"),
    "W": ("weight_gradient", "gradient of the weights"),
}
"""Hue and meaning of each kind of action."""
ROW_PX = 34
LEAST_LABEL_PX = 8
"""A number of a microbatch that had to be smaller is left out."""
MAX_NAMED = 512
"""Actions up to which each bears the number of its microbatch."""
NO_PIPELINE = Nothing(
    why="The job has no pipeline.",
    remedy="Schedules of torch.distributed.pipelining, Megatron-Core and DeepSpeed are recorded when they run; the "
    "reference trainer has --pp 2.",
)


UNKNOWN_SCHEDULE = Nothing(
    why="Ranks may act as stages of a pipeline whose schedule is neither recorded nor inferred; the caveats say why.",
    remedy="Schedules of torch.distributed.pipelining, Megatron-Core and DeepSpeed are recorded when they run.",
)


def explain_no_pipeline(summary: Summary) -> Nothing:
    """Return why there is nothing to draw of a pipeline: there is none, or its schedule is not known."""
    return UNKNOWN_SCHEDULE if has_unknown_bubble(summary) else NO_PIPELINE


def draw_pipeline(source: Source) -> Drawing | Nothing:
    """Draw the planned and the measured schedule of the chosen step."""
    if source.summary.pipeline is None:
        return explain_no_pipeline(source.summary)
    chart = source.closeup.pipeline if source.closeup else None
    if chart is None:
        return Nothing(
            why="No step of the pipeline can be drawn.",
            remedy="All ranks of a pipeline, on one clock, must have recorded a step that figures are taken from.",
        )
    num = len(chart.ranks)
    parts = (("planned", chart.planned, 0.0), ("measured", chart.measured, num + 0.7 if chart.planned else 0.0))
    shown = [(name, actions, top) for name, actions, top in parts if actions]
    figure = new_figure(
        title=f"Schedule of step {chart.step}",
        x_title="since the first forward (ms)",
        y_title="",
        height=int(96 + ROW_PX * (num * len(shown) + 0.7 * (len(shown) - 1))),
    )
    row_of = {rank: position for position, rank in enumerate(chart.ranks)}
    for name, actions, top in shown:
        length = chart.planned_ns if name == "planned" else chart.measured_ns
        figure.add_trace(_bubbles(name, num, top, length))
        for kind in KINDS:
            some = [action for action in actions if action.kind == kind]
            if some:
                figure.add_trace(_bars(name, kind, some, top, row_of, len(actions) <= MAX_NAMED))
    _name_rows(figure, chart, shown)
    return Drawing(
        plot=figure,
        sentence=_describe(chart, source),
        columns=("schedule", "rank", "stage", "action", "microbatch", "begins (ms)", "lasts (ms)"),
        rows=tuple(
            (
                name,
                str(action.rank),
                str(action.stage),
                KINDS[action.kind][1],
                str(action.microbatch),
                f"{action.begin_ns / 1e6:.3f}",
                f"{(action.end_ns - action.begin_ns) / 1e6:.3f}",
            )
            for name, actions, _ in shown
            for action in actions
        ),
        zooms=True,
    )


def _bubbles(name: str, num: int, top: float, length_ns: int) -> Any:
    """Draw the whole window of each rank as a bubble; its actions are drawn over it."""
    hue = hue_of("bubble")
    return bars(
        hue.label,
        "bubble",
        [top + row for row in range(num)],
        [length_ns / 1e6] * num,
        [f"<b>{hue.label}</b><br>{hue.meaning}"] * num,
        legendgroup="bubble",
        showlegend=name == "measured",
        base=[0.0] * num,
        width=0.86,
        opacity=0.55,
    )


def _bars(
    name: str, kind: str, actions: Sequence[ChartAction], top: float, row_of: dict[int, int], numbered: bool
) -> Any:
    hue, meaning = KINDS[kind]
    return bars(
        f"{kind}{NBSP}{meaning}",
        hue,
        [top + row_of[action.rank] for action in actions],
        [(action.end_ns - action.begin_ns) / 1e6 for action in actions],
        [
            f"<b>{meaning} of microbatch {action.microbatch}</b>, {name}<br>stage {action.stage} on rank {action.rank}"
            f"<br>{format_duration(action.end_ns - action.begin_ns)}, from {format_duration(action.begin_ns)}"
            for action in actions
        ],
        legendgroup=kind,
        showlegend=name == "measured",
        base=[action.begin_ns / 1e6 for action in actions],
        width=0.86,
        marker={**marker(hue), "line": {"width": 1, "color": "rgba(255,255,255,0.55)"}},
        customdata=[action.rank for action in actions],
        text=[f"{kind}{action.microbatch}" for action in actions] if numbered and kind != "L" else None,
        textposition="inside" if numbered and kind != "L" else "none",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 11, "color": "#ffffff" if hue != "weight_gradient" else "#10233c"},
        constraintext="inside",
    )


def _name_rows(figure: Plot, chart: PipelineChart, shown: Sequence[tuple[str, Sequence[ChartAction], float]]) -> None:
    places, names = [], []
    for _, _, top in shown:
        for row, (rank, stages) in enumerate(zip(chart.ranks, chart.stages, strict=True)):
            places.append(top + row)
            stage = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
            names.append(f"{stage}  <b>rank {rank}</b>")
    # On a narrow screen Plotly would shrink each label for itself, some to a speck.
    figure.update_layout(uniformtext={"mode": "hide", "minsize": LEAST_LABEL_PX})
    name_rows(figure, places, names, bottom=max(places) + 0.55, top=-0.75)
    figure.update_xaxes(range=[0, max(chart.planned_ns, chart.measured_ns) / 1e6 * 1.005])
    for name, _, top in shown:
        figure.add_annotation(
            x=0,
            y=top - 0.47,
            xanchor="left",
            yanchor="bottom",
            text=f"<b>{name}</b>",
            showarrow=False,
            font={"size": 12},
        )


def _describe(chart: PipelineChart, source: Source) -> str:
    result = source.summary.pipeline
    measured = (
        f"step {chart.step} took {format_duration(chart.measured_ns)} from its first forward to its last backward"
    )
    if not chart.planned:
        return f"As it ran: {measured}. The schedule has no plan that could be drawn."
    name = f"{result.schedule} with {result.microbatches} microbatches: " if result else ""
    return (
        f"{name}planned {format_duration(chart.planned_ns)} with equal times and free messages; {measured}. "
        "It is the step of median length."
    )
