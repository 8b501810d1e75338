"""The steps that ranks take in a function: operations, and the loops and conditions that all ranks share."""

import ast
import builtins
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dtprof.lint import vocabulary
from dtprof.lint.lint_findings import SourceLocation
from dtprof.lint.rank_values import Value
from dtprof.lint.syntax import TryStatement

OP, LOOP, BRANCH, BREAK, RETURN = "op", "loop", "branch", "break", "return"


@dataclass(frozen=True)
class Condition:
    """A condition that differs between ranks, and how a collective depends on it."""

    node: ast.stmt | ast.expr = field(compare=False)
    value: Value = field(compare=False)
    place: SourceLocation
    how: str  # branch, exit, loop; caught: ranks agree, but exceptions raised there are suppressed
    exit: str = ""  # return, continue, break, raise


@dataclass(frozen=True, eq=False)
class Token:
    """One step of a rank: an operation, a loop, a branch, a break or a return."""

    kind: str
    name: str = ""  # of an operation; the text of a condition
    group: str = ""
    members: frozenset[int] | None = None
    place: SourceLocation | None = None
    called_from: SourceLocation | None = None
    conditions: tuple[Condition, ...] = ()
    inner: tuple[tuple["Token", ...], ...] = ()

    @functools.cached_property
    def issues(self) -> bool:
        """Say whether it contains an operation."""
        return self.kind == OP or any(token.issues for part in self.inner for token in part)

    @property
    def is_sure(self) -> bool:
        """Say whether all ranks reach the operation, under no condition that differs."""
        return all(condition.how == "caught" for condition in self.conditions)

    @functools.cached_property
    def returns(self) -> bool:
        """Say whether it may end the function."""
        return self.kind == RETURN or any(token.returns for part in self.inner for token in part)

    def operations(self) -> Iterator["Token"]:
        """Yield the operations in it."""
        if self.kind == OP:
            yield self
        for part in self.inner:
            for token in part:
                yield from token.operations()


Tokens = tuple[Token, ...]
Rest = Callable[[], Tokens]


def whole(text: str, sides: tuple[Tokens, ...]) -> Tokens:
    return (Token(BRANCH, name=text, inner=sides),) if any(sides) else ()


def without_replicas(tokens: Tokens) -> Tokens:
    """Drop the operations that replicated models issue by themselves."""
    found = []
    for token in tokens:
        if token.kind == OP:
            if token.name not in vocabulary.OF_REPLICAS:
                found.append(token)
        elif any(inner := tuple(map(without_replicas, token.inner))) or not token.inner:
            found.append(replace(token, inner=inner))
    return tuple(found)


def without_creations(tokens: Tokens, *, under_condition: bool = False) -> Tokens:
    """Drop the operations that functions issue once: joining the job, and creating missing groups."""
    found = []
    for token in tokens:
        if token.kind == OP:
            if token.name not in vocabulary.ONCE and not (under_condition and token.name in vocabulary.CREATIONS):
                found.append(token)
            continue
        inner = tuple(
            without_creations(p, under_condition=under_condition or token.kind == BRANCH) for p in token.inner
        )
        if any(inner) or not token.inner:
            found.append(replace(token, inner=inner))
    return tuple(found)


def called_at(token: Token, place: SourceLocation, conditions: tuple[Condition, ...]) -> Token:
    """Return a step of a called function with the place and conditions of the call."""
    return Token(
        token.kind,
        token.name,
        token.group if not token.group or token.members is not None else f"{token.group} of {place.file}:{place.line}",
        token.members,
        token.place,
        place,
        conditions,
        tuple(tuple(called_at(one, place, conditions) for one in part) for part in token.inner),
    )


def raises_on_some_ranks(node: ast.Raise, conditions: tuple[Condition, ...]) -> bool:
    """Say whether a raise is meant for some ranks: it is directly under a condition on the rank.

    Every other raise refuses wrong arguments, which all ranks share.
    """
    if not conditions or conditions[-1].how != "branch" or not isinstance(conditions[-1].node, ast.If):
        return False
    value = conditions[-1].value
    branch = conditions[-1].node
    return not (value.assumed or value.of_data) and any(node is child for child in (*branch.body, *branch.orelse))


def catches(handler: ast.ExceptHandler, node: ast.Raise) -> bool:
    """Say whether a handler catches a raised exception, by their names."""
    if handler.type is None:
        return True
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return raised is not None and any(_is_kind_of(ast.unparse(raised), ast.unparse(type_)) for type_ in types)


def _is_kind_of(raised: str, caught: str) -> bool:
    if raised == caught or caught in ("Exception", "BaseException"):
        return True
    own, other = getattr(builtins, raised, None), getattr(builtins, caught, None)
    return isinstance(own, type) and isinstance(other, type) and issubclass(own, other)


def trips(node: ast.For | ast.AsyncFor | ast.While, value: Value, rank: int) -> str:
    """Return in words how often a rank iterates in a loop."""
    known = value.known[rank] if value.known is not None else rank == 0
    is_iterable = isinstance(node, ast.For | ast.AsyncFor) and isinstance(known, list | tuple | range | set | frozenset)
    return f"{len(known) if is_iterable else known!r} times"  # type: ignore[arg-type]


def leaving(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the statements that may leave a block: return, continue, break; not those that only leave an inner loop."""
    for node in body:
        if isinstance(node, ast.Return | ast.Continue | ast.Break):
            yield type(node).__name__.lower()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield from (word for word in leaving(node.body) if word == "return")
            yield from leaving(node.orelse)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield from leaving(case.body)
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from leaving(getattr(node, block, []))


def turns_off(node: ast.expr) -> bool:
    """Say whether a context manager may turn off the synchronisation of a model."""
    if isinstance(node, ast.IfExp):
        return turns_off(node.body) or turns_off(node.orelse)
    func = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Call) and ast.unparse(func).rpartition(".")[2] == "Join":
        return True
    return isinstance(func, ast.Attribute) and func.attr in ("no_sync", "join", "accumulate", "no_backward_sync")


def swallows(node: ast.With | ast.AsyncWith | TryStatement) -> bool:
    """Say whether a block of one statement suppresses its exception: the statement may be meant to raise."""
    if len(node.body) != 1 or not isinstance(node.body[0], ast.Expr | ast.Assign):
        return False
    if isinstance(node, ast.With | ast.AsyncWith):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return any(ast.unparse(call.func).rpartition(".")[2] in ("suppress", "raises") for call in calls)
    raising = any(isinstance(one, ast.Raise) for handler in node.handlers for one in ast.walk(handler))
    return bool(node.handlers) and not raising


def is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def places_of(*tokens: Token | None) -> tuple[SourceLocation, ...]:
    """Return the lines that records of the operations name."""
    return tuple(
        place
        for token in tokens
        if token is not None
        for place in (token.place, token.called_from)
        if place is not None
    )


def text_of(operation: Token, group: str) -> str:
    """Return an operation in words."""
    text = f"{operation.name} of {group}" if group else operation.name
    return f"{text} (called here)" if operation.called_from is not None else text
