"""Find where ranks diverge: compare the collectives that each issues in a function, group by group."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dtprof.lint.rank_steps import BRANCH, BREAK, LOOP, OP, RETURN, Condition, Token, Tokens
from dtprof.lint.rank_values import GLOBAL, NUM_RANKS, truth

Shape = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first operation of a group that ranks do not issue alike."""

    operation: Token
    condition: Condition
    group: str
    ranks: tuple[int, ...]  # of the imagined job, that issue it
    others: tuple[int, ...]
    instead: Token | None  # what the others issue there


def find_divergences(by_rank: list[Tokens]) -> Iterator[Divergence]:
    """Yield the first divergence of each group."""
    groups: dict[str, frozenset[int] | None] = {}
    for tokens in by_rank:
        for token in tokens:
            for operation in token.operations():
                groups.setdefault(operation.group, operation.members)
    for group, members in groups.items():
        ranks = [rank for rank in range(NUM_RANKS) if members is None or rank in members]
        projected = {rank: _project(by_rank[rank], group) for rank in ranks}
        shapes = {rank: _shape(tokens) for rank, tokens in projected.items()}
        counted = Counter(shapes.values())
        if len(counted) < 2:
            continue
        usual = counted.most_common(1)[0][0]
        typical = next(rank for rank in ranks if shapes[rank] == usual)
        for rank in ranks:
            if shapes[rank] == usual:
                continue
            divergence = _first_difference(projected[rank], projected[typical])
            if divergence is None:
                continue
            mine, theirs = divergence
            is_mine = mine is not None
            issued = mine or theirs
            if issued is None:
                continue
            condition = _cause(issued, theirs if is_mine else None)
            if condition is None or _is_excused(condition, group, members):
                continue
            own = tuple(other for other in ranks if shapes[other] == shapes[rank])
            rest = tuple(other for other in ranks if shapes[other] == usual)
            yield Divergence(
                operation=issued,
                condition=condition,
                group=group,
                ranks=own if is_mine else rest,
                others=rest if is_mine else own,
                instead=theirs if is_mine else None,
            )
            break


def find_order(by_rank: list[Tokens]) -> tuple[Token, Token, Condition] | None:
    """Return two operations of two groups that ranks of both issue in opposite orders."""
    flat = [[operation for token in tokens for operation in token.operations()] for tokens in by_rank]
    orders = [[(token.group, token.members) for token in tokens] for tokens in flat]
    for rank in range(1, NUM_RANKS):
        if Counter(orders[rank]) != Counter(orders[0]) or orders[rank] == orders[0]:
            continue
        for mine, theirs in zip(flat[rank], flat[0], strict=True):
            both = (mine.members or frozenset(range(NUM_RANKS))) & (theirs.members or frozenset(range(NUM_RANKS)))
            are_members_known = all(token.members is not None or not token.group for token in (mine, theirs))
            cause = _cause(mine, theirs)
            if mine.group != theirs.group and are_members_known and {0, rank} <= both and cause is not None:
                return mine, theirs, cause
    return None


def _project(tokens: Tokens, group: str) -> Tokens:
    """Return the steps that concern one group."""
    found = []
    for token in tokens:
        if token.kind == OP:
            if token.group == group:
                found.append(token)
        elif token.kind in (BREAK, RETURN):
            found.append(token)
        else:
            inner = tuple(_project(part, group) for part in token.inner)
            if any(inner):
                found.append(
                    Token(
                        token.kind, token.name, token.group, token.members, token.place, None, token.conditions, inner
                    )
                )
    return _without_ends(tuple(found))


def _without_ends(tokens: Tokens) -> Tokens:
    """Drop the ends of a loop in which, and after which, nothing is issued."""
    if any(token.issues for token in tokens):
        return tokens
    return tuple(token for token in tokens if token.returns)


def _shape(tokens: Tokens) -> Shape:
    """Return the structure that must agree on all members, up to the last operation."""
    last = max((i for i, token in enumerate(tokens) if token.issues), default=-1)
    return tuple(_shape_of(token) for token in tokens[: last + 1])


def _shape_of(token: Token) -> object:
    if token.kind == OP:
        return token.name
    if token.kind in (BREAK, RETURN):
        return token.kind
    keep = token.issues or token.returns
    inner = tuple(tuple(_shape_of(one) for one in part) if keep else () for part in token.inner)
    return token.kind, token.name, inner


def _first_difference(mine: Tokens, theirs: Tokens) -> tuple[Token | None, Token | None] | None:
    """Return the first operations that differ, of the one rank and of the other; None for an absent one."""
    for i in range(max(len(mine), len(theirs))):
        a = mine[i] if i < len(mine) else None
        b = theirs[i] if i < len(theirs) else None
        if a is not None and b is not None and _shape_of(a) == _shape_of(b):
            continue
        if a is not None and b is not None and a.kind == b.kind and a.kind in (LOOP, BRANCH) and a.name == b.name:
            for one, other in zip(a.inner, b.inner, strict=False):
                if found := _first_difference(one, other):
                    return found
        return _first(mine[i:], theirs[i:])
    return None


def _first(mine: Tokens, theirs: Tokens) -> tuple[Token | None, Token | None] | None:
    a = next((op for token in mine for op in token.operations()), None)
    b = next((op for token in theirs for op in token.operations()), None)
    ends_mine = bool(mine) and mine[0].kind in (BREAK, RETURN)
    ends_theirs = bool(theirs) and theirs[0].kind in (BREAK, RETURN)
    if ends_mine and not ends_theirs:
        return (None, b) if b else None
    if ends_theirs and not ends_mine:
        return (a, None) if a else None
    if a is None and b is None:
        return None
    if (
        mine
        and theirs
        and a is not None
        and b is not None
        and a.name == b.name
        and mine[0].kind == theirs[0].kind == BRANCH
    ):
        return None  # the same operation under conditions that both sides may decide alike
    # An operation outside any condition is reported where the other side lacks it.
    if a is not None and b is not None and a.is_sure and not b.is_sure:
        return None, b
    return a, b


def _cause(operation: Token, instead: Token | None) -> Condition | None:
    """Return the innermost condition that differs between ranks."""
    for token in (operation, instead):
        for condition in reversed(token.conditions if token is not None else ()):
            if truth(condition.value) is not None or condition.how == "loop":
                return condition
    return None


def _is_excused(condition: Condition, group: str, members: frozenset[int] | None) -> bool:
    """Say whether the group may consist of exactly the ranks for which the condition holds."""
    if not group or members is not None or condition.value.of_data:
        return False
    if condition.value.membership:
        return True
    if condition.value.scope != GLOBAL:
        return condition.value.scope != group
    decided = truth(condition.value)
    return decided is None or min(sum(decided), NUM_RANKS - sum(decided)) != 1
