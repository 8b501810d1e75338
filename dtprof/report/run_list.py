"""The page that lists the runs in a folder."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from dtprof.report.page_dashboard import dashboards_folder
from dtprof.report.page_markup import Markup, element, join

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of the list."""

    name: str
    command: str
    started_realtime_ns: int  # 0: not known
    has_ended: bool
    exit_status: int | None
    num_ranks: int

    @property
    def state(self) -> str:
        """How it stands, in words."""
        if not self.has_ended:
            return "running, or cut off"
        return "ended" if not self.exit_status else f"ended with exit status {self.exit_status}"


def render_run_list(entries: Sequence[RunEntry]) -> str:
    """Return the page."""
    style = Markup((dashboards_folder() / "style.css").read_text(encoding="utf-8"))
    body = (
        _table(entries) if entries else element("p", "No run is in this folder yet. Record one: dtprof run -- COMMAND")
    )
    return "<!DOCTYPE html>\n" + element(
        "html",
        element(
            "head",
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("title", "Runs \u2013 dtprof"),
            element("style", style),
        ),
        element("body", element("main", element("h1", "Runs"), body, id="content")),
        lang="en",
    )


def _table(entries: Sequence[RunEntry]) -> Markup:
    heads = ("run", "started", "ranks", "state", "command")
    return element(
        "table",
        element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
        element("tbody", join(*map(_row, entries))),
        class_="runs",
    )


def _row(entry: RunEntry) -> Markup:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.started_realtime_ns / 1e9))
    return element(
        "tr",
        element("td", element("a", element("bdi", entry.name), href=f"run/{quote(entry.name)}/")),
        element("td", started if entry.started_realtime_ns else "-"),
        element("td", str(entry.num_ranks)),
        element("td", entry.state),
        element("td", element("code", entry.command)),
    )
