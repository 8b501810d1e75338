"""Every panel that a page can name, and its contents as a document, for the file and for the live pages alike.

A document is what a panel shows: markup (a text), and at most one drawing for the browser, JSON:
`{"plotly": FIGURE}`, `{"grid": ...}` (the ranks, grid.js) or `{"tracks": ...}` (the whole run, tracks.js). The markup
holds everything but drawings, so that a page can be read without a script. `dtprof report` embeds drawings by anchor
in one compressed script element; whoever serves pages sends the same documents, and `dtprof.update(DOCUMENTS)` of
page.js replaces the panels that changed without losing zoom or selection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtprof.report.figures.drawing import Drawing, Nothing
from dtprof.report.figures.figure_registry import FIGURES
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages import (
    page_comparison,
    page_findings,
    page_grid,
    page_memory,
    page_sections,
    page_tracks,
    page_windows,
)
from dtprof.report.pages.page_dashboard import Dashboard, Panel
from dtprof.report.pages.page_key_figures import render_key_figures
from dtprof.report.pages.page_markup import Markup, element
from dtprof.report.pages.page_sections import render_nothing
from dtprof.report.pages.page_tables import render_numbers


@dataclass(frozen=True, kw_only=True)
class Document:
    """The contents of one panel."""

    markup: Markup
    drawing: Mapping[str, Any] | None = None


def panel_names() -> list[str]:
    """Return the names that a dashboard may use."""
    return [*FIGURES, *_DRAWN, *_SECTIONS]


def render_documents(source: Source, pages: Sequence[Dashboard]) -> dict[str, Document]:
    """Return the document of every panel of these pages, by its anchor."""
    return {anchor: document for page in pages for anchor, document in render_page(page, source, pages).items()}


def render_page(page: Dashboard, source: Source, pages: Sequence[Dashboard]) -> dict[str, Document]:
    """Return the document of every panel of one of these pages, by its anchor."""
    return {panel.anchor: _render_panel(panel, source, pages) for panel in page.panels}


def _render_panel(panel: Panel, source: Source, pages: Sequence[Dashboard]) -> Document:
    """Return the document of one panel; `pages` are those it may link to."""
    if panel.name in FIGURES:
        return _render_figure(panel, FIGURES[panel.name](source))
    if panel.name in _DRAWN:
        drawn = _DRAWN[panel.name](panel, source)
        if isinstance(drawn, Nothing):
            return Document(markup=render_nothing(drawn))
        return Document(markup=drawn[0], drawing=drawn[1])
    return Document(markup=_SECTIONS[panel.name](panel, source, pages))


def _render_figure(panel: Panel, drawn: Drawing | Nothing) -> Document:
    if isinstance(drawn, Nothing):
        return Document(markup=render_nothing(drawn))
    markup = element(
        "figure",
        element(
            "div",
            element(
                "div",
                class_="plot",
                id=f"plot-{panel.anchor}",
                role="group",
                tabindex="0",
                aria_label=f"{panel.title}. {drawn.sentence} The numbers are in the table below.",
                style=f"min-height:{drawn.plot.layout['height']}px",
                data_zooms="yes" if drawn.zooms else None,
            ),
            class_="frame",
        ),
        element("figcaption", drawn.sentence),
        render_numbers(panel.title, drawn.columns, drawn.rows),
    )
    return Document(markup=markup, drawing={"plotly": drawn.plot.as_json()})


_DRAWN: dict[str, Callable[[Panel, Source], tuple[Markup, Mapping[str, Any]] | Nothing]] = {
    "rank_grid": page_grid.render_rank_grid,
    "run_timeline": page_tracks.render_run_timeline,
}
_SECTIONS: dict[str, Callable[[Panel, Source, Sequence[Dashboard]], Markup]] = {
    "headline": page_sections.render_headline,
    "key_figures": lambda panel, source, _: render_key_figures(source.summary, panel.definitions),
    "collectives": page_sections.render_collectives,
    "call_sites": page_sections.render_call_sites,
    "communication_phases": page_sections.render_communication_phases,
    "message_sizes": page_sections.render_message_sizes,
    "part_bands": page_sections.render_part_bands,
    "pipeline_stages": page_sections.render_pipeline_stages,
    "pipeline_actions": page_sections.render_pipeline_actions,
    "stragglers": page_sections.render_stragglers,
    "critical_path": page_findings.render_critical_path,
    "findings": page_findings.render_findings,
    "memory_table": page_memory.render_memory_table,
    "memory_formula": page_memory.render_memory_formula,
    "headroom": page_memory.render_headroom,
    "windows": page_windows.render_windows,
    "comparison": page_comparison.render_comparison,
    "cannot_tell": page_sections.render_cannot_tell,
    "measurement": page_sections.render_measurement,
    "clocks": page_findings.render_clocks,
    "next_commands": page_sections.render_next_commands,
    "page_links": page_sections.render_page_links,
}
