"""Follow one rank through the statements of a function, and collect the collectives that it issues."""

import ast
from collections.abc import Callable, Iterator, Sequence

from dtprof.lint import vocabulary
from dtprof.lint.lint_findings import SourceLocation
from dtprof.lint.rank_steps import (
    BREAK,
    LOOP,
    OP,
    RETURN,
    Condition,
    Rest,
    Token,
    Tokens,
    called_at,
    catches,
    is_true,
    leaving,
    raises_on_some_ranks,
    swallows,
    trips,
    turns_off,
    whole,
    without_creations,
    without_replicas,
)
from dtprof.lint.rank_values import Value, truth
from dtprof.lint.scopes import Scope
from dtprof.lint.sources import Function, last_name
from dtprof.lint.syntax import TRY_STATEMENTS, TryStatement

MAX_TOKENS = 4000
"""Limit of steps in one function; larger functions are not compared."""
_COMPOUND = (
    *(ast.Return, ast.Continue, ast.Break, ast.If, ast.For, ast.AsyncFor, ast.While),
    *(*TRY_STATEMENTS, ast.With, ast.AsyncWith, ast.Match),
)


class TooManyPathsError(Exception):
    """A function has too many paths to compare."""


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield node
        waiting += reversed(list(ast.iter_child_nodes(node)))


def place_of(function: Function, node: ast.stmt | ast.expr | ast.ExceptHandler, text: str = "") -> SourceLocation:
    """Return the place of a node."""
    return SourceLocation(file=str(function.module.path), line=node.lineno, column=node.col_offset + 1, text=text)


class Walker:
    """Follows one rank through the statements of a function."""

    def __init__(self, issued: Callable[[Function], Tokens], function: Function, scope: Scope, rank: int) -> None:
        """Prepare to follow `rank`; `issued` returns the steps of a called function."""
        self._issued = issued
        self._function = function
        self._scope = scope
        self._rank = rank
        self._left = MAX_TOKENS
        self._caught: dict[int, Callable[[tuple[Condition, ...]], Tokens]] = {}

    def block(
        self, body: Sequence[ast.stmt], at: int, after: Rest, conditions: tuple[Condition, ...], *, in_loop: bool
    ) -> Tokens:
        """Return the steps from a statement to the end of the function."""
        plain: list[Token] = []
        while at < len(body) and (found := self._plain(body[at], conditions)) is not None:
            plain += found
            at += 1
        self._left -= 1
        if self._left < 0:
            raise TooManyPathsError
        if at == len(body):
            return (*plain, *after())
        node = body[at]

        def rest(more: tuple[Condition, ...] = ()) -> Tokens:
            return self.block(body, at + 1, after, (*conditions, *more), in_loop=in_loop)

        return (*plain, *self._compound(node, rest, conditions, in_loop=in_loop))

    def _plain(self, node: ast.stmt, conditions: tuple[Condition, ...]) -> Tokens | None:
        """Return the steps of a statement that always leads to the next one; None for others."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return ()
        if isinstance(node, ast.Raise):
            return None if raises_on_some_ranks(node, conditions) else ()
        if isinstance(node, _COMPOUND):
            return None
        return self._parts(node, conditions)

    def _parts(self, node: ast.stmt, conditions: tuple[Condition, ...]) -> Tokens:
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return tuple(token for part in parts for token in self.expression(part, conditions))

    def _compound(
        self, node: ast.stmt, rest: Callable[..., Tokens], conditions: tuple[Condition, ...], *, in_loop: bool
    ) -> Tokens:
        """Return the steps from a statement that may lead elsewhere than to the next one."""
        if isinstance(node, ast.Raise) and id(node) in self._caught:
            return (*self._parts(node, conditions), *self._caught[id(node)](conditions))
        if isinstance(node, ast.Return | ast.Raise):
            found = self._parts(node, conditions)
            return (*found, Token(RETURN)) if in_loop else found
        if isinstance(node, ast.Continue):
            return ()
        if isinstance(node, ast.Break):
            return (Token(BREAK),)
        if isinstance(node, ast.If):
            return self._branch(node, rest, conditions, in_loop=in_loop)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return (*self._loop(node, conditions), *self.block(node.orelse, 0, rest, conditions, in_loop=in_loop))
        if isinstance(node, TryStatement):
            self._catch(node, rest, in_loop=in_loop)
            after = [*node.orelse, *node.finalbody]

            def behind() -> Tokens:
                return self.block(after, 0, rest, conditions, in_loop=in_loop)

            return self.block(node.body, 0, behind, self._inside(node, conditions), in_loop=in_loop)
        if isinstance(node, ast.With | ast.AsyncWith):
            found = tuple(token for item in node.items for token in self.expression(item.context_expr, conditions))
            if any(turns_off(item.context_expr) for item in node.items):
                inner = self.block(node.body, 0, tuple, conditions, in_loop=in_loop)
                return (*found, *without_replicas(inner), *rest())
            return (*found, *self.block(node.body, 0, rest, self._inside(node, conditions), in_loop=in_loop))
        if isinstance(node, ast.Match):
            sides = tuple(self.block(case.body, 0, tuple, conditions, in_loop=in_loop) for case in node.cases)
            return (*whole(ast.unparse(node.subject), sides), *rest())
        return rest()

    def _inside(
        self, node: ast.With | ast.AsyncWith | TryStatement, conditions: tuple[Condition, ...]
    ) -> tuple[Condition, ...]:
        """Return the conditions inside a block."""
        if not swallows(node):
            return conditions
        return (*conditions, Condition(node, Value(), place_of(self._function, node), "caught"))

    def _catch(self, node: TryStatement, rest: Callable[..., Tokens], *, in_loop: bool) -> None:
        """Register the raises of a block that its handlers catch: they continue in the handler."""

        def through(handler: ast.ExceptHandler) -> Callable[[tuple[Condition, ...]], Tokens]:
            body = [*handler.body, *node.finalbody]
            return lambda conditions: self.block(body, 0, rest, conditions, in_loop=in_loop)

        for one in (inner for statement in node.body for inner in ast.walk(statement)):
            handler = next((h for h in node.handlers if catches(h, one)), None) if isinstance(one, ast.Raise) else None
            if handler is not None:
                self._caught[id(one)] = through(handler)

    def _branch(
        self, node: ast.If, rest: Callable[..., Tokens], conditions: tuple[Condition, ...], *, in_loop: bool
    ) -> Tokens:
        before = self.expression(node.test, conditions)
        value = self._scope.tests.get(id(node), Value())
        decided = truth(value)
        text = ast.unparse(node.test)
        leaves = {word for side in (node.body, node.orelse) for word in leaving(side)}
        if decided is not None:
            place = place_of(self._function, node.test, text)
            inside = Condition(node, value, place, "branch")
            if any(
                isinstance(one, ast.Raise) and raises_on_some_ranks(one, (inside,))
                for one in (*node.body, *node.orelse)
            ):
                leaves.add("raise")
            later: tuple[Condition, ...] = ()
            if leaves:
                later = (Condition(node, value, place, "exit", min(leaves)),)
            side = node.body if decided[self._rank] else node.orelse
            return (*before, *self.block(side, 0, lambda: rest(later), (*conditions, inside), in_loop=in_loop))
        if leaves:
            sides = tuple(self.block(side, 0, rest, conditions, in_loop=in_loop) for side in (node.body, node.orelse))
            return (*before, *whole(text, sides))
        sides = tuple(self.block(side, 0, tuple, conditions, in_loop=in_loop) for side in (node.body, node.orelse))
        return (*before, *whole(text, sides), *rest())

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, conditions: tuple[Condition, ...]) -> Tokens:
        over = node.test if isinstance(node, ast.While) else node.iter
        value = self._scope.tests.get(id(node), Value())
        often = ""
        if value.splits:
            condition = Condition(node, value, place_of(self._function, over, ast.unparse(over)), "loop")
            conditions = (*conditions, condition)
            often = trips(node, value, self._rank)
        before = self.expression(over, conditions)
        body = self.block(node.body, 0, tuple, conditions, in_loop=True)
        if not any(token.issues or token.returns for token in body):
            body = ()
        loop = (Token(LOOP, name=often, inner=(body,), conditions=conditions),) if body else ()
        return (*before, *loop)

    def expression(self, node: ast.expr, conditions: tuple[Condition, ...]) -> Tokens:
        """Return the steps of evaluating an expression."""
        if isinstance(node, ast.Lambda):
            return ()
        if isinstance(node, ast.IfExp):
            value = self._scope.test(node.test)
            decided = truth(value)
            if decided is not None:
                place = place_of(self._function, node.test, ast.unparse(node.test))
                chosen = node.body if decided[self._rank] else node.orelse
                return self.expression(chosen, (*conditions, Condition(node, value, place, "branch")))
            sides = tuple(self.expression(side, conditions) for side in (node.body, node.orelse))
            return (*self.expression(node.test, conditions), *whole(ast.unparse(node.test), sides))
        if isinstance(node, ast.BoolOp):
            return self._short_circuit(node, conditions)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            before = tuple(t for generator in node.generators for t in self.expression(generator.iter, conditions))
            inner = tuple(token for part in parts for token in self.expression(part, conditions))
            return (*before, Token(LOOP, inner=(inner,))) if inner else before
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if isinstance(node, ast.Call):
            parts += [word.value for word in node.keywords]
        found = tuple(token for part in parts for token in self.expression(part, conditions))
        return (*found, *self._call(node, conditions)) if isinstance(node, ast.Call) else found

    def _short_circuit(self, node: ast.BoolOp, conditions: tuple[Condition, ...]) -> Tokens:
        found: Tokens = ()
        for part in node.values:
            found = (*found, *self.expression(part, conditions))
            value = self._scope.test(part)
            decided = truth(value)
            if decided is not None:
                conditions = (
                    *conditions,
                    Condition(node, value, place_of(self._function, part, ast.unparse(part)), "branch"),
                )
                if decided[self._rank] != isinstance(node.op, ast.And):
                    break
        return found

    def issues_itself(self, node: ast.Call) -> bool:
        """Say whether a call is a collective, rather than a function of the files that issues some."""
        name = self._scope.called(node)
        if name and vocabulary.collective_of(name) is not None:
            return True
        return bool(self._method(node, place_of(self._function, node), ()))

    def _call(self, node: ast.Call, conditions: tuple[Condition, ...]) -> Tokens:
        function = self._scope.target(node)
        name = self._scope.called(node)
        known = vocabulary.collective_of(name) if name else None
        place = place_of(self._function, node)
        if known is not None:
            if any(
                word.arg in ("use_local_synchronization", "no_dist") and is_true(word.value) for word in node.keywords
            ):
                return ()
            group, members = ("", None) if known.by_all else self._scope.group(node, known.group_at)
            return (Token(OP, known.op, group, members, place, None, conditions),)
        if function is not None:
            if function is self._function or _is_generator(function):
                return ()
            issued = without_creations(self._issued(function))
            return tuple(called_at(token, place, conditions) for token in issued)
        return self._method(node, place, conditions)

    def _method(self, node: ast.Call, place: SourceLocation, conditions: tuple[Condition, ...]) -> Tokens:
        func = node.func
        if isinstance(func, ast.Name):
            wrapped = self._scope.value(func).wrapped
            return (Token(OP, f"{wrapped} forward", "", None, place, None, conditions),) if wrapped else ()
        if not isinstance(func, ast.Attribute):
            return ()
        receiver = last_name(func.value)
        op, group = None, ""
        if func.attr == vocabulary.BACKWARD and self._scope.wrapped:
            op = vocabulary.BACKWARD
        elif receiver in vocabulary.ACCELERATORS and func.attr in vocabulary.ACCELERATOR_METHODS:
            op = vocabulary.ACCELERATOR_METHODS[func.attr]
        elif func.attr in vocabulary.METHODS and receiver not in ("np", "numpy", "threading", "mp"):
            op, group = vocabulary.METHODS[func.attr], ""
        elif func.attr in vocabulary.GROUP_METHODS and vocabulary.GROUP_RECEIVER.search(receiver):
            op, group = vocabulary.GROUP_METHODS[func.attr], ast.unparse(func.value)
        elif self._scope.value(func).wrapped:
            op = f"{self._scope.value(func).wrapped} forward"
        elif func.attr in ("state_dict", "clip_grad_norm_") and self._scope.value(func.value).wrapped == "fsdp":
            op = func.attr
        return (Token(OP, op, group, None, place, None, conditions),) if op else ()


def _is_generator(function: Function) -> bool:
    """Say whether a function runs only when iterated; a context manager runs where it is entered."""
    if function.node is None:
        return False
    names = {ast.unparse(one).rpartition(".")[2] for one in function.node.decorator_list}
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(function))
    return yields and not names & {"contextmanager", "asynccontextmanager"}
