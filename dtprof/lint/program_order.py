"""What a program calls after a line, before its function ends or the loop around the line begins its next round."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from dtprof.lint.sources import SCOPES, last_name, read_tree

_BODIES = ("body", "orelse", "finalbody")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)
_OF_RANK = re.compile(
    r"(get_|is_)?((local|global|node)_)?rank|(is_)?(world_process_zero|main_process|main_rank)|world_size"
)
"""Names that say which rank a process is, and never change."""

_Tests = tuple[ast.expr | None, ...]
"""Conditions of the branches around a statement, the outermost first; None: of a handler, or a `case`."""


class BranchKind(str, Enum):
    """What leads past a line; kept programs hold the texts, which begin with the word in the source."""

    CONTINUE = "continue"
    BREAK = "break"
    RETURN = "return"
    EXIT = "raise"  # SystemExit
    HANDLER = "except"
    RETRY = "except that leads to another attempt"  # a handler in a loop that success leaves
    SUPPRESS = "suppress"
    CONDITION = "if"
    LOOP_END = "loop"


@dataclass(frozen=True, kw_only=True)
class SourcePlace:
    """A line of a program, seen in its function."""

    in_loop: bool
    following: frozenset[tuple[str, int]]  # functions called after it, by the last part of their names, and the lines
    loops: tuple[tuple[int, int], ...] = ()  # first and last line of those around it, from the innermost
    branches: tuple[tuple[int, int], ...] = ()  # first and last line of the branches it is in, which may be left out
    block: tuple[int, int] | None = None  # of a `with`: first and last line of what it is around
    yields: int = 0  # line of the first `yield` of its function; 0: none
    conditions: tuple[
        int, ...
    ] = ()  # lines of the `if`, `elif`, `match` it depends on in its function, innermost first
    counted: tuple[int, ...] = ()  # those of the conditions, and of `ways_past` by what they depend on, that hang on
    # counters of loops and on constants alone
    by_rank: tuple[int, ...] = ()  # the same of those that hang on which rank it is, by the names in them
    naming_rank: tuple[int, ...] = ()  # the same of those that hang on which rank it is, be it among other things
    fixed_loops: tuple[int, ...] = ()  # first lines of loops around it whose rounds the source counts
    endless_loops: tuple[int, ...] = ()  # the same of those that no condition ends, as `while True`
    ways_past: tuple[tuple[int, BranchKind], ...] = ()  # statements that lead past it, by line
    handler: tuple[int, bool] | None = None  # line of the `except` around it, or the first of a `finally`; which it is

    def is_other_branch(self, other: "SourcePlace") -> bool:
        """Say whether the program comes to this place or to the other by one `if`."""
        is_same_if = self.conditions == other.conditions and self.loops == other.loops
        return is_same_if and bool(self.branches and other.branches) and self.branches[0] != other.branches[0]


def read_places(path: Path) -> dict[int, SourcePlace]:
    """Return the places of all statements of a file, by each of their lines.

    Raises:
        OSError, SyntaxError, ValueError, RecursionError, MemoryError: as of `read_tree`.
    """
    places: dict[int, SourcePlace] = {}
    tree, _ = read_tree(path)
    _take(tree.body, SourcePlace(in_loop=False, following=frozenset()), places, _find_counters(tree))
    return places


def _find_counters(scope: ast.AST, around: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the names that a function gives constants, numbers of a `range` and steps of a constant only.

    What is counted by steps may begin at any number, before the loop, but for one that each rank has its own of.

    Parameters:
        around: the same of what is around it, from where it reads the names that it gives nothing.
    """
    good: Counter[str] = Counter()
    names: Counter[str] = Counter()
    counted, begun = set[str](), Counter[str]()
    given = {node.arg for node in ast.walk(getattr(scope, "args", ast.Pass())) if isinstance(node, ast.arg)}
    for node in _own_nodes(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            good.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            good.update([node.target.id] if isinstance(node.target, ast.Name) else [])
            counted.update([node.target.id] if isinstance(node.target, ast.Name) else [])
        elif isinstance(node, ast.For | ast.AsyncFor) and isinstance(node.iter, ast.Call):
            name = last_name(node.iter.func) if isinstance(node.iter.func, ast.Attribute | ast.Name) else ""
            is_pair = name == "enumerate" and isinstance(node.target, ast.Tuple)
            target = node.target.elts[0] if is_pair and isinstance(node.target, ast.Tuple) else node.target
            if name in ("range", "enumerate", "count") and isinstance(target, ast.Name):
                good[target.id] += not any(map(_is_made_of_rank, node.iter.args))
    for statement in getattr(scope, "body", ()):
        if isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Constant):
            names_begun = (target.id for target in statement.targets if isinstance(target, ast.Name))
            begun.update(() if _is_made_of_rank(statement.value) else names_begun)
    good.update({name: begun[name] for name in counted})
    own = {name for name, count in good.items() if names[name] == count and name not in given}
    found = (around - given - names.keys()).union(own)
    # What is counted in a branch hangs on what the branch does: failures, or epochs without progress.
    steps = [
        (node.target.id, tests)
        for node, tests in _find_steps(getattr(scope, "body", []))
        if isinstance(node.target, ast.Name)
    ]
    while by_data := {name for name, tests in steps if name in found and not _all_hang_on(tests, found)}:
        found -= by_data
    return found


def _is_made_of_rank(number: ast.expr) -> bool:
    """Say whether a number is made of the rank, as `rank % 2` is: not one that a comparison gives to a rank alone."""
    tests = [node.left for node in ast.walk(number) if isinstance(node, ast.Compare)]
    compared = {id(node) for test in tests if not isinstance(test, ast.BinOp) for node in ast.walk(test)}
    names = (node for node in ast.walk(number) if isinstance(node, ast.Name | ast.Attribute))
    return any(last_name(name).endswith("rank") and id(name) not in compared for name in names)


def _find_steps(statements: list[ast.stmt], tests: _Tests = ()) -> Iterator[tuple[ast.AugAssign, _Tests]]:
    """Give the `+=` of a function, with the conditions of the branches around each."""
    for statement in statements:
        if isinstance(statement, ast.AugAssign):
            yield statement, tests
        elif not isinstance(statement, SCOPES):
            for body, may_be_left_out in _bodies(statement):
                yield from _find_steps(body, _tests_around(statement, tests) if may_be_left_out else tests)


def _tests_around(branching: ast.stmt, tests: _Tests) -> _Tests:
    return (*tests, branching.test if isinstance(branching, ast.If) else None)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Give the nodes of a function, or of a module, without those of the functions and classes in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, SCOPES):
            yield from _own_nodes(node)


def _is_fixed(loop: ast.stmt, counters: frozenset[str]) -> bool:
    """Say whether a loop is one over a `range` of constants."""
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "range":
        return False
    return all(isinstance(arg, ast.Constant) or _hangs_on(arg, counters) for arg in call.args)


def _is_endless(loop: ast.stmt) -> bool:
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and bool(loop.test.value)


def _hangs_on(test: ast.expr, counters: frozenset[str]) -> bool:
    """Say whether an expression uses counters, and neither other names nor calls."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return (
        bool(names) and names <= counters and not any(isinstance(n, ast.Call | ast.Attribute) for n in ast.walk(test))
    )


def _all_hang_on(tests: _Tests, counters: frozenset[str]) -> bool:
    return all(test is not None and _hangs_on(test, counters) for test in tests)


def _rank_names(test: ast.expr) -> list[bool]:
    """Say of each name in an expression whether it is that of a rank, as in `rank != 0` and `dist.get_rank() == 0`."""
    bases = {id(node.value) for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(test)
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in bases
    ]
    return [_OF_RANK.fullmatch(name) is not None for name in names]


def _hangs_on_rank(test: ast.expr) -> bool:
    names = _rank_names(test)
    return bool(names) and all(names)


class _Way(NamedTuple):
    """A statement that leaves the round of the loop around it, or the function."""

    line: int
    kind: BranchKind
    is_counted: bool  # all conditions that it depends on hang on counters
    is_by_rank: bool  # all of them hang on which rank it is
    names_rank: bool  # one of them does, be it among other things


def _take(
    statements: list[ast.stmt], after: SourcePlace, places: dict[int, SourcePlace], counters: frozenset[str]
) -> None:
    """Add the places of statements that follow one another, given what follows the last of them."""
    following = after.following
    of_each = (tuple(_find_ways(statement, counters)) for statement in statements)
    ways_before = [*accumulate(of_each, initial=tuple[_Way, ...]())]
    for at, statement in reversed([*enumerate(statements)]):
        place = _with_ways(replace(after, following=following), ways_before[at])
        own = _find_counters(statement, counters) if isinstance(statement, SCOPES) else counters
        if isinstance(statement, SCOPES):
            lines = (node.lineno for node in ast.walk(statement) if isinstance(node, ast.Yield | ast.YieldFrom))
            inside = SourcePlace(in_loop=False, following=frozenset(), yields=min(lines, default=0))
        elif isinstance(statement, _LOOPS):
            loop = statement.lineno, statement.body[-1].end_lineno or statement.body[-1].lineno
            # The call of a later round is led past by what comes after it in the loop, too.
            later = [
                way for one in statement.body for way in _find_ways(one, counters) if way.kind != BranchKind.CONTINUE
            ]
            inside = replace(
                _with_ways(place, later),
                in_loop=True,
                following=frozenset(),
                loops=(loop, *after.loops),
                fixed_loops=(*after.fixed_loops, *([loop[0]] if _is_fixed(statement, counters) else [])),
                endless_loops=(*after.endless_loops, *([loop[0]] if _is_endless(statement) else [])),
            )
        else:
            inside = place
        if isinstance(statement, ast.With | ast.AsyncWith):
            if any(_is_suppressing(item.context_expr) for item in statement.items):
                inside = replace(inside, ways_past=(*inside.ways_past, (statement.lineno, BranchKind.SUPPRESS)))
            place = replace(place, block=(statement.body[0].lineno, statement.end_lineno or statement.lineno))
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            places[line] = place
        for body, may_be_left_out in _bodies(statement):
            branch = body[0].lineno, body[-1].end_lineno or body[-1].lineno
            within = replace(inside, branches=(branch, *inside.branches)) if may_be_left_out else inside
            if isinstance(statement, ast.If | ast.Match):
                within = replace(within, conditions=(statement.lineno, *within.conditions))
                if isinstance(statement, ast.If) and _hangs_on(statement.test, counters):
                    within = replace(within, counted=(statement.lineno, *within.counted))
                if isinstance(statement, ast.If) and _hangs_on_rank(statement.test):
                    within = replace(within, by_rank=(statement.lineno, *within.by_rank))
                if isinstance(statement, ast.If) and any(_rank_names(statement.test)):
                    within = replace(within, naming_rank=(statement.lineno, *within.naming_rank))
            elif isinstance(statement, ast.Try) and body is statement.body:
                kind = BranchKind.RETRY if _is_attempt(statement) and inside.in_loop else BranchKind.HANDLER
                caught = [
                    (handler.lineno, kind)
                    for handler in statement.handlers
                    if not isinstance(handler.body[-1], ast.Raise)
                ]
                within = replace(within, ways_past=tuple(dict.fromkeys((*within.ways_past, *caught))))
            elif isinstance(statement, ast.Try) and body is statement.finalbody:
                within = replace(within, handler=(body[0].lineno, True))
            elif isinstance(statement, ast.Try) and body is not statement.body and body is not statement.orelse:
                within = replace(within, handler=(_line_of_handler(statement, body), False))
            if isinstance(body[-1], _LEAVING):
                within = replace(within, following=frozenset())
            if isinstance(statement, ast.Try) and body is not statement.finalbody:
                ends = (*(statement.orelse if body is statement.body else ()), *statement.finalbody)
                within = replace(within, following=within.following.union(*(_calls(end) for end in ends)))
            _take(body, within, places, own)
        if not isinstance(statement, SCOPES):
            following |= frozenset(_calls(statement))


def _bodies(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], bool]]:
    """Give the blocks of a statement, and whether the program may leave them out where it comes to the statement."""
    for name in _BODIES:
        if body := getattr(statement, name, None):
            yield body, isinstance(statement, ast.If)
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body, True


def _line_of_handler(statement: ast.Try, body: list[ast.stmt]) -> int:
    return next(handler.lineno for handler in statement.handlers if handler.body is body)


def _with_ways(place: SourcePlace, ways: Sequence[_Way]) -> SourcePlace:
    return replace(
        place,
        ways_past=tuple(dict.fromkeys((*place.ways_past, *((way.line, way.kind) for way in ways)))),
        counted=tuple(dict.fromkeys((*place.counted, *(way.line for way in ways if way.is_counted)))),
        by_rank=tuple(dict.fromkeys((*place.by_rank, *(way.line for way in ways if way.is_by_rank)))),
        naming_rank=tuple(dict.fromkeys((*place.naming_rank, *(way.line for way in ways if way.names_rank)))),
    )


def _find_ways(
    statement: ast.stmt, counters: frozenset[str], *, in_loop: bool = False, tests: _Tests = ()
) -> Iterator[_Way]:
    """Give where, in the branches of a statement, the round of the loop around it, or the function, is left."""
    if isinstance(statement, SCOPES):
        return
    loop = in_loop or isinstance(statement, _LOOPS)
    for body, may_be_left_out in _bodies(statement):
        around = _tests_around(statement, tests) if may_be_left_out else tests
        for inner in body:
            leaves = isinstance(inner, ast.Return) or (isinstance(inner, ast.Continue | ast.Break) and not loop)
            leaves |= isinstance(inner, ast.Raise) and _is_exit(inner)
            if leaves and around:
                yield _Way(
                    inner.lineno,
                    BranchKind(type(inner).__name__.lower()),
                    _all_hang_on(around, counters),
                    all(test is not None and _hangs_on_rank(test) for test in around),
                    any(test is not None and any(_rank_names(test)) for test in around),
                )
            else:
                yield from _find_ways(inner, counters, in_loop=loop, tests=around)


def _is_attempt(statement: ast.Try) -> bool:
    """Say whether success leaves the loop around a `try`, so that its handlers lead to another attempt."""
    leaves = (statement.orelse or statement.body)[-1]
    return isinstance(leaves, ast.Return | ast.Break)


def _is_suppressing(context: ast.expr) -> bool:
    """Say whether a `with` ends what raises in it, and goes on: `contextlib.suppress`."""
    called = context.func if isinstance(context, ast.Call) else None
    return isinstance(called, ast.Attribute | ast.Name) and last_name(called) == "suppress"


def _is_exit(statement: ast.Raise) -> bool:
    """Say whether a statement ends the program: `raise SystemExit`, with or without a status."""
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return isinstance(raised, ast.Name) and raised.id == SystemExit.__name__


def _calls(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield last_name(node.func), node.lineno
