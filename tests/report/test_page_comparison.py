"""A comparison on a page: whole names, and quantities as a page shows them."""

from dataclasses import replace

from dtprof.analysis.comparison.comparison_series import COLLECTIVES, Figure
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_comparison import render_comparison
from dtprof.report.pages.page_dashboard import Panel
from dtprof.report.text.comparison_text import comparison_text
from tests.report.example_summaries import summary_of
from tests.report.test_comparison_text import compared


def test_names_are_whole_and_quantities_are_set() -> None:
    result = compared({}, {"num_ranks": 4, "slower_reduce_us": 300.0})
    name = "reduce_scatter (functional) fsdp of the decoder: exposed"
    of_a_group = Figure(
        table=COLLECTIVES, name="exposed_ns", group="fsdp of the decoder", op="reduce_scatter", api="functional"
    )
    step = next(change for change in result.changes if change.differs)
    result = replace(result, changes=(*result.changes, replace(step, figure=of_a_group)))
    panel = Panel(name="comparison", title="Comparison", anchor="comparison")
    page = str(render_comparison(panel, Source(summary=summary_of(num_ranks=2), comparison=result), []))
    assert f"<td>{name}</td>" in page
    assert name not in comparison_text(result)  # which has 80 columns
    assert "\u00a0\u00b5s" in page
    assert " us" not in page
