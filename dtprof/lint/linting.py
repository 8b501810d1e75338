"""From paths to the result: which files, what is found in them, and what comments with a reason cover."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dtprof.lint.bindings import Scopes
from dtprof.lint.findings import LintFinding, LintResult
from dtprof.lint.rules import check
from dtprof.lint.sequences import Sequences
from dtprof.lint.sources import Module, Program, parse

_IGNORE = re.compile(r"#\s*dtprof:\s*ignore\b[\s:,-]*(?P<reason>.*)$")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def lint(paths: Iterable[Path]) -> LintResult:
    """Return what is found in files, and in the Python files of directories."""
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
            problems.append(f"{path}:{error.lineno} is no Python source that this Python knows ({error.msg})")
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
        own = [finding for function in module.everything for finding in check(function, scopes, sequences)]
        for finding in sorted(own, key=lambda one: (one.place.line, one.place.column, one.kind)):
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


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield files and whether each was named itself."""
    seen: set[Path] = set()
    for path in paths:
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*.py") if not _is_skipped(one.relative_to(path)))
            found = [(one, False) for one in inside]
        else:
            found = [(path, True)]
        for one, named in found:
            if (resolved := one.absolute()) not in seen:
                seen.add(resolved)
                yield one, named


def _is_skipped(path: Path) -> bool:
    return any(part in _SKIPPED or part.startswith(".") for part in path.parts)


def _reasons(module: Module, problems: list[str]) -> set[int]:
    """Return the lines covered by `# dtprof: ignore REASON`: its own, or the one after a comment of its own line."""
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
