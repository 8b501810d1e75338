"""Bandwidth against size: one point for each kind of operation."""

from collections.abc import Mapping, Sequence

from dtprof.analysis.communication.collective_table import HANDED_OVER, find_fastest
from dtprof.analysis.results import CollectiveResult
from dtprof.formatting import plural
from dtprof.job.axes import name_groups
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, new_figure
from dtprof.report.figures.figure_numbers import format_bytes, format_duration, format_number
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.plot import new_trace

SPEEDS = (("TB/s", 1e3), ("GB/s", 1.0), ("MB/s", 1e-3), ("kB/s", 1e-6), ("B/s", 1e-9))
SYMBOLS = {"send": "triangle-up", "recv": "triangle-down", "all_gather": "square", "reduce_scatter": "diamond"}


def draw_bandwidth(source: Source) -> Drawing | Nothing:
    """Draw bus bandwidth over bytes, both on logarithmic axes."""
    known = [row for row in source.summary.collectives if row.busbw_gb_per_s and row.bytes]
    if not known:
        return Nothing(
            why="No bandwidth is known.",
            remedy="It takes operations whose completion was seen and whose last arrival is known on one clock.",
        )
    groups = name_groups(source.summary.groups)
    figure = new_figure(
        title="Bandwidth against size", x_title="bytes of one rank in one operation", y_title="bus bandwidth",
        height=330,
    )  # fmt: skip
    for op in dict.fromkeys(row.op for row in known):
        some = [row for row in known if row.op == op]
        figure.add_trace(
            new_trace(
                "scatter",
                name=as_label(op),
                meta=f"series {list(dict.fromkeys(one.op for one in known)).index(op) % 6}",
                mode="markers",
                x=[row.bytes for row in some],
                y=[row.busbw_gb_per_s for row in some],
                marker={
                    "size": [_size(row, known) for row in some],
                    "symbol": SYMBOLS.get(op, "circle"),
                    "opacity": 0.85,
                },
                hoverinfo="text",
                hovertext=[as_label(_describe(row, groups)) for row in some],
            )
        )
    ticks = [2**power for power in range(0, 50, 5) if _within(2**power, [row.bytes or 0 for row in known])]
    figure.update_xaxes(type="log")
    if len(ticks) > 1:
        names = [format_bytes(tick).replace(".00", "").replace(".0", "") for tick in ticks]
        figure.update_xaxes(tickmode="array", tickvals=ticks, ticktext=names, tickangle=0)
    speeds = [row.busbw_gb_per_s or 1 for row in known]
    decades = [10.0**power for power in range(-9, 5) if min(speeds) / 10 <= 10.0**power <= max(speeds) * 10]
    figure.update_yaxes(
        type="log", tickmode="array", tickvals=decades, ticktext=[_name_speed(speed) for speed in decades]
    )
    sends = any(row.op == HANDED_OVER for row in known)
    fastest = find_fastest(known)
    return Drawing(
        plot=figure,
        sentence=f"{plural(len(known), 'operation')} by group and api; the fastest is {fastest.op} of "
        f"{format_bytes(fastest.bytes or 0)} with {format_number(fastest.busbw_gb_per_s or 0, 2)} GB/s. "
        "A larger mark is more time in flight. "
        "Small messages are slow on every link: latency rules there."
        + (" A send is over once its message is handed over, which may be long before it arrives." if sends else ""),
        columns=("operation", "group", "issued by", "size", "bus bandwidth (GB/s)", "transfer"),
        rows=tuple(
            (
                row.op,
                groups.get(row.group, row.group),
                row.api or "\u2013",
                format_bytes(row.bytes or 0),
                format_number(row.busbw_gb_per_s or 0, 2),
                format_duration(row.transfer_ns) if row.transfer_ns is not None else "\u2013",
            )
            for row in known
        ),
    )


def _within(value: float, values: Sequence[float]) -> bool:
    return min(values) / 32 <= value <= max(values) * 32


def _name_speed(gb_per_s: float) -> str:
    """Return a power of ten in the unit that suits it: 100 kB/s."""
    unit, size = next((row for row in SPEEDS if gb_per_s >= 0.999 * row[1]), SPEEDS[-1])
    return f"{gb_per_s / size:g} {unit}"


def _size(row: CollectiveResult, known: Sequence[CollectiveResult]) -> float:
    """Return the diameter whose area is proportional to the time in flight."""
    longest = max(other.in_flight_ns for other in known) or 1
    return 8 + 20 * float((row.in_flight_ns / longest) ** 0.5)


def _describe(row: CollectiveResult, groups: Mapping[str, str]) -> str:
    lines = [
        f"{row.op} of {groups.get(row.group, f'group {row.group}')}" + (f", issued by {row.api}" if row.api else ""),
        f"{format_bytes(row.bytes or 0)} at {format_number(row.busbw_gb_per_s or 0, 2)} GB/s",
        f"{plural(row.count, 'operation')} of {format_duration(row.duration_ns or 0)} each",
    ]
    return "\n".join(lines)
