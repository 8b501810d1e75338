"""Bytes sent between pairs of ranks, point to point."""

from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_numbers import SIZES, format_bytes
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.rank_matrix_figure import draw_matrix

MAX_ROWS = 1000


def draw_traffic_matrix(source: Source) -> Drawing | Nothing:
    """Draw bytes sent as a heatmap: rows send, columns receive."""
    traffic = source.closeup.traffic if source.closeup else None
    if traffic is None or traffic.sent is None:
        return Nothing(
            why="No messages from rank to rank were recorded.",
            remedy="Sends and receives come from pipelines and torch.distributed.send; collectives have no sender.",
        )
    sent = traffic.sent
    figure = draw_matrix(
        sent,
        title="Bytes sent from rank to rank" if sent.is_by_rank else f"Bytes sent between ranks, by {sent.unit}",
        axis_titles=("to", "from"),
        units=SIZES,
        write=format_bytes,
        describe=lambda sender, receiver, size: f"<b>{sender} to {receiver}</b><br>{size} in the whole run",
    )
    pairs = sent.largest
    most, sender, receiver = pairs[0]
    return Drawing(
        plot=figure,
        sentence=f"{len(pairs)} pairs of {sent.row_words} exchange messages; {sent.label(sender)} sends most to "
        f"{sent.label(receiver)}, {format_bytes(most)} in the whole run.",
        columns=(f"from {sent.unit}", f"to {sent.unit}", "sent"),
        rows=tuple(
            (sent.names[source_row], sent.names[target_row], format_bytes(nbytes))
            for nbytes, source_row, target_row in pairs[:MAX_ROWS]
        ),
    )
