"""A verdict in under 25 lines of text; what finds no room is counted in the line "not shown"."""

from collections import Counter

from dtprof.diagnosis.findings import Finding, Verdict, at_line
from dtprof.formatting import format_fraction, join_lines, list_ranks, plural
from dtprof.records.sites import Site
from dtprof.report.text.labelled_lines import wrap_text

WIDTH = 100
MAX_LINES = 24
MAX_EVIDENCE, MAX_ADVICE, MAX_REASONS, MAX_SITES = 4, 2, 3, 3
MAX_BRIEF = 2
"""Findings beside the first of which the summary is shown at least, where they are no notes."""


def verdict_text(verdict: Verdict) -> str:
    """Return the text: verdict, waits, the culprit's activity, advice, confidence, caveats."""
    lines = [_headline(verdict)]
    for finding in verdict.findings:
        lines += _finding_lines(finding)
    for reason in verdict.cannot_tell:
        lines += _wrapped("cannot tell: ", reason)
    return join_lines(lines if len(lines) <= MAX_LINES else _shortened(verdict))


def _shortened(verdict: Verdict) -> list[str]:
    """Return the findings and reasons that find room, and how many more there are.

    The first finding gives up evidence for the summaries of other faults.
    """
    lines = [_headline(verdict)]
    hidden: Counter[str] = Counter()
    left_out: list[Finding] = []
    briefs = [_brief(finding) for finding in verdict.findings[1:] if finding.severity != "info"][:MAX_BRIEF]
    for place, finding in enumerate(verdict.findings):
        room = MAX_LINES - 1 - len(lines)
        kept = sum(map(len, briefs[place:]))
        if (shown := _fit(finding, room, kept, is_first=place == 0)) is None or left_out:
            left_out.append(finding)
            continue
        lines += shown
        hidden["line"] += len(_finding_lines(finding)) - len(shown)
    hidden["finding"] = len(left_out)
    for place, reason in enumerate(verdict.cannot_tell):
        shown = _wrapped("cannot tell: ", reason)
        if place < MAX_REASONS and not hidden["caveat"] and len(lines) + len(shown) < MAX_LINES:
            lines += shown
        else:
            hidden["caveat"] += 1
    counted = ", ".join(
        plural(count, f"more {what}") + (_names_of(left_out) if what == "finding" else "")
        for what, count in hidden.items()
        if count
    )
    return [*lines, f"not shown: {counted}: see --json or the report"] if counted else lines


def _fit(finding: Finding, room: int, kept: int, *, is_first: bool) -> list[str] | None:
    """Return the longest form of a finding that has room, of which some lines are kept for others if they can be."""
    forms = [
        _finding_lines(finding, max_evidence=most, max_advice=MAX_ADVICE)
        for most in (range(MAX_EVIDENCE, -1, -1) if is_first else [MAX_EVIDENCE])
    ]
    for space in (room - kept, room) if is_first else (room - kept,):
        for form in forms:
            if len(form) <= space:
                return form
    brief = _brief(finding)
    return forms[0][:room] if is_first else brief if len(brief) <= room else None


def _brief(finding: Finding) -> list[str]:
    """Return the summary of a finding and its kind alone."""
    return _finding_lines(finding, max_evidence=0, max_advice=0, max_sites=0)


def _names_of(findings: list[Finding]) -> str:
    """Return ` (rank-frozen of rank 4)`: a fault beside the first is named at least."""
    faults = [finding for finding in findings if finding.severity != "info" and finding.culprit_ranks]
    names = [f"{finding.kind} of {list_ranks(finding.culprit_ranks)}" for finding in faults[:2]]
    return f" ({', '.join(names)}{', ...' if len(faults) > len(names) else ''})" if names else ""


def _headline(verdict: Verdict) -> str:
    missing = f", {list_ranks(verdict.ranks_missing)} left no record" if verdict.ranks_missing else ""
    return f"verdict: {verdict.outcome} ({plural(len(verdict.ranks_seen), 'rank')} seen{missing})"


def _finding_lines(
    finding: Finding, *, max_evidence: int | None = None, max_advice: int | None = None, max_sites: int = MAX_SITES
) -> list[str]:
    lines = _wrapped("note: " if finding.severity == "info" else "", finding.summary)
    lines.append(f"  kind: {finding.kind}, {format_fraction(finding.confidence, 0)} sure")
    if finding.culprit_hosts:
        lines += _wrapped("  host: ", ", ".join(finding.culprit_hosts))
    lines += _site_lines("  culprit", finding.culprit_call_sites, most=max_sites)
    lines += _site_lines("  waiting" if finding.waiting_ranks else "  others", finding.call_sites, most=max_sites)
    for fact in finding.evidence[:max_evidence]:
        lines += _wrapped("  evidence: ", fact)
    for step in finding.advice[:max_advice]:
        lines += _wrapped("  do: ", step)
    return lines


def _site_lines(label: str, sites: dict[int, Site], *, most: int) -> list[str]:
    """Return each place, with the ranks that are there."""
    places: dict[str, list[int]] = {}
    for rank, site in sites.items():
        places.setdefault(_place(site), []).append(rank)
    shown = [f"{list_ranks(ranks)}{place}" for place, ranks in [*places.items()][:most]]
    if 0 < most < len(places):
        shown.append(f"and {plural(len(places) - most, 'more place')}")
    return [line for words in shown for line in _wrapped(f"{label}: ", words)]


def _place(site: Site) -> str:
    """Return ` at FILE:LINE (FUNCTION)`, with the line of its caller."""
    caller = f", called{at_line(site.caller)}" if site.caller is not None else ""
    return at_line(site) + caller


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * max(2, len(label))
    return wrap_text(label + text, WIDTH, indent=indent, break_long_words=False) or [label]
