"""Findings of lint as text, one paragraph each."""

from dtprof.formatting import join_lines, plural
from dtprof.lint.lint_findings import LintFinding, LintResult
from dtprof.report.text.labelled_lines import wrap_text

WIDTH = 110


def lint_text(result: LintResult) -> str:
    """Return the text: each finding with its place, its consequence and the advice, then their number."""
    lines = [line for finding in result.findings for line in _lines(finding)]
    lines += [line for problem in result.problems for line in _wrapped("cannot tell: ", problem)]
    counted = [finding for finding in result.findings if finding.severity in ("error", "warning")]
    total = plural(len(counted), "finding") if counted else "nothing found"
    acquitted = len(result.findings) - len(counted)
    more = [f"{acquitted} acquitted by the run"] if acquitted else []
    more += [f"{result.ignored} ignored by comments"] if result.ignored else []
    if not result.files:
        return join_lines([*lines, "no file was read"])
    where = plural(result.files, "file")
    return join_lines([*lines, ", ".join([f"{total} in {where}", *more])])


def _lines(finding: LintFinding) -> list[str]:
    place = finding.place
    lines = [f"{place.file}:{place.line}:{place.column}: {finding.severity}: {finding.kind}"]
    lines += _wrapped("  ", finding.summary)
    if finding.called_from is not None:
        lines.append(f"  called from {finding.called_from.file}:{finding.called_from.line}")
    if finding.ran is not None:
        lines += _wrapped("  run: ", f"{finding.ran.verdict}: {finding.ran.text}")
    if finding.severity in ("error", "warning"):
        lines += [*_wrapped("  why: ", finding.why), *_wrapped("  do: ", finding.advice)]
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    return wrap_text(label + text, WIDTH, indent=" " * max(2, len(label)), break_long_words=False)
