"""Lint Python source for collectives that only some ranks issue, and confirm findings by a run of that source."""

from collections.abc import Sequence
from pathlib import Path

from dtprof.errors import UsageError
from dtprof.lint.lint_findings import LintResult
from dtprof.lint.linting import lint
from dtprof.lint.run_evidence import GroupCalls, confirm
from dtprof.session.engines import IN_THIS_PROCESS, open_run


def lint_sources(paths: Sequence[Path], *, run_directory: Path | None = None) -> LintResult:
    """Lint files and folders; the operations of a run confirm or clear each finding.

    Raises:
        UsageError: there is no Python file.
        NotARunError: the run cannot be read.
    """
    result = lint(paths)
    if not (result.files or result.problems):
        raise UsageError(f"{paths[0]} holds no Python file; expected a .py file, or a directory of those")
    return result if run_directory is None else confirm(result, _group_calls(run_directory))


def _group_calls(path: Path) -> list[GroupCalls]:
    """Return the calls of the ranks of a run in each group, in order."""
    # Without a run, lint needs no numpy.
    from dtprof.diagnosis.sources.recorded_ranks import without_refused
    from dtprof.records import schema

    calls_of_group: dict[tuple[str, tuple[int, ...]], GroupCalls] = {}
    for tables in open_run(path, IN_THIS_PROCESS).load_all():
        operations = without_refused(tables.operations)
        for number, group in tables.groups.items():
            rows = operations[(operations["group"] == number) & (operations["kind"] == schema.KIND["collective"])]
            if not group.ranks or not len(rows):
                continue
            calls = calls_of_group.setdefault((group.name, group.ranks), GroupCalls(ranks=group.ranks)).calls
            mine = calls.setdefault(tables.rank, [])
            for row in rows[rows["seq"].argsort(kind="stable")]:
                site = tables.sites.get(int(row["site"]))
                name = tables.ops[int(row["op"])] if int(row["op"]) < len(tables.ops) else "?"
                mine.append((name, site.file if site else "", site.line if site else 0))
    return list(calls_of_group.values())
