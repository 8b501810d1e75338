"""Findings of lint as JSON, schema 1; docs/reference/lint.md is its contract."""

from typing import Any

from dtprof.lint.lint_findings import SCHEMA, LintFinding, LintResult, SourceLocation


def lint_json(result: LintResult) -> dict[str, Any]:
    """Return the document."""
    return {
        "schema": SCHEMA,
        "files": result.files,
        "findings": [_finding(finding) for finding in result.findings],
        "ignored": result.ignored,
        "cannot_tell": list(result.problems),
    }


def _finding(finding: LintFinding) -> dict[str, Any]:
    ran = finding.ran
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        **_place(finding.place),
        "function": finding.function,
        "op": finding.op,
        "group": finding.group,
        "summary": finding.summary,
        "why": finding.why,
        "advice": finding.advice,
        "condition": finding.condition and {**_place(finding.condition), "text": finding.condition.text},
        "called_from": finding.called_from and _place(finding.called_from),
        "run": ran
        and {"verdict": ran.verdict, "text": ran.text, "calls": {str(r): n for r, n in sorted(ran.counts.items())}},
        "docs": finding.kind,
    }


def _place(place: SourceLocation) -> dict[str, Any]:
    return {"file": place.file, "line": place.line, "column": place.column}
