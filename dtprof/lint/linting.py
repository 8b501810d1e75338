"""Lint files: parse them, check their functions, and drop findings that a comment with a reason covers."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from dtprof.lint.exception_handlers import check_handlers
from dtprof.lint.lint_findings import HandledCall, LintFinding, LintResult
from dtprof.lint.rules import check
from dtprof.lint.scopes import Scopes
from dtprof.lint.sequences import Sequences
from dtprof.lint.sources import Function, Module, Program, parse

_IGNORE = re.compile(r"#\s*dtprof:\s*ignore\b[\s:,-]*(?P<reason>.*)$")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def lint(paths: Iterable[Path]) -> LintResult:
    """Return the findings in files, and in the Python files of directories."""
    modules: list[Module] = []
    problems: list[str] = []
    unreadable = False
    for path, named in _files(paths):
        try:
            modules.append(parse(path))
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror})")
            unreadable |= named
        except SyntaxError as error:
            place = path if error.lineno is None else f"{path}:{error.lineno}"  # None: of bytes that are no text
            problems.append(f"{place} is no Python source that this Python knows ({error.msg})")
            unreadable |= named
        except (ValueError, RecursionError, MemoryError) as error:
            problems.append(f"{path} cannot be parsed ({error or type(error).__name__})")
            unreadable |= named
    program = Program(modules)
    scopes = Scopes(program)
    sequences = Sequences(scopes)
    found: list[LintFinding] = []
    ignored = 0
    for module in modules:
        reasons = _reasons(module, problems)
        own = [
            finding for function in module.everything for finding in _findings(function, scopes, sequences, problems)
        ]
        for finding in sorted(own, key=lambda finding: (finding.place.line, finding.place.column, finding.kind)):
            lines = {place.line for place in (finding.place, finding.condition, finding.called_from) if place}
            if lines & reasons:
                ignored += 1
            elif finding not in found:
                found.append(finding)
    return LintResult(
        files=len(modules),
        findings=tuple(found),
        ignored=ignored,
        problems=tuple(problems),
        unreadable=unreadable,
    )


def _findings(function: Function, scopes: Scopes, sequences: Sequences, problems: list[str]) -> Iterator[LintFinding]:
    try:
        yield from check(function, scopes, sequences)
    except RecursionError:
        problems.append(f"{function.module.path}: {function.name} is nested too deeply to be checked")


def calls_in_handlers(path: Path) -> list[HandledCall]:
    """Return the collectives in exception handlers and finally blocks of a file that no comment covers.

    Raises:
        OSError: it cannot be read.
        SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
    """
    module = parse(path)
    sequences = Sequences(Scopes(Program([module])))
    lines = ["", *module.text.splitlines()]
    covered = _reasons(module, [])
    return [
        HandledCall(
            place=replace(found.place, text=lines[found.place.line]),
            handler=found.condition,
            is_finally=found.kind == "collective-in-finally",
        )
        for function in module.everything
        for found in check_handlers(function, sequences)
        if found.condition is not None and found.called_from is None
        if not covered & {found.place.line, found.condition.line}
    ]


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield files, and whether the user named each."""
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*.py") if not _is_skipped(file.relative_to(path)))
            found = [(file, False) for file in inside]
        else:
            found = [(path, True)]
        for file, named in found:
            if (resolved := file.absolute()) not in seen:
                seen.add(resolved)
                yield file, named


def _is_skipped(path: Path) -> bool:
    return any(part in _SKIPPED or part.startswith(".") for part in path.parts)


def _reasons(module: Module, problems: list[str]) -> set[int]:
    """Return the lines covered by `# dtprof: ignore REASON`: its line, or the next after a line with nothing else."""
    covered = set()
    for number, line in enumerate(module.text.splitlines(), 1):
        match = _IGNORE.search(line) if "dtprof" in line else None
        if match is None:
            continue
        if not match["reason"].strip():
            problems.append(
                f"{module.path}:{number} ignores without a reason, and is not heeded: `# dtprof: ignore WHY`"
            )
            continue
        covered.add(number + 1 if line.lstrip().startswith("#") else number)
    return covered
