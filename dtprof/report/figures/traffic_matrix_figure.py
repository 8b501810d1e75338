"""Bytes sent between pairs of ranks, point to point."""

from dtprof.analysis.communication.rank_pairs import MAX_PAIRED
from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_numbers import SIZES, format_bytes
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.rank_matrix_figure import draw_matrix

MAX_ROWS = 1000


def draw_traffic_matrix(source: Source) -> Drawing | Nothing:
    """Draw bytes sent as a heatmap: rows send, columns receive."""
    traffic = source.closeup.traffic if source.closeup else None
    if traffic is not None and len(traffic.ranks) > MAX_PAIRED:
        return Nothing(
            why=f"{len(traffic.ranks):,} ranks are too many for a matrix of pairs.",
            remedy=f"It is drawn for up to {MAX_PAIRED}; the table of collectives holds the sums.",
        )
    if traffic is None or traffic.sent is None:
        return Nothing(
            why="No messages from rank to rank were recorded.",
            remedy="Sends and receives come from pipelines and torch.distributed.send; collectives have no sender.",
        )
    figure = draw_matrix(
        traffic.sent,
        titles=("Bytes sent from rank to rank", "to rank", "from rank"),
        units=SIZES,
        write=format_bytes,
        describe=lambda sender, receiver, sent: f"<b>rank {sender} to rank {receiver}</b><br>{sent} in the whole run",
    )
    pairs = traffic.sent.largest
    most, sender, receiver = pairs[0]
    return Drawing(
        plot=figure,
        sentence=f"{len(pairs)} pairs of ranks exchange messages; rank {sender} sends most to rank {receiver}, "
        f"{format_bytes(most)} in the whole run.",
        columns=("from rank", "to rank", "sent"),
        rows=tuple(
            (str(source_rank), str(target_rank), format_bytes(nbytes))
            for nbytes, source_rank, target_rank in pairs[:MAX_ROWS]
        ),
    )
