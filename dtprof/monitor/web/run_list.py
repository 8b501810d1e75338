"""The page that lists the runs in a folder, and the one in place of a run that cannot be shown."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from dtprof.formatting import UNKNOWN
from dtprof.report.pages.html_file import link_to_list
from dtprof.report.pages.page_dashboard import dashboards_folder
from dtprof.report.pages.page_markup import Markup, element, join

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of the list."""

    name: str
    command: str
    started_realtime_ns: int  # 0: not known
    has_ended: bool
    exit_status: int | None
    num_ranks: int | None  # None: not known
    trouble: str = ""  # why its state is unknown: found, expected, next step

    @property
    def state(self) -> str:
        """The status, in words."""
        if self.trouble:
            return "cannot tell"
        if not self.has_ended:
            return "running, or cut off"
        return "ended" if not self.exit_status else f"ended with exit status {self.exit_status}"


def render_run_list(entries: Sequence[RunEntry]) -> str:
    """Return the page."""
    nothing = "No run is in this folder yet. Record one: dtprof run -- COMMAND"
    body = element("div", _table(entries), class_="scroll", tabindex="0") if entries else element("p", nothing)
    return _page("Runs", element("h1", "Runs"), element("div", body, class_="panel"))


def render_trouble(title: str, sentence: str, *, is_listed: bool) -> str:
    """Return the page in place of a run that cannot be shown; with a link to the list where there is one."""
    return _page(
        title,
        link_to_list("../../") if is_listed else "",
        element("h1", element("bdi", title)),
        element("div", element("p", sentence, class_="trouble"), class_="panel", role="alert"),
    )


def _page(title: str, *body: str) -> str:
    style = Markup((dashboards_folder() / "style.css").read_text(encoding="utf-8"))
    return "<!DOCTYPE html>\n" + element(
        "html",
        element(
            "head",
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("title", f"{title} \u2013 dtprof"),
            element("style", style),
        ),
        element("body", element("main", *body, id="content", class_="runs-page")),
        lang="en",
    )


def _table(entries: Sequence[RunEntry]) -> Markup:
    heads = ("run", "state", "started", "ranks", "command")
    return element(
        "table",
        element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
        element("tbody", join(*map(_row, entries))),
        class_="runs",
    )


def _row(entry: RunEntry) -> Markup:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.started_realtime_ns / 1e9))
    trouble = element("p", entry.trouble, class_="trouble") if entry.trouble else ""
    return element(
        "tr",
        element("td", element("a", element("bdi", entry.name), href=f"run/{quote(entry.name)}/")),
        element("td", entry.state, trouble),
        element("td", started if entry.started_realtime_ns else UNKNOWN),
        element("td", str(entry.num_ranks) if entry.num_ranks is not None else UNKNOWN),
        element("td", element("code", entry.command) if entry.command else UNKNOWN),
    )
