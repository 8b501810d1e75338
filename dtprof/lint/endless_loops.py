"""Loops that cannot end by themselves, such as `while True: pass` and `while not done: n += 1`, read from source."""

import ast
from pathlib import Path

from dtprof.lint.sources import SCOPES, UNREADABLE, read_tree

WAYS_OUT = (
    ast.Break,
    ast.Return,
    ast.Raise,
    ast.Assert,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.Call,
    ast.With,
    ast.Try,
)
"""Statements and expressions that may leave a loop, or do work in it: a call may do anything."""


def find_endless_loop(file: str, line: int, *, started_s: float) -> int | None:
    """Return the line of the `while` around a line of a source file that can only be left from outside; else None.

    Its condition is constant, or reads only names that the loop never binds, and nothing in it calls, raises or leaves.
    Another thread or a signal may still end it: its own thread only waits for that.

    Parameters:
        started_s: when the program started, seconds since 1970; a source that changed since says nothing of it.
    """
    around = _list_loops(file, line, started_s)
    return next((loop.lineno for loop in around if isinstance(loop, ast.While) and _is_endless(loop)), None)


def find_names_bound_in_loop(file: str, line: int, *, started_s: float) -> set[str] | None:
    """Return the names that the innermost loop around a line of a source file binds; None: there is none, or no source.

    Parameters:
        started_s: as above.
    """
    around = _list_loops(file, line, started_s)
    return _bound_names(max(around, key=lambda loop: loop.lineno)) if around else None


def _list_loops(file: str, line: int, started_s: float) -> list[ast.While | ast.For]:
    """Return the loops around a line, of its own function."""
    try:
        if Path(file).stat().st_mtime >= started_s:
            return []
        tree, _ = read_tree(Path(file))
    except UNREADABLE:  # no source, as in a frozen program, or not that of this Python
        return []
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While | ast.For) and _holds(node, line) and not _in_inner_scope(node, line)
    ]


def _holds(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0)


def _in_inner_scope(loop: ast.stmt, line: int) -> bool:
    """Say whether a line of a loop belongs to a function that the loop only defines."""
    return any(isinstance(node, SCOPES) and _holds(node, line) for node in ast.walk(loop))


def _is_endless(loop: ast.While) -> bool:
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, WAYS_OUT) for node in (*inside, *ast.walk(loop.test))):
        return False
    if isinstance(loop.test, ast.Constant):
        return bool(loop.test.value)
    bound = _bound_names(loop)
    parts = list(ast.walk(loop.test))
    plain = (ast.Name, ast.Constant, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop)
    reads = {node.id for node in parts if isinstance(node, ast.Name)}
    return all(isinstance(node, (*plain, ast.cmpop, ast.expr_context)) for node in parts) and not reads & bound


def _bound_names(loop: ast.While | ast.For) -> set[str]:
    """Return the names that rounds of a loop bind: what stands in its `else` runs after them."""
    rounds = (*loop.body, loop.test if isinstance(loop, ast.While) else loop.target)
    names = (node for part in rounds for node in ast.walk(part) if isinstance(node, ast.Name))
    return {node.id for node in names if not isinstance(node.ctx, ast.Load)}
