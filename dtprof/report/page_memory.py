"""Memory as a table: peak, what the model holds beside its formula, growth, fragmentation."""

from collections.abc import Sequence

from dtprof.analysis.memory_course import RankMemory, state_formula_bytes
from dtprof.figures.drawing import Nothing
from dtprof.figures.quantities import SIZES, format_share
from dtprof.figures.source import Source
from dtprof.report.page_dashboard import Dashboard, Panel
from dtprof.report.page_markup import Markup
from dtprof.report.page_sections import render_nothing
from dtprof.report.page_tables import number_column, render_table, unit_column

STATE = ("parameters", "gradients", "optimizer_state")


def render_memory_table(panel: Panel, source: Source, _: Sequence[Dashboard]) -> Markup:
    """List the ranks, one a row."""
    ranks = [rank for rank in source.summary.ranks if rank.peak_bytes]
    if not ranks:
        return render_nothing(
            Nothing(
                why="Memory was not sampled.",
                remedy="Samples are taken at each step: let the job end one, with an optimizer or dtprof.step().",
            )
        )
    memory = source.closeup.memory.ranks if source.closeup else {}
    courses = [memory.get(rank.rank, RankMemory(total=None)) for rank in ranks]
    held = [_held(rank.memory_categories) for rank in ranks]
    columns = [
        number_column("rank", "rank", [rank.rank for rank in ranks], lambda rank: str(round(rank))),
        unit_column("peak", "peak", [rank.peak_bytes for rank in ranks], SIZES),
        unit_column("state", "model state", held, SIZES),
        unit_column("formula", "by formula", [state_formula_bytes(rank.memory_categories) for rank in ranks], SIZES),
        unit_column("growth", "growth a step", [course.growth_bytes_per_step for course in courses], SIZES),
        number_column("fragmentation", "fragmentation", [course.fragmentation for course in courses], format_share),
        number_column("oom", "out of memory", [len(rank.out_of_memory) for rank in ranks], lambda n: str(round(n))),
    ]
    return render_table(columns, caption=panel.title, definitions=panel.definitions)


def _held(categories: dict[str, int | None]) -> int | None:
    known = [categories.get(name) for name in STATE]
    return sum(filter(None, known)) if any(value is not None for value in known) else None
