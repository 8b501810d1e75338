"""A verdict as JSON, schema 1; docs/reference/diagnose.md is its contract."""

from typing import Any

from dtprof.diagnosis.findings import SCHEMA, Finding, Verdict
from dtprof.records.sites import Site


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Return the document."""
    return {
        "schema": SCHEMA,
        "outcome": verdict.outcome,
        "source": list(verdict.source),
        "ranks_seen": list(verdict.ranks_seen),
        "ranks_missing": list(verdict.ranks_missing),
        "findings": [_finding(finding) for finding in verdict.findings],
        "cannot_tell": list(verdict.cannot_tell),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    group = finding.group
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "summary": finding.summary,
        "culprit_ranks": list(finding.culprit_ranks),
        **({"culprit_hosts": list(finding.culprit_hosts)} if finding.culprit_hosts else {}),
        "waiting_ranks": list(finding.waiting_ranks),
        "group": group and {"name": group.name, "description": group.description, "ranks": list(group.ranks)},
        "op": finding.op,
        "seq": finding.seq,
        "step": finding.step,
        "call_sites": {str(rank): _site(site) for rank, site in sorted(finding.call_sites.items())},
        "culprit_call_sites": {str(rank): _site(site) for rank, site in sorted(finding.culprit_call_sites.items())},
        "evidence": list(finding.evidence),
        "advice": list(finding.advice),
        "docs": finding.kind,
    }


def _site(site: Site) -> dict[str, Any]:
    callers = [_site(caller) for caller in site.callers]
    place = {"file": site.file, "line": site.line, "function": site.function}
    return {**place, "callers": callers} if callers else place
