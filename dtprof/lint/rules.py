"""Findings from divergences between ranks: the fault, its consequence, and the advice."""

import ast
from collections.abc import Iterator

from dtprof.lint import vocabulary
from dtprof.lint.exception_handlers import check_handlers
from dtprof.lint.lint_findings import LintFinding, SourceLocation
from dtprof.lint.rank_divergence import Divergence, find_divergences, find_order
from dtprof.lint.rank_steps import Condition, Token, Tokens, places_of, text_of
from dtprof.lint.rank_values import NUM_RANKS, Value, truth
from dtprof.lint.scopes import Scopes
from dtprof.lint.sequences import Sequences
from dtprof.lint.sources import Function
from dtprof.lint.walker import TooManyPathsError, own_nodes, place_of

ROOT_AT = {"broadcast": 1, "reduce": 1, "broadcast_object_list": 1}
ROOT_WORDS = ("src", "dst", "group_src", "group_dst")


def check(function: Function, scopes: Scopes, sequences: Sequences) -> Iterator[LintFinding]:
    """Yield the findings of one function."""
    yield from check_handlers(function, sequences)
    if function not in sequences.issuing:
        return
    if not sequences.diverges(function):
        if sequences.is_called_with_own_rank(function):
            yield from _arguments(function, scopes, [sequences.issued(function)] * NUM_RANKS)
        return
    try:
        by_rank = [sequences.of_rank(function, rank) for rank in range(NUM_RANKS)]
        divergences = [
            divergence
            for divergence in find_divergences(by_rank)
            if not _is_called_back(divergence, function, sequences)
        ]
        if divergences and not sequences.is_called_with_own_rank(function):
            divergences = []
        found = [_finding(function, divergence) for divergence in divergences]
        if not found and (order := find_order(by_rank)) is not None:
            found = [_order(function, *order)]
    except (TooManyPathsError, RecursionError):
        return  # too many paths to compare
    yield from found
    if sequences.is_called_with_own_rank(function):
        yield from _arguments(function, scopes, by_rank)


def _finding(function: Function, divergence: Divergence) -> LintFinding:
    condition, operation = divergence.condition, divergence.operation
    kind = _kind(condition)
    what = text_of(operation, divergence.group)
    of_data = condition.value.of_data
    where = f"`{condition.place.text}` (line {condition.place.line})"
    differs = "the data of each rank" if of_data else "the rank"
    if kind == "rank-dependent-loop":
        summary = f"{what} is issued in a loop over {where}, whose length depends on {differs}"
        why = "Ranks that go through the loop more often wait in it for ranks that have left it."
        advice = "Agree on the number of iterations first, for example with an all_reduce of it (MIN), or use join()."
    elif kind == "rank-dependent-exit":
        verb = condition.exit or "exit"
        summary = f"{what} is not reached by ranks that leave by {verb} where {where} decides by {differs}"
        why = f"Ranks that {verb} never enter it; the others wait in it for ever."
        advice = f"Make the call before the {verb}, or let all members of the group leave together."
    else:
        instead = f", the others issue {divergence.instead.name}" if divergence.instead is not None else ""
        decided = truth(condition.value)
        otherwise = decided is not None and not any(decided[rank] for rank in divergence.ranks)
        holds = "does not hold" if otherwise else "holds"
        summary = f"{what} is issued only where {where} {holds}{instead}, which depends on {differs}"
        why = (
            "A collective ends when every member of its group has entered it: those that do wait for those that do not."
        )
        advice = (
            "Make the same call on every member of the group, and keep only the work that needs no other rank under "
            "the condition."
        )
        if of_data:
            advice = "Let all ranks decide alike: all_reduce the value before the condition."
    caught = next((one.place.line for one in operation.conditions if one.how == "caught"), None)
    if caught is not None:
        why += f" What it raises goes no further (line {caught}): where it is refused, no rank waits."
    return LintFinding(
        kind=kind,
        severity="warning" if of_data or condition.value.assumed or divergence.group or caught else "error",
        place=operation.place or condition.place,
        function=function.name,
        op=operation.name,
        group=divergence.group or None,
        summary=f"{summary}.",
        why=why,
        advice=advice,
        condition=condition.place,
        called_from=operation.called_from,
        ran_there=places_of(operation),
    )


def _is_called_back(divergence: Divergence, function: Function, sequences: Sequences) -> bool:
    """Say whether the condition guards definitions of functions that issue collectives wherever they are called."""
    inside = set(ast.walk(divergence.condition.node))
    return any(inner.node in inside and inner in sequences.issuing for inner in function.inner.values())


def _kind(condition: Condition) -> str:
    if condition.how == "loop":
        return "rank-dependent-loop"
    if condition.value.of_data:
        return "data-dependent-collective"
    return "rank-dependent-exit" if condition.how == "exit" else "rank-dependent-collective"


def _order(function: Function, mine: Token, theirs: Token, condition: Condition) -> LintFinding:
    return LintFinding(
        kind="rank-dependent-group-order",
        severity="warning" if condition.value.assumed else "error",
        place=mine.place or condition.place,
        function=function.name,
        op=mine.name,
        group=mine.group or None,
        summary=f"{mine.name} of {mine.group or 'the default group'} comes before {theirs.name} of "
        f"{theirs.group or 'the default group'} on some ranks and after it on others: `{condition.place.text}` "
        f"(line {condition.place.line}) depends on the rank.",
        why="Each side waits in one group for ranks that wait in the other: a cycle.",
        advice="Issue operations of groups that share ranks in one order on all ranks.",
        condition=condition.place,
        ran_there=places_of(mine, theirs),
    )


def _arguments(function: Function, scopes: Scopes, by_rank: list[Tokens]) -> Iterator[LintFinding]:
    """Yield collectives whose root or reduction differs between ranks."""
    scope = scopes.known(function)
    if scope is None:
        return
    for node in own_nodes(function):
        if not isinstance(node, ast.Call) or not (name := scope.called(node)):
            continue
        known = vocabulary.collective_of(name)
        if known is None or known.by_all or scope.group(node, known.group_at)[0]:
            continue
        for what, given in _agreeing(node, name.rpartition(".")[2]):
            value: Value = scope.value(given)
            if not value.splits or value.known is None or value.assumed or value.scope != "global":
                continue
            place = place_of(function, node)
            issuing = [rank for rank, tokens in enumerate(by_rank) if _issues(tokens, place)]
            if len({repr(value.known[rank]) for rank in issuing}) < 2:
                continue
            yield LintFinding(
                kind="rank-dependent-argument",
                severity="error",
                place=place,
                function=function.name,
                op=known.op,
                group=None,
                summary=f"The {what} of {known.op}, `{ast.unparse(given)}`, is another one on each rank.",
                why=f"All members must name the same {what}; backends let it pass, with wrong results, or hang.",
                advice=f"Compute the {what} in a way that gives the same on all ranks.",
                condition=place_of(function, given, ast.unparse(given)),
                ran_there=(place,),
            )


def _issues(tokens: Tokens, place: SourceLocation) -> bool:
    return any(operation.place == place for token in tokens for operation in token.operations())


def _agreeing(call: ast.Call, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments that must be equal on all members."""
    for word in call.keywords:
        if word.arg in ROOT_WORDS:
            yield "root", word.value
        elif word.arg == "op":
            yield "reduction", word.value
    at = ROOT_AT.get(name)
    if at is not None and len(call.args) > at:
        yield "root", call.args[at]
