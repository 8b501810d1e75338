"""Who sends how much to whom, point to point."""

import plotly.graph_objects as go

from dtprof.analysis.traffic import MAX_PAIRED
from dtprof.figures.drawing import Drawing, Nothing, new_figure
from dtprof.figures.quantities import SIZES, choose_unit, format_bytes
from dtprof.figures.source import Source

MAX_PRINTED = 16
"""Ranks up to which each cell bears its value."""


def draw_traffic_matrix(source: Source) -> Drawing | Nothing:
    """Draw bytes sent as a heatmap: rows send, columns receive."""
    traffic = source.closeup.traffic if source.closeup else None
    if traffic is not None and len(traffic.ranks) > MAX_PAIRED:
        return Nothing(
            why=f"{len(traffic.ranks):,} ranks are too many for a matrix of pairs.",
            remedy=f"It is drawn for up to {MAX_PAIRED}; the table of collectives holds the sums.",
        )
    if traffic is None or traffic.sent is None or not traffic.sent.any():
        return Nothing(
            why="No messages from rank to rank were recorded.",
            remedy="Sends and receives come from pipelines and torch.distributed.send; collectives have no sender.",
        )
    sent, names = traffic.sent, [str(rank) for rank in traffic.ranks]
    unit = choose_unit([float(sent.max())], SIZES)
    figure = new_figure(
        title="Bytes sent from rank to rank", x_title="to rank", y_title="from rank",
        height=min(760, 150 + max(18, min(44, 360 // len(names))) * len(names)),
    )  # fmt: skip
    figure.add_trace(
        go.Heatmap(
            z=sent / unit.size,
            x=names,
            y=names,
            meta="scale",
            zmin=0,
            colorbar={"title": {"text": unit.name}, "thickness": 12, "outlinewidth": 0},
            xgap=1,
            ygap=1,
            text=[[format_bytes(value) if value else "" for value in row] for row in sent.tolist()]
            if len(names) <= MAX_PRINTED
            else None,
            texttemplate="%{text}" if len(names) <= MAX_PRINTED else None,
            hoverinfo="text",
            hovertext=[
                [
                    f"<b>rank {source_rank} to rank {target}</b><br>{format_bytes(value)} in the whole run"
                    for target, value in zip(traffic.ranks, row, strict=True)
                ]
                for source_rank, row in zip(traffic.ranks, sent.tolist(), strict=True)
            ],
        )
    )
    figure.update_xaxes(type="category", showgrid=False, side="top", nticks=33)
    figure.update_yaxes(type="category", showgrid=False, autorange="reversed", nticks=33)
    pairs = sorted(
        ((int(sent[i, j]), traffic.ranks[i], traffic.ranks[j]) for i, j in zip(*sent.nonzero(), strict=True)),
        reverse=True,
    )
    most = pairs[0]
    return Drawing(
        figure=figure,
        sentence=f"{len(pairs)} pairs of ranks exchange messages; rank {most[1]} sends most to rank {most[2]}, "
        f"{format_bytes(most[0])} in the whole run.",
        columns=("from rank", "to rank", "sent"),
        rows=tuple((str(a), str(b), format_bytes(nbytes)) for nbytes, a, b in pairs[:1000]),
    )
