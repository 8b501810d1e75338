"""One self-contained HTML file: the panels of a dashboard, their figures, and Plotly's own bundle, compressed.

The page makes no request: its Content-Security-Policy forbids all of them, and allows only the page's own script
(by its hash) and the code that this script unpacks.
"""

import base64
import functools
import gzip
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from string import Template

import dtprof
from dtprof.analysis.results import Summary
from dtprof.errors import OutputError
from dtprof.report.figures.figure_source import Source
from dtprof.report.figures.palette import HUES
from dtprof.report.pages.page_dashboard import Dashboard, Panel, dashboards_folder
from dtprof.report.pages.page_markup import Markup, element, join
from dtprof.report.pages.page_panels import Document, render_documents

GENERATOR = "dtprof report"
SCRIPTS = ("plots.js", "mosaic.js", "grid.js", "tracks.js", "tables.js", "page.js")
"""Scripts in the order in which they run; the last one starts the page."""
LIVE_SCRIPTS = ("live.js",)
BUNDLE_LEVEL = 6
"""zlib level of Plotly, which is compressed while the figures are drawn; 9 saves 1 % in twice the time."""
DATA_LEVEL = 4
"""zlib level of the figures, for which the command waits; 6 saves a tenth in three times the time."""
_HEAD_BYTES = 2048


def refuse_taken(output: Path, *, force: bool) -> None:
    """Raise if a page cannot be written to this path because another file or folder is there.

    Raises:
        OutputError: it is a directory, or a file and `force` is not given.
    """
    if output.is_dir():
        raise OutputError(f"{output} is a directory; expected a file to write, for example {output / 'report.html'}")
    if output.exists() and not force:
        raise OutputError(f"{output} exists; give --force to overwrite it, or another file with -o FILE")


def write_html(source: Source, pages: Sequence[Dashboard], output: Path, *, force: bool) -> None:
    """Write the pages to a file, atomically.

    Raises:
        OutputError: the file exists and `force` is not given, or it cannot be written.
    """
    refuse_taken(output, force=force)
    page = render_html(source, pages).encode("utf-8", "backslashreplace")
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        try:
            partial.write_bytes(page)
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"{output} cannot be written ({error.strerror}); expected an existing, writable folder: "
            "choose another file with -o FILE"
        ) from error


def is_own_report(path: Path) -> bool:
    """Say whether a file is a page that dtprof wrote."""
    try:
        with path.open("rb") as file:
            return f'<meta name="generator" content="{GENERATOR}'.encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def render_html(source: Source, pages: Sequence[Dashboard]) -> str:
    """Return the pages as one string."""
    with ThreadPoolExecutor(1) as beside:
        beside.submit(_pack_plotly)  # zlib releases the GIL
        documents = render_documents(source, pages)
    return assemble_html(source.summary, pages, documents)


def assemble_html(
    summary: Summary,
    pages: Sequence[Dashboard],
    documents: Mapping[str, Document],
    *,
    live_version: int | None = None,
    is_listed: bool = False,
) -> str:
    """Return pages as one string.

    Parameters:
        summary: of the run.
        pages: to show.
        documents: their panels.
        live_version: version at which a page begins that polls its server for changes; None for a stand-alone file.
        is_listed: link to the server's list of runs.
    """
    folder = dashboards_folder()
    is_live = live_version is not None
    scripts = (*SCRIPTS, *LIVE_SCRIPTS) if is_live else SCRIPTS
    script = "".join((folder / name).read_text(encoding="utf-8") for name in scripts)
    drawings = {anchor: document.drawing for anchor, document in documents.items() if document.drawing is not None}
    has_plots = any("plotly" in drawing for drawing in drawings.values())
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        generator=element("meta", name="generator", content=f"{GENERATOR} {dtprof.__version__}"),
        policy=_render_policy(script, may_ask=is_live),
        title=element("title", f"{_run_name(summary)} \u2013 {pages[0].title} \u2013 dtprof"),
        style=Markup(f"{_render_hues()}\n{(folder / 'style.css').read_text(encoding='utf-8')}"),
        header=join(link_to_list("../../") if is_listed else "", _render_header(summary)),
        live=_render_live(live_version) if is_live else "",
        now=_render_now_place() if is_live else "",
        tabs=_render_tabs(pages),
        pages=join(*(_render_page(page, documents) for page in pages)),
        version=f"dtprof {dtprof.__version__}",
        plotly=_pack_plotly() if has_plots else "",
        figures=_pack(json.dumps(drawings, separators=(",", ":"))),
        hues=json.dumps({name: [hue.light, hue.dark] for name, hue in HUES.items()}),
        script=script,
    )


def link_to_list(address: str) -> Markup:
    """Return the link back to the list of runs."""
    return element("p", element("a", "\u2190 All runs", href=address), class_="back")


def _render_live(version: int | None) -> Markup:
    return element(
        "div",
        element("span", "live", class_="live-text"),
        element("div", element("ul", class_="live-alarms"), role="status"),
        id="live",
        data_version=str(version),
    )


def _render_now_place() -> Markup:
    """Return the placeholder of the table of the activity of ranks."""
    return element(
        "details", element("summary", "Now"), element("div", class_="now-table"), id="now", open="", hidden=""
    )


def _render_policy(script: str, *, may_ask: bool) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = (
        "default-src 'none'",
        f"script-src 'sha256-{digest}' blob:",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        *(["connect-src 'self'"] if may_ask else []),
        "base-uri 'none'",
        "form-action 'none'",
    )
    return element("meta", http_equiv="Content-Security-Policy", content="; ".join(rules))


def _render_hues() -> str:
    light = "".join(f"--hue-{name.replace(' ', '-')}:{hue.light};" for name, hue in HUES.items())
    dark = "".join(f"--hue-{name.replace(' ', '-')}:{hue.dark};" for name, hue in HUES.items())
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
        f"@media print{{:root:root:root{{{light}}}}}"
    )


def _render_header(summary: Summary) -> Markup:
    num = summary.world_size
    facts = [
        f"{num:,} rank{'' if num == 1 else 's'}",
        f"{len(summary.hosts)} host{'' if len(summary.hosts) == 1 else 's'}" if summary.hosts else "",
        summary.backend or "",
        f"torch {summary.torch}" if summary.torch else "",
    ]
    command = " ".join(summary.command)
    return join(
        element("h1", element("bdi", _run_name(summary))),
        element("p", " \u00b7 ".join(filter(None, facts)), class_="facts-line"),
        element("p", element("code", command), class_="command-line", title=command) if command else "",
    )


def _run_name(summary: Summary) -> str:
    return Path(summary.run).name or summary.run


def _render_tabs(pages: Sequence[Dashboard]) -> Markup:
    if len(pages) < 2:
        return Markup("")
    items = [element("li", element("a", page.title, href=f"#page-{page.name}")) for page in pages]
    return element("nav", element("ol", *items), class_="tabs", aria_label="Pages of this report")


def _render_page(page: Dashboard, documents: Mapping[str, Document]) -> Markup:
    """Return one page: its question, the links to its panels, its panels."""
    links = [element("li", element("a", panel.title, href=f"#{panel.anchor}")) for panel in page.panels]
    return element(
        "section",
        element("nav", element("ol", *links), class_="panels", aria_label=f"Panels of the page {page.title}"),
        element(
            "div",
            element("p", element("span", page.title, class_="page-title"), " ", page.question, class_="page-question"),
            *(_wrap(panel, documents[panel.anchor].markup) for panel in page.panels),
            class_="content",
        ),
        id=f"page-{page.name}",
        class_="page",
        aria_label=page.title,
    )


def _wrap(panel: Panel, content: Markup) -> Markup:
    """Put the title, the question and the definitions of a panel around its content."""
    heading = f"{panel.anchor}-title"
    return element(
        "section",
        element(
            "h2",
            panel.title,
            element("a", "#", href=f"#{panel.anchor}", class_="anchor", aria_label=f"Link to {panel.title}"),
            id=heading,
        ),
        element("p", panel.question, class_="question") if panel.question else "",
        element("div", content, class_="content-of-panel", id=f"content-{panel.anchor}"),
        _render_help(panel),
        id=panel.anchor,
        class_=f"panel panel-{panel.name.replace('_', '-')}",
        aria_labelledby=heading,
    )


def _render_help(panel: Panel) -> Markup:
    if not panel.help and not panel.definitions:
        return Markup("")
    terms = [
        part
        for name, definition in panel.definitions.items()
        for part in (element("dt", name.replace("_", " ")), element("dd", definition))
    ]
    return element(
        "details",
        element("summary", "What this shows"),
        *(element("p", paragraph) for paragraph in panel.help.split("\n\n") if paragraph),
        element("dl", *terms) if terms else "",
        class_="help",
    )


@functools.cache
def _pack_plotly() -> str:
    """Return plotly.js as the installed package carries it; to import that package takes longer than to read it."""
    package = find_spec("plotly")
    assert package is not None, "plotly is a dependency"
    assert package.origin is not None, "a package has a file"
    script = Path(package.origin).parent / "package_data" / "plotly.min.js"
    return _pack(script.read_text("utf-8"), BUNDLE_LEVEL)


def _pack(text: str, level: int = DATA_LEVEL) -> str:
    return base64.b64encode(gzip.compress(text.encode(), level, mtime=0)).decode()
