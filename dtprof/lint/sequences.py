"""The collectives that each rank issues in a function, in order; loops and conditions shared by all ranks stay whole.

A called function of the files counts with the collectives that it issues.
"""

import ast
import functools
from collections.abc import Iterator

from dtprof.lint import vocabulary
from dtprof.lint.rank_steps import OP, Condition, Token, Tokens
from dtprof.lint.rank_values import NUM_RANKS, Value, truth
from dtprof.lint.scopes import Scope, Scopes
from dtprof.lint.sources import Function, last_name
from dtprof.lint.syntax import TryStatement
from dtprof.lint.walker import TooManyPathsError, Walker, own_nodes, place_of

MAX_INLINED = 60


class Sequences:
    """Finds the collectives that functions issue, and remembers them."""

    def __init__(self, scopes: Scopes) -> None:
        """Start without results."""
        self._scopes = scopes
        self._issued: dict[Function, Tokens] = {}
        self._running: set[Function] = set()
        self._calls: list[tuple[Scope, ast.Call, Function]] = []

    @functools.cached_property
    def issuing(self) -> frozenset[Function]:
        """The functions that may issue collectives, themselves or through others."""
        calls: dict[Function, set[Function]] = {}
        found: set[Function] = set()
        for module in self._scopes.program.modules:
            for function in module.everything:
                scope = self._scopes.known(function)
                if scope is None:
                    continue
                walker = Walker(self.issued, function, scope, 0)
                own = calls.setdefault(function, set())
                for node in own_nodes(function):
                    if not isinstance(node, ast.Call):
                        continue
                    if walker.issues_itself(node):
                        found.add(function)
                    elif (target := scope.target(node)) is not None:
                        own.add(target)
                        self._calls.append((scope, node, target))
        grown = True
        while grown:
            more = {function for function, own in calls.items() if function not in found and own & found}
            found |= more
            grown = bool(more)
        return frozenset(found)

    def issued(self, function: Function) -> Tokens:
        """Return the operations a function issues for its callers: on rank 0, or on rank 1 if rank 0 issues none."""
        if function in self._issued:
            return self._issued[function]
        if function in self._running or function not in self.issuing:
            return ()
        self._running.add(function)
        try:
            found = self.of_rank(function, 0)
            if not found:
                found = self.of_rank(function, 1)
        except (TooManyPathsError, RecursionError):
            found = ()
        self._running.discard(function)
        count = sum(1 for token in found for _ in token.operations())
        if count > MAX_INLINED:
            first = next(operation for token in found for operation in token.operations())
            found = (Token(OP, name=f"{function.name}()", place=first.place),)
        self._issued[function] = found
        return found

    def issues(self, function: Function, call: ast.Call) -> bool:
        """Say whether a call in a function is a collective itself."""
        scope = self._scopes.known(function)
        return scope is not None and Walker(self.issued, function, scope, 0).issues_itself(call)

    def diverges(self, function: Function) -> bool:
        """Say whether ranks take different ways through a function."""
        scope = self._scopes.known(function)
        if scope is None or one_rank_condition(function) is not None:
            return scope is not None
        if any(value.splits for value in scope.tests.values()):
            return True
        for node in own_nodes(function):
            tests = [node.test] if isinstance(node, ast.IfExp) else node.values if isinstance(node, ast.BoolOp) else []
            if any(scope.test(test).splits for test in tests):
                return True
        return False

    def splits(self, function: Function, node: ast.If) -> bool:
        """Say whether a condition differs between ranks."""
        scope = self._scopes.known(function)
        return scope is not None and id(node) in scope.tests and scope.tests[id(node)].splits

    def raises_by_rank(self, function: Function, node: ast.If) -> bool:
        """Say whether a raise alone under a condition counts as one of some ranks."""
        scope = self._scopes.known(function)
        value = scope.tests.get(id(node)) if scope is not None else None
        return value is not None and value.splits and not (value.assumed or value.of_data)

    def is_called_with_own_rank(self, function: Function) -> bool:
        """Say whether a parameter with the name of a rank may be the caller's own rank, by the calls in the files."""
        names = [argument.arg for argument in function.arguments if argument.arg in vocabulary.RANK_NAMES]
        if not names:
            return True
        skipped = 1 if function.owner is not None and function.parent is not None and not function.parent.node else 0
        places = {one.arg: i - skipped for i, one in enumerate(function.arguments)}
        calls = [(scope, call) for scope, call, target in self._calls if target is function]
        for scope, call in calls:
            for name in names:
                given = next((word.value for word in call.keywords if word.arg == name), None)
                if given is None and 0 <= places[name] < len(call.args):
                    given = call.args[places[name]]
                if given is not None and scope.value(given).splits:
                    return True
        return not calls

    def of_rank(self, function: Function, rank: int) -> Tokens:
        """Return the operations that one rank issues in a function.

        Raises:
            TooManyPathsError: it has too many paths.
        """
        scope = self._scopes.known(function)
        if scope is None:
            return ()
        walker = Walker(self.issued, function, scope, rank)
        conditions: tuple[Condition, ...] = ()
        condition = one_rank_condition(function)
        if condition is not None:
            if not truth(condition.value)[rank]:  # type: ignore[index]
                return ()
            conditions = (condition,)
        return walker.block(function.body, 0, tuple, conditions, in_loop=False)

    def handlers(self, function: Function) -> Iterator[tuple[TryStatement, ast.ExceptHandler | None, Tokens]]:
        """Yield the operations of a function in its exception handlers and, with None as handler, in finally blocks."""
        scope = self._scopes.known(function)
        if scope is None:
            return
        for node in own_nodes(function):
            if isinstance(node, TryStatement):
                for handler, body in (*((one, one.body) for one in node.handlers), (None, node.finalbody)):
                    try:
                        found = Walker(self.issued, function, scope, 0).block(body, 0, tuple, (), in_loop=False)
                    except (TooManyPathsError, RecursionError):
                        continue  # too many paths
                    if found:
                        yield node, handler, found


def one_rank_condition(function: Function) -> Condition | None:
    """Return the condition of a decorator such as @rank_zero_only."""
    for decorator in function.node.decorator_list if function.node is not None else ():
        inner = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = last_name(inner)
        if name in vocabulary.ONE_RANK_DECORATORS:
            known = tuple(rank == 0 for rank in range(NUM_RANKS))
            place = place_of(function, decorator, f"@{ast.unparse(decorator)}")
            scope = "local" if "local" in name else "global"
            return Condition(decorator, Value(known=known, scope=scope), place, "branch")
    return None
