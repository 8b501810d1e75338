"""How long each stage of the pipeline takes for one microbatch: stages that differ make bubbles."""

from dtprof.report.figures.drawing import Drawing, Nothing, bars, new_figure, stack_bars
from dtprof.report.figures.figure_numbers import DURATIONS, choose_unit, format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.pipeline_figure import KINDS, explain_no_pipeline


def draw_stage_times(source: Source) -> Drawing | Nothing:
    """Draw one bar a stage, stacked by kind of action."""
    if source.summary.pipeline is None:
        return explain_no_pipeline(source.summary)
    chart = source.closeup.pipeline if source.closeup else None
    if chart is None or not chart.stage_times:
        return Nothing(why="The times of the stages are not known.", remedy="No step of the pipeline was kept whole.")
    stages = chart.stage_times
    totals = [sum(stage.mean_ns.values()) for stage in stages]
    unit = choose_unit(totals, DURATIONS)
    names = [f"stage {stage.stage}" for stage in stages]
    figure = new_figure(
        title="Time of each stage", x_title=f"time per microbatch ({unit.name}, mean)", y_title="",
        height=104 + 30 * len(stages),
    )  # fmt: skip
    for kind, (hue, meaning) in KINDS.items():
        if not any(kind in stage.mean_ns for stage in stages):
            continue
        figure.add_trace(
            bars(
                meaning,
                hue,
                names,
                [stage.mean_ns.get(kind, 0) / unit.size for stage in stages],
                [
                    f"<b>{name}: {meaning}</b><br>{format_duration(stage.mean_ns.get(kind, 0))} a microbatch"
                    f"<br>ranks {', '.join(map(str, stage.ranks))}"
                    for name, stage in zip(names, stages, strict=True)
                ],
            )
        )
    stack_bars(figure, gap=0.28)
    slowest, fastest = totals.index(max(totals)), totals.index(min(totals))
    return Drawing(
        plot=figure,
        sentence=f"A microbatch takes {format_duration(totals[slowest])} on every stage."
        if format_duration(totals[fastest]) == format_duration(totals[slowest])
        else f"A microbatch takes from {format_duration(totals[fastest])} on {names[fastest]} to "
        f"{format_duration(totals[slowest])} on {names[slowest]}; the slowest stage sets the pace.",
        columns=("stage", "ranks", *(f"{meaning} ({unit.name})" for _, meaning in KINDS.values())),
        rows=tuple(
            (
                str(stage.stage),
                ", ".join(map(str, stage.ranks)),
                *(f"{stage.mean_ns[kind] / unit.size:.2f}" if kind in stage.mean_ns else "\u2013" for kind in KINDS),
            )
            for stage in stages
        ),
    )
