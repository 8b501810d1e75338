"""How far apart the members of a group arrive at its operations, and who comes last."""

from dtprof.formatting import plural
from dtprof.job.axes import name_groups
from dtprof.report.figures.drawing import Drawing, Nothing, as_label, bars, new_figure
from dtprof.report.figures.figure_numbers import DURATIONS, choose_unit, format_duration, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.plot import new_trace

MAX_GROUPS = 16
TICKS = ("10 %", "median", "90 %", "99 %")


def draw_lateness(source: Source) -> Drawing | Nothing:
    """Draw, a row a group, the time from the first arrival to the last: most of it, median, slowest hundredth."""
    known_groups = source.closeup.traffic.lateness if source.closeup else ()
    groups = known_groups[:MAX_GROUPS]
    if not groups:
        return Nothing(
            why="It is not known when ranks arrived.",
            remedy="It takes collectives that every member recorded on one clock.",
        )
    described = name_groups(source.summary.groups)
    unit = choose_unit([group.spread_ns[2] for group in groups], DURATIONS)
    names = [as_label(described.get(group.group, group.group)) for group in groups]
    figure = new_figure(
        title="From the first arrival to the last", x_title=f"first to last arrival ({unit.name})", y_title="group",
        height=112 + 32 * len(groups),
    )  # fmt: skip
    hover = [
        f"<b>{name}</b>, {plural(group.count, 'operation')}<br>from the first arrival to the last:<br>"
        + "<br>".join(f"{tick}: {format_duration(ns)}" for tick, ns in zip(TICKS, group.spread_ns, strict=True))
        for name, group in zip(names, groups, strict=True)
    ]
    shares = [[group.spread_ns[position] / unit.size for group in groups] for position in range(len(TICKS))]
    low, median, high, highest = shares
    figure.add_trace(
        bars(
            f"{TICKS[0]} to {TICKS[2]}",
            "exposed_wait",
            names,
            [last - first for first, last in zip(low, high, strict=True)],
            hover,
            base=low,
            width=0.4,
            opacity=0.45,
        )
    )
    for name, symbol, at in ((TICKS[1], "line-ns", median), (TICKS[3], "diamond", highest)):
        is_line = symbol.startswith("line")
        figure.add_trace(
            new_trace(
                "scatter",
                name=name,
                meta="ink" if is_line else "exposed_wait",
                mode="markers",
                x=at,
                y=names,
                marker={"symbol": symbol, "size": 16 if is_line else 8, "line": {"width": 2.4 if is_line else 0}},
                hoverinfo="text",
                hovertext=hover,
            )
        )
    figure.update_yaxes(type="category", autorange="reversed", ticks="")
    figure.update_xaxes(rangemode="tozero")
    return Drawing(
        plot=figure,
        sentence=f"Half of the operations of {names[0]} have all ranks within "
        f"{format_duration(groups[0].spread_ns[1])}, the slowest hundredth "
        f"within {format_duration(groups[0].spread_ns[3])}."
        + (f" {len(groups)} of {len(known_groups):,} groups are drawn." if len(known_groups) > len(groups) else ""),
        columns=("group", "ranks", "operations", *TICKS, "most often last"),
        rows=tuple(
            (
                name,
                str(len(group.ranks)),
                f"{group.count:,}",
                *(format_duration(value) for value in group.spread_ns),
                "\u2013"
                if group.share_last is None
                else f"rank {group.most_often_last}, {format_share(group.share_last)}",
            )
            for name, group in zip(names, groups, strict=True)
        ),
    )
