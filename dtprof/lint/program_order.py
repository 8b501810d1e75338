"""What a program calls after a line, before its function ends or the loop around the line begins its next round."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dtprof.lint.sources import SCOPES, last_name, read_tree

_BODIES = ("body", "orelse", "finalbody")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)


@dataclass(frozen=True, kw_only=True)
class ProgramPlace:
    """A line of a program, seen in its function."""

    in_loop: bool
    following: frozenset[tuple[str, int]]  # functions called after it, by the last part of their names, and the lines
    loops: tuple[tuple[int, int], ...] = ()  # first and last line of those around it, from the innermost
    branches: tuple[tuple[int, int], ...] = ()  # first and last line of the branches it is in, which may be left out
    block: tuple[int, int] | None = None  # of a `with`: first and last line of what it is around
    yields: int = 0  # line of the first `yield` of its function; 0: none


def read_places(path: Path) -> dict[int, ProgramPlace]:
    """Return the places of all statements of a file, by each of their lines.

    Raises:
        OSError, SyntaxError, ValueError, RecursionError, MemoryError: as of `read_tree`.
    """
    places: dict[int, ProgramPlace] = {}
    tree, _ = read_tree(path)
    _take(tree.body, ProgramPlace(in_loop=False, following=frozenset()), places)
    return places


def _take(statements: list[ast.stmt], after: ProgramPlace, places: dict[int, ProgramPlace]) -> None:
    """Add the places of statements that follow one another, given what follows the last of them."""
    following = after.following
    for statement in reversed(statements):
        place = replace(after, following=following)
        if isinstance(statement, SCOPES):
            lines = (node.lineno for node in ast.walk(statement) if isinstance(node, ast.Yield | ast.YieldFrom))
            inside = ProgramPlace(in_loop=False, following=frozenset(), yields=min(lines, default=0))
        elif isinstance(statement, _LOOPS):
            loop = statement.lineno, statement.body[-1].end_lineno or statement.body[-1].lineno
            inside = replace(after, in_loop=True, following=frozenset(), loops=(loop, *after.loops))
        else:
            inside = place
        if isinstance(statement, ast.With | ast.AsyncWith):
            place = replace(place, block=(statement.body[0].lineno, statement.end_lineno or statement.lineno))
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            places[line] = place
        for body, may_be_left_out in _bodies(statement):
            branch = body[0].lineno, body[-1].end_lineno or body[-1].lineno
            within = replace(inside, branches=(branch, *inside.branches)) if may_be_left_out else inside
            if isinstance(body[-1], _LEAVING):
                within = replace(within, following=frozenset())
            if isinstance(statement, ast.Try) and body is not statement.finalbody:
                ends = (*(statement.orelse if body is statement.body else ()), *statement.finalbody)
                within = replace(within, following=within.following.union(*(_calls(end) for end in ends)))
            _take(body, within, places)
        if not isinstance(statement, SCOPES):
            following |= frozenset(_calls(statement))


def _bodies(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], bool]]:
    """Give the blocks of a statement, and whether the program may leave them out where it comes to the statement."""
    for name in _BODIES:
        if body := getattr(statement, name, None):
            yield body, isinstance(statement, ast.If)
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body, True


def _calls(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield last_name(node.func), node.lineno
