"""Cost of communication, by axis of parallelism: hidden, wait, transfer."""

from dtprof.analysis.communication.axis_collectives import AxisTime, sum_by_axis
from dtprof.analysis.results import PARTS
from dtprof.job.axes import axis_words
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, new_figure, stack_bars
from dtprof.report.figures.figure_numbers import DURATIONS, choose_unit, format_duration
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of

COLUMNS = {"exposed_wait": "wait_ns", "exposed_transfer": "transfer_ns"}


def draw_exposed_by_axis(source: Source) -> Drawing | Nothing:
    """Draw two bars per axis: time in flight on a rank and step, split in wait and transfer, and the time blocked."""
    rows = sum_by_axis(source.summary)
    if not rows:
        return Nothing(
            why="No time of communication is known.",
            remedy="It takes collectives in measured steps whose completion was seen.",
        )
    unit = choose_unit([(row.wait_ns or 0) + (row.transfer_ns or 0) for row in rows], DURATIONS)
    names = [as_label(axis_words(row.axis)) for row in rows]
    figure = new_figure(
        title="Communication by axis", x_title=f"time per rank and step ({unit.name})", y_title="",
        height=112 + 46 * len(rows),
    )  # fmt: skip
    for part in (part for part in PARTS if part in COLUMNS):
        values = [getattr(row, COLUMNS[part]) for row in rows]
        figure.add_trace(
            bars(
                "wait" if part == "exposed_wait" else "transfer",
                part,
                names,
                [(value or 0) / unit.size for value in values],
                [_hover(row, part, value) for row, value in zip(rows, values, strict=True)],
                offsetgroup="flight",
            )
        )
    figure.add_trace(
        bars(
            "blocked",
            "other",
            names,
            [(row.exposed_ns or 0) / unit.size for row in rows],
            [
                f"<b>{as_label(axis_words(row.axis))}: blocked</b><br>{_duration(row.exposed_ns)} a rank and step "
                "in which it does nothing else"
                for row in rows
            ],
            offsetgroup="exposed",
        )
    )
    stack_bars(figure, gap=0.35)
    figure.update_layout(bargroupgap=0.08)
    top = rows[0]
    return Drawing(
        plot=figure,
        sentence=f"Most time goes to {axis_words(top.axis)}: {_duration(top.wait_ns)} of wait and "
        f"{_duration(top.transfer_ns)} of transfer a rank and step, "
        f"{_duration(top.exposed_ns)} in which the rank did nothing else.",
        columns=(
            "axis",
            "groups",
            "operations a step",
            *(f"{name} ({unit.name})" for name in ("wait", "transfer", "blocked")),
        ),
        rows=tuple(
            (
                axis_words(row.axis),
                str(row.groups),
                f"{row.operations:.1f}",
                *(
                    "\u2013" if value is None else f"{value / unit.size:.2f}"
                    for value in (row.wait_ns, row.transfer_ns, row.exposed_ns)
                ),
            )
            for row in rows
        ),
    )


def _duration(ns: float | None) -> str:
    return "an unknown time" if ns is None else format_duration(ns)


def _hover(row: AxisTime, part: str, value: float | None) -> str:
    axis = as_label(axis_words(row.axis))
    return f"<b>{axis}: {hue_of(part).label.split()[-1]}</b><br>{_duration(value)} a rank and step"
