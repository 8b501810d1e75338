"""Memory of each rank at its peak, by category."""

from dtprof.analysis.memory.rank_memory import CATEGORIES
from dtprof.report.figures.drawing import Drawing, Nothing, bars, new_figure, rank_names, stack_bars
from dtprof.report.figures.figure_numbers import SIZES, choose_unit, format_bytes, format_share
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import hue_of
from dtprof.report.figures.stacked_step_figure import MAX_LYING_BARS


def draw_memory_categories(source: Source) -> Drawing | Nothing:
    """Draw one stacked bar a rank, up to its peak."""
    ranks = [rank for rank in source.summary.ranks if rank.peak_bytes]
    if not ranks:
        return Nothing(
            why="Memory was not sampled.",
            remedy="Samples are taken at each step: let the job end one, with an optimizer of torch or dtprof.step().",
        )
    known = any(rank.memory_categories for rank in ranks)
    unit = choose_unit([rank.peak_bytes for rank in ranks], SIZES)
    lying = len(ranks) <= MAX_LYING_BARS
    names = rank_names([rank.rank for rank in ranks])
    title = f"peak memory ({unit.name})"
    figure = new_figure(
        title="Memory of each rank",
        x_title=title if lying else "rank",
        y_title="" if lying else title,
        height=104 + 34 * len(ranks) if lying else 400,
    )
    for category in CATEGORIES:
        values = [
            rank.memory_categories.get(category)
            if rank.memory_categories
            else rank.peak_bytes
            if category == "other"
            else 0
            for rank in ranks
        ]
        if not any(values):
            continue
        lengths = [(value or 0) / unit.size for value in values]
        hue = hue_of(f"memory {category}")
        figure.add_trace(
            bars(
                hue.label,
                f"memory {category}",
                names if lying else [rank.rank for rank in ranks],
                lengths,
                [
                    f"<b>rank {rank.rank}: {hue.label}</b><br>{_share(value, rank.peak_bytes or 0)} of a peak of "
                    f"{format_bytes(rank.peak_bytes or 0)}<br>{hue.meaning}"
                    for rank, value in zip(ranks, values, strict=True)
                ],
                lying=lying,
                customdata=[rank.rank for rank in ranks],
            )
        )
    stack_bars(figure, gap=0.28 if lying else 0.12, lying=lying)
    worst = max(ranks, key=lambda rank: rank.peak_bytes or 0)
    split = "" if known else " Its purposes were not recorded."
    return Drawing(
        plot=figure,
        sentence=f"Rank {worst.rank} holds most: {format_bytes(worst.peak_bytes or 0)} at its peak.{split}",
        columns=(
            "rank",
            f"peak ({unit.name})",
            *(f"{hue_of(f'memory {name}').label} ({unit.name})" for name in CATEGORIES),
        ),
        rows=tuple(
            (
                str(rank.rank),
                f"{(rank.peak_bytes or 0) / unit.size:.3g}",
                *(_cell(rank.memory_categories.get(category), unit.size) for category in CATEGORIES),
            )
            for rank in ranks
        ),
    )


def _share(value: int | None, peak_bytes: int) -> str:
    return "not known" if value is None else f"{format_bytes(value)}, {format_share(value / (peak_bytes or 1))}"


def _cell(value: int | None, size: float) -> str:
    return "\u2013" if value is None else f"{value / size:.3g}"
