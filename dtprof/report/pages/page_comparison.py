"""Two runs beside each other: their differences beyond noise."""

from collections.abc import Sequence

from dtprof.analysis.comparison.comparison_series import COLLECTIVES, JOB, RANKS
from dtprof.analysis.comparison.run_comparison import FigureChange
from dtprof.formatting import plural
from dtprof.report.figures.drawing import Nothing
from dtprof.report.figures.figure_numbers import typeset
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import Dashboard, Panel
from dtprof.report.pages.page_markup import Markup, element, join
from dtprof.report.pages.page_sections import render_nothing
from dtprof.report.pages.page_tables import render_plain_table
from dtprof.report.text.comparison_text import describe_change, step_sentence

HEADER = ("", "A", "B", "B \u2212 A", "between", "detectable", "")
TITLES = {JOB: "The job", COLLECTIVES: "Collectives that differ", RANKS: "Ranks that differ"}
MAX_ROWS = 200
WORDS = {
    "larger": "\u25b2 larger",
    "smaller": "\u25bc smaller",
    "negligible": "too small to count",
    "none": "within the noise",
    "unknown": "not judged",
}


def render_comparison(_panel: Panel, source: Source, _: Sequence[Dashboard]) -> Markup:
    """State the differences, and list the figures of both runs."""
    result = source.comparison
    if result is None:
        return render_nothing(
            Nothing(why="There is no run to compare with.", remedy="Name one: dtprof report RUN --against OTHER.")
        )
    tables = []
    for table, title in TITLES.items():
        changes = [change for change in result.of_table(table) if table == JOB or change.differs][:MAX_ROWS]
        if changes:
            tables += [
                element("p", title, class_="label"),
                render_plain_table(HEADER, [_row(change) for change in changes], caption=title),
            ]
    sides = [
        element(
            "li",
            f"{name}: ",
            element("code", side.run),
            f", {plural(side.world_size, 'rank')}, {plural(side.num_steps, 'step')}",
        )
        for name, side in (("A", result.a), ("B", result.b))
    ]
    return join(
        element("p", typeset(f"Steps: {step_sentence(result)}."), class_="sentence small"),
        element("ul", *sides, class_="sentences"),
        *tables,
        *(element("p", reason, class_="nothing") for reason in result.cannot_compare),
    )


def _row(change: FigureChange) -> tuple[str, ...]:
    name, *cells = describe_change(change)
    return name, *map(typeset, cells), WORDS[change.verdict]
