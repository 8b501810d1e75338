"""How far apart the members of a group arrive at its operations, and who comes last."""

import plotly.graph_objects as go

from dtprof.figures.drawing import Drawing, Nothing, as_label, new_figure
from dtprof.figures.quantities import DURATIONS, choose_unit, format_duration, format_share
from dtprof.figures.source import Source

MAX_GROUPS = 16
TICKS = ("10 %", "median", "90 %", "99 %")


def draw_lateness(source: Source) -> Drawing | Nothing:
    """Draw, a line a group, the time from the first arrival to the last: four quantiles as ticks."""
    groups = source.closeup.traffic.lateness[:MAX_GROUPS] if source.closeup else ()
    if not groups:
        return Nothing(
            why="It is not known when ranks arrived.",
            remedy="It takes collectives that every member recorded on one clock.",
        )
    described = {group.name: group for group in source.summary.groups}
    unit = choose_unit([group.spread_ns[2] for group in groups], DURATIONS)
    names = []
    for group in groups:
        known = described.get(group.group)
        word = (known.axis or known.description) if known else ""
        names.append(as_label(f"{group.group} {word}".strip()))
    figure = new_figure(
        title="From the first arrival to the last", x_title=f"first to last arrival ({unit.name})", y_title="group",
        height=112 + 32 * len(groups),
    )  # fmt: skip
    for position, (tick, symbol) in enumerate(zip(TICKS, ("line-ns", "diamond", "line-ns", "line-ns"), strict=True)):
        figure.add_trace(
            go.Scatter(
                name=tick,
                meta="exposed_wait" if position == 1 else "ink",
                mode="markers",
                x=[group.spread_ns[position] / unit.size for group in groups],
                y=names,
                marker={
                    "symbol": symbol,
                    "size": 10 if position == 1 else 14,
                    "line": {"width": 0 if position == 1 else 1.6},
                },
                hoverinfo="text",
                hovertext=[
                    f"<b>{name}</b><br>{tick} of {group.count:,} operations: "
                    f"{format_duration(group.spread_ns[position])} from the first arrival to the last"
                    for name, group in zip(names, groups, strict=True)
                ],
            )
        )
    figure.update_yaxes(type="category", autorange="reversed", ticks="")
    figure.update_xaxes(rangemode="tozero")
    rows = []
    for group in groups:
        late = sum(group.last.values())
        worst = max(group.last, key=lambda rank: group.last[rank]) if group.last else None
        rows.append(
            (
                group.group,
                str(len(group.ranks)),
                f"{group.count:,}",
                *(format_duration(value) for value in group.spread_ns),
                "\u2013" if worst is None else f"rank {worst}, {format_share(group.last[worst] / late)}",
            )
        )
    return Drawing(
        figure=figure,
        sentence=f"In group {groups[0].group} half of the operations have all ranks within "
        f"{format_duration(groups[0].spread_ns[1])}, the slowest hundredth "
        f"within {format_duration(groups[0].spread_ns[3])}.",
        columns=("group", "ranks", "operations", *TICKS, "most often last"),
        rows=tuple(rows),
    )
