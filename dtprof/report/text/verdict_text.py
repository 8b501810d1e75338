"""A verdict in under 25 lines of text."""

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.formatting import format_fraction, join_lines, list_ranks, plural
from dtprof.records.tables import Site
from dtprof.report.text.labelled_lines import wrap_text

WIDTH = 100
MAX_LINES = 24


def verdict_text(verdict: Verdict) -> str:
    """Return the text: verdict, waits, the culprit's activity, advice, confidence, caveats."""
    lines = [f"verdict: {verdict.outcome}{_scope(verdict)}"]
    for finding in verdict.findings:
        lines += _finding_lines(finding)
    for reason in verdict.cannot_tell[:3]:
        lines += _wrapped("cannot tell: ", reason)
    return join_lines(lines[:MAX_LINES])


def _scope(verdict: Verdict) -> str:
    missing = f", {list_ranks(verdict.ranks_missing)} left no record" if verdict.ranks_missing else ""
    return f" ({plural(len(verdict.ranks_seen), 'rank')} seen{missing})"


def _finding_lines(finding: Finding) -> list[str]:
    lines = _wrapped("note: " if finding.severity == "info" else "", finding.summary)
    lines.append(f"  kind: {finding.kind}, {format_fraction(finding.confidence, 0)} sure")
    if finding.culprit_hosts:
        lines += _wrapped("  host: ", ", ".join(finding.culprit_hosts))
    lines += _site_lines("  culprit", finding.culprit_call_sites)
    lines += _site_lines("  waiting" if finding.waiting_ranks else "  others", finding.call_sites)
    for fact in finding.evidence[:4]:
        lines += _wrapped("  evidence: ", fact)
    for step in finding.advice[:2]:
        lines += _wrapped("  do: ", step)
    return lines


def _site_lines(label: str, sites: dict[int, Site]) -> list[str]:
    """Return one line for each place, with the ranks that are there."""
    places: dict[Site, list[int]] = {}
    for rank, site in sites.items():
        places.setdefault(site, []).append(rank)
    lines = [f"{label}: {list_ranks(ranks)} at {s.file}:{s.line} ({s.function})" for s, ranks in places.items()]
    return lines if len(lines) <= 3 else [*lines[:3], f"{label}: and {plural(len(lines) - 3, 'more place')}"]


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * max(2, len(label))
    return wrap_text(label + text, WIDTH, indent=indent, break_long_words=False) or [label]
