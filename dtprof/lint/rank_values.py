"""Values of expressions on each rank of a small imagined job.

A value is known rank by rank, or known to differ between ranks, or unknown: then it counts as the same on all ranks.
"""

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

NUM_RANKS = 8
GLOBAL, LOCAL = "global", "local"


@dataclass(frozen=True)
class Value:
    """The value of an expression, as far as it is known."""

    known: tuple[object, ...] | None = None  # by rank
    differs: bool = False  # between ranks, in an unknown way
    scope: str = GLOBAL  # among whom the rank counts: global, local, or the text of a group
    of_data: bool = False  # it differs because the data of ranks differ
    membership: bool = False  # it tests whether a rank belongs to a set
    assumed: bool = False  # `known` is an example of how it may differ
    group: str | None = None  # a process group: its name
    members: frozenset[int] | None = None  # of a group, where the source lists them
    wrapped: str = ""  # a model: ddp, fsdp
    unwrapped: bool = False  # a model taken out of its wrapper
    instance: object = None  # its class (sources.Class)

    @property
    def splits(self) -> bool:
        """Say whether the value differs between ranks."""
        return self.differs or (self.known is not None and any(_unlike(value, self.known[0]) for value in self.known))

    @property
    def is_plain(self) -> bool:
        """Say whether it is a number, a text or a flag."""
        return self.known is not None and all(isinstance(value, int | float | str) for value in self.known)


UNKNOWN = Value()
UNWRAPPED = Value(unwrapped=True)
WORLD = Value(group="")
_EXAMPLE = tuple(rank == 0 for rank in range(NUM_RANKS))
_COUNTER_EXAMPLE = tuple(not value for value in _EXAMPLE)


def same(value: object) -> Value:
    """Return a value that is the same on all ranks."""
    return Value(known=(value,) * NUM_RANKS)


def ranks_of(scope: str) -> Value:
    """Return the rank itself."""
    return Value(known=tuple(range(NUM_RANKS)), scope=scope)


def one_rank(scope: str) -> Value:
    """Return a flag that is true on one rank."""
    return Value(known=_EXAMPLE, scope=scope)


def truth(value: Value) -> tuple[bool, ...] | None:
    """Return on which ranks a condition holds; None where it is the same on all."""
    if not value.splits:
        return None
    if value.known is None:
        return _EXAMPLE
    decided = tuple(bool(one) for one in value.known)
    return decided if len(set(decided)) > 1 else None


def merge(values: Sequence[Value], known: tuple[object, ...] | None = None, *, differs: bool = False) -> Value:
    """Return a value computed from others, with the reasons why they differ."""
    causes = [value for value in values if value.splits]
    scopes = {value.scope for value in causes}
    scope = GLOBAL if not scopes or GLOBAL in scopes else min(scopes)
    return Value(
        known=known,
        differs=differs,
        scope=scope,
        of_data=bool(causes) and all(value.of_data for value in causes),
        membership=any(value.membership for value in causes),
        assumed=any(value.assumed for value in causes),
    )


def elementwise(function: Callable[..., object], values: Sequence[Value]) -> Value:
    """Apply a function on each rank; where that fails, the result differs if an argument does."""
    columns = [value.known for value in values if value.known is not None]
    if len(columns) == len(values):
        try:
            return merge(values, tuple(function(*row) for row in zip(*columns, strict=True)))
        except (ArithmeticError, TypeError, ValueError, LookupError, MemoryError):
            pass
    return merge(values, differs=any(value.splits for value in values))


_COMPARISONS: dict[type[ast.cmpop], Callable[[object, object], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,  # type: ignore[dict-item]
    ast.LtE: operator.le,  # type: ignore[dict-item]
    ast.Gt: operator.gt,  # type: ignore[dict-item]
    ast.GtE: operator.ge,  # type: ignore[dict-item]
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: operator.contains(b, a),  # type: ignore[arg-type]
    ast.NotIn: lambda a, b: not operator.contains(b, a),  # type: ignore[arg-type]
}
_MEMBERSHIP = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
_NEGATIVE = (ast.NotEq, ast.NotIn, ast.IsNot)
_ARITHMETIC: dict[type[ast.operator], Callable[[object, object], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: lambda a, b: _times(a, b),
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


def compare(left: Value, how: ast.cmpop, right: Value) -> Value:
    """Return the value of a comparison."""
    if not (left.splits or right.splits):
        return UNKNOWN
    membership = isinstance(how, _MEMBERSHIP)
    function = _COMPARISONS[type(how)]

    def alike(a: object, b: object) -> object:
        if isinstance(a, str) != isinstance(b, str) and {type(a), type(b)} == {int, str}:
            a, b = str(a), str(b)  # environment variables hold ranks as text
        return function(a, b)

    found = elementwise(alike, (left, right))
    if found.known is not None:
        beyond = any(_beyond(value) for value in (left, right)) and isinstance(how, ast.Eq | ast.NotEq)
        if found.splits or not beyond:
            return replace(found, membership=membership)
    if membership and isinstance(how, ast.Is | ast.IsNot) and not (left.differs or right.differs):
        return UNKNOWN
    example = _COUNTER_EXAMPLE if isinstance(how, _NEGATIVE) else _EXAMPLE
    return replace(merge((left, right), example), membership=membership, assumed=True)


def calculate(left: Value, how: ast.operator, right: Value) -> Value:
    """Return the result of arithmetic."""
    function = _ARITHMETIC.get(type(how))
    return elementwise(function, (left, right)) if function else merge((left, right), differs=_any((left, right)))


def negate(value: Value) -> Value:
    """Return `not value`."""
    decided = truth(value)
    return UNKNOWN if decided is None else replace(value, known=tuple(not value for value in decided), differs=False)


def all_or_any(values: Sequence[Value], *, conjunction: bool) -> Value:
    """Return `a and b` or `a or b`; unknown operands leave the decision to the others."""
    decided = [(value, truth(value)) for value in values]
    known_by_rank = [by_rank for _, by_rank in decided if by_rank is not None]
    if not known_by_rank:
        constant = [v for v in values if v.known is not None]
        return constant[0] if len(constant) == len(values) == 1 else UNKNOWN
    for value, by_rank in decided:
        if by_rank is None and value.known is not None and bool(value.known[0]) != conjunction:
            return UNKNOWN  # a constant decides
    combine = all if conjunction else any
    known = tuple(combine(by_rank[rank] for by_rank in known_by_rank) for rank in range(NUM_RANKS))
    return merge([value for value, by_rank in decided if by_rank is not None], known)


def _any(values: Sequence[Value]) -> bool:
    return any(value.splits for value in values)


def _beyond(value: Value) -> bool:
    """Say whether a constant is a rank beyond the imagined job."""
    one = value.known[0] if value.known is not None and not value.splits else None
    return isinstance(one, int) and not isinstance(one, bool) and one >= NUM_RANKS


def _times(a: object, b: object) -> object:
    for one in (a, b):
        if not isinstance(one, int | float) or abs(one) > 1 << 30:
            raise ValueError(one)
    return operator.mul(a, b)


def _unlike(a: object, b: object) -> bool:
    return type(a) is not type(b) or a != b
