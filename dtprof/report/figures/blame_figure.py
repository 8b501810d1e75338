"""The cost of each straggler for the others, and the phase in which it loses the time."""

from dtprof.analysis.results import PHASES
from dtprof.report.figures.drawing import Drawing, Nothing, bars, new_figure, rank_names, stack_bars
from dtprof.report.figures.figure_numbers import DURATIONS, choose_unit, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of


def draw_blame(source: Source) -> Drawing | Nothing:
    """Draw one bar a straggler: its excess over the others by phase."""
    rows = [row for row in source.summary.stragglers or () if any(value > 0 for value in row.phases_ns.values())]
    if not rows:
        return Nothing(
            why="No rank's own work holds the others up.",
            remedy="A straggler is a rank whose own work is long and for which others wait, often and at a cost.",
        )
    unit = choose_unit([sum(row.phases_ns.values()) for row in rows], DURATIONS)
    names = rank_names([row.rank for row in rows])
    figure = new_figure(
        title="Time lost by stragglers", x_title=f"more than the other ranks, per step ({unit.name})", y_title="",
        height=104 + 34 * len(rows),
    )  # fmt: skip
    for phase in (phase for phase in PHASES if any(row.phases_ns.get(phase, 0) > 0 for row in rows)):
        hue = hue_of(phase)
        figure.add_trace(
            bars(
                hue.label,
                phase,
                names,
                [max(0, row.phases_ns.get(phase, 0)) / unit.size for row in rows],
                [
                    f"<b>{name}: {hue.label}</b><br>"
                    f"{format_duration(row.phases_ns.get(phase, 0))} more a step than others"
                    f"<br>to blame in {format_share(row.last_share)} of the steps waited in"
                    for name, row in zip(names, rows, strict=True)
                ],
                customdata=[row.rank for row in rows],
            )
        )
    stack_bars(figure, gap=0.28)
    worst = rows[0]
    return Drawing(
        plot=figure,
        sentence=f"Rank {worst.rank} loses most time {worst.phase_words or 'in no single phase'}"
        + (f", since step {worst.since_step}." if worst.since_step is not None else "."),
        columns=("rank", *(f"{hue_of(phase).label} ({unit.name})" for phase in PHASES)),
        rows=tuple(
            (str(row.rank), *(f"{row.phases_ns.get(phase, 0) / unit.size:.2f}" for phase in PHASES)) for row in rows
        ),
    )
