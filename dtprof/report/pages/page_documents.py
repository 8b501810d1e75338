"""Panels as documents: the one place that makes their contents, for the file and for the live pages alike.

A document is what a panel shows: markup (a text), and at most one drawing for the browser, JSON:
`{"plotly": FIGURE}`, `{"grid": ...}` (the ranks, grid.js) or `{"tracks": ...}` (the whole run, tracks.js). The markup
holds everything but drawings, so that a page can be read without a script. `dtprof report` embeds drawings by anchor
in one compressed script element; whoever serves pages sends the same documents, and `dtprof.update(DOCUMENTS)` of
page.js replaces the panels that changed without losing zoom or selection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import Dashboard
from dtprof.report.pages.page_markup import Markup
from dtprof.report.pages.page_panels import Content, render_panel


@dataclass(frozen=True, kw_only=True)
class Document:
    """The contents of one panel."""

    markup: Markup
    drawing: Mapping[str, Any] | None = None


def render_documents(source: Source, pages: Sequence[Dashboard]) -> dict[str, Document]:
    """Return the document of every panel of these pages, by its anchor."""
    return {anchor: document for page in pages for anchor, document in render_page(page, source, pages).items()}


def render_page(page: Dashboard, source: Source, pages: Sequence[Dashboard]) -> dict[str, Document]:
    """Return the document of every panel of one of these pages, by its anchor."""
    return {panel.anchor: _as_document(render_panel(panel, source, pages)) for panel in page.panels}


def _as_document(content: Content) -> Document:
    return Document(markup=content.markup, drawing=content.drawing)
