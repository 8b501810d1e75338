"""The table of the activity of ranks of a running job, above the pages; rendered at every poll."""

from collections.abc import Mapping

from dtprof.analysis.results import exposed_of
from dtprof.formatting import UNKNOWN, format_bytes, format_count, format_fraction, format_ns, plural
from dtprof.monitor.rank_activity import RankActivity
from dtprof.monitor.run_monitor import JobSnapshot
from dtprof.monitor.step_aggregates import NewestStep
from dtprof.monitor.terminal.top_screen import choose_ranks
from dtprof.report.figures.palette import HUES
from dtprof.report.pages.page_markup import Markup, element, join

MAX_ROWS = 8
_HEADS = ("rank", "step", "step time", "parts of it", "comm", "wait", "memory", "for", "does now")
_NUMBERS = ("rank", "step", "step time", "comm", "wait", "memory", "for")


def render_now(snapshot: JobSnapshot, newest: NewestStep | None) -> Markup:
    """Return the table, with the step that the parts are of; the ranks that matter most where there are many."""
    shown = choose_ranks(snapshot.ranks, snapshot.summary, MAX_ROWS)
    longest_ns = max(newest.duration_ns.values(), default=0) if newest is not None else 0
    rest = len(snapshot.ranks) - len(shown)
    return join(
        element("p", _describe_step(snapshot, newest), class_="now-step"),
        element(
            "div",
            element(
                "table",
                element("thead", element("tr", *map(_head, _HEADS))),
                element("tbody", *(_row(rank, newest, longest_ns) for rank in shown)),
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label="What each rank does",
        ),
        element("p", f"{plural(rest, 'more rank')}, none of them in worse state", class_="hint") if rest else "",
    )


def _describe_step(snapshot: JobSnapshot, newest: NewestStep | None) -> str:
    if newest is None:
        return "No step has a begin and an end on every rank yet, or their newest records hold none."
    slowest = max(newest.duration_ns, key=lambda rank: newest.duration_ns[rank])
    behind = snapshot.step - newest.number
    which = ", the newest that every rank has ended," if behind <= 1 else ""
    took = f"{format_ns(newest.duration_ns[slowest])} on the slowest (rank {slowest})"
    since = f"; {format_count(behind)} more have ended since" if behind > 1 else ""
    return f"Step {format_count(newest.number)}{which} took {took}{since}."


def _head(name: str) -> Markup:
    return element("th", name, scope="col", class_="number" if name in _NUMBERS else None)


def _row(rank: RankActivity, newest: NewestStep | None, longest_ns: int) -> Markup:
    duration_ns = newest.duration_ns.get(rank.rank) if newest is not None else None
    parts = newest.parts_ns.get(rank.rank) if newest is not None else None
    place = f"{rank.doing or 'between phases'}  {rank.where}" if rank.end.is_running else rank.end
    return element(
        "tr",
        _number(str(rank.rank)),
        _number(format_count(rank.step)),
        _number(format_ns(duration_ns)),
        element("td", _bar(parts, longest_ns) if parts and longest_ns else UNKNOWN),
        _number(_share(parts, exposed_of(parts))),
        _number(_share(parts, (parts or {}).get("exposed_wait"))),
        _number(format_bytes(rank.memory_bytes)),
        _number(f"{rank.since_ns / 1e9:.1f} s" if rank.since_ns is not None else UNKNOWN),
        element("td", element("bdi", place), class_="now-bad" if rank.end.failed else None),
    )


def _number(text: str) -> Markup:
    return element("td", text, class_="number")


def _bar(parts: Mapping[str, int], longest_ns: int) -> Markup:
    """Return a bar as long as the step, against the longest of any rank."""
    there = {part: ns for part, ns in parts.items() if ns}
    said = ", ".join(f"{HUES[part].label} {format_ns(ns)}" for part, ns in there.items())
    pieces = [
        element("i", style=f"width:{100 * ns / longest_ns:.2f}%;background:var(--hue-{part})")
        for part, ns in there.items()
    ]
    return element("span", *pieces, class_="now-bar", role="img", aria_label=said, title=said)


def _share(parts: Mapping[str, int] | None, chosen_ns: float | None) -> str:
    total_ns = sum((parts or {}).values())
    return format_fraction(chosen_ns / total_ns) if chosen_ns is not None and total_ns else UNKNOWN
