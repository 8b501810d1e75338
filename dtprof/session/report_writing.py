"""Write the report of a run: choose its pages and its place, analyse the run, render one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.session.engines import Engine
from dtprof.session.report_data import read_report_source

if TYPE_CHECKING:
    from dtprof.report.pages.page_dashboard import Dashboard

DEFAULT_FILE = "report.html"


def write_report(
    path: Path,
    engine: Engine,
    *,
    output: Path | None = None,
    dashboards: Sequence[str] = (),
    against: Path | None = None,
    force: bool = False,
) -> Path:
    """Write the report of a run and return where it lies.

    Parameters:
        output: the file; None: DEFAULT_FILE in the run, which replaces an earlier report without `force`.
        dashboards: pages by name, or by the path of a TOML file; none: all that have something to show.
        against: another run to compare with, on a page of its own.

    Raises:
        UsageError: a page is not known or not valid.
        OutputError: the file exists and `force` is not given, or it cannot be written.
        NotARunError: a path holds no run that can be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    # Pages and output are checked before minutes are spent on the analysis.
    named = _load_named(dashboards) if dashboards else []
    if output is not None and output.exists():
        from dtprof.report.pages.html_file import refuse_taken

        refuse_taken(output, force=force)
    source = read_report_source(path, engine, against=against)
    # Only now: workers are forked before Plotly is loaded, and meanwhile it loads beside the analysis.
    from dtprof.report.pages import html_file, page_dashboard, page_panels

    pages = page_dashboard.name_apart(named) or page_dashboard.load_report(
        page_panels.panel_names(), available=source.available
    )
    target = output or default_output(path)
    replaces_report = output is None and html_file.is_own_report(target)
    html_file.write_html(source, pages, target, force=force or replaces_report)
    return target


def _load_named(names: Sequence[str]) -> "list[Dashboard]":
    from dtprof.report.pages import page_dashboard, page_panels

    return [page_dashboard.load_dashboard(name, page_panels.panel_names()) for name in names]


def default_output(path: Path) -> Path:
    """Return where a report goes by default: into the run, or beside us where the run is at a URL."""
    from dtprof.records import remote

    at_url = remote.url_of(path) is not None
    return Path(f"{path.name}-{DEFAULT_FILE}") if at_url else remote.plain(path) / DEFAULT_FILE
