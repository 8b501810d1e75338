"""The page that lists the runs in a folder, and the one in place of a run that cannot be shown."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from dtprof.formatting import UNKNOWN
from dtprof.records.run_facts import RunFacts
from dtprof.report.pages.html_file import link_to_list
from dtprof.report.pages.page_dashboard import dashboards_folder
from dtprof.report.pages.page_markup import Markup, element, join

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of the list."""

    facts: RunFacts
    trouble: str = ""  # why its state is unknown: found, expected, next step


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
    heads = ("run", "outcome", "started", "ranks", "command")
    return element(
        "table",
        element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
        element("tbody", join(*map(_row, entries))),
        class_="runs",
    )


def _row(entry: RunEntry) -> Markup:
    facts = entry.facts
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.started_ns / 1e9))
    status = f", exit status {facts.exit_status}" if facts.exit_status else ""
    more = [element("p", text, class_="trouble") for text in (entry.trouble, facts.summary) if text]
    return element(
        "tr",
        element("td", element("a", element("bdi", facts.name), href=f"run/{quote(facts.name)}/")),
        element("td", f"{facts.outcome}{status}", *more),
        element("td", started if facts.started_ns else UNKNOWN),
        element("td", str(facts.num_ranks)),
        element("td", element("code", facts.command) if facts.command else UNKNOWN),
    )
