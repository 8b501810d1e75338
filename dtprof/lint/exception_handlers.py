"""Collectives in exception handlers and finally blocks: one rank may raise while the others do not."""

import ast
from collections.abc import Iterator

from dtprof.lint import vocabulary
from dtprof.lint.lint_findings import LintFinding
from dtprof.lint.rank_steps import catches, places_of, text_of
from dtprof.lint.sequences import Sequences
from dtprof.lint.sources import Function
from dtprof.lint.syntax import TryStatement
from dtprof.lint.walker import place_of


def check_handlers(function: Function, sequences: Sequences) -> Iterator[LintFinding]:
    """Yield collectives that only the ranks issue on which an exception was raised."""
    for statement, handler, tokens in sequences.handlers(function):
        operation = next((operation for token in tokens for operation in token.operations()), None)
        if operation is None or operation.place is None:
            continue
        excused = not operation.is_sure if handler is None else _is_deterministic(handler)
        if excused or not _may_fail_alone(statement, function, sequences, handler):
            continue
        what = text_of(operation, operation.group)
        if handler is None:
            kind, condition = "collective-in-finally", place_of(function, statement.finalbody[0], "finally")
            summary = (
                f"{what} stands in a finally block: a rank on which the block above it raises enters it while the "
                "others are elsewhere."
            )
            why = (
                "The exception is held back until the collective ends, which waits for the other ranks: a crash "
                "becomes a hang."
            )
            advice = "Move the call behind the try statement, so that only ranks that came through make it."
        else:
            caught = ast.unparse(handler.type) if handler.type is not None else "everything"
            kind, condition = "collective-in-except", place_of(function, handler, f"except {caught}")
            summary = f"{what} is issued only by ranks that caught {caught} (line {handler.lineno})."
            why = (
                "An exception is the business of one rank: the others do not come here, and the collective waits for "
                "them."
            )
            advice = (
                "Let all ranks learn of the failure first (all_reduce a flag after the try statement), then act "
                "together."
            )
        yield LintFinding(
            kind=kind,
            severity="warning",
            place=operation.place,
            function=function.name,
            op=operation.name,
            group=operation.group or None,
            summary=summary,
            why=why,
            advice=advice,
            condition=condition,
            called_from=operation.called_from,
            ran_there=places_of(operation),
        )


def _may_fail_alone(
    statement: TryStatement,
    function: Function,
    sequences: Sequences,
    handler: ast.ExceptHandler | None = None,
) -> bool:
    """Say whether one rank alone may fail in the body of a try statement.

    Not where the body only issues collectives, which fail on all ranks, and creates tensors; nor where the body raises
    the caught exception itself, whatever the rank.
    """
    nodes = [node for one in statement.body for node in ast.walk(one)]
    by_some = {
        one
        for node in nodes
        if isinstance(node, ast.If) and sequences.splits(function, node)
        for one in ast.walk(node)
        if isinstance(one, ast.Raise)
    }
    compared = {
        one
        for node in nodes
        if isinstance(node, ast.If) and sequences.raises_by_rank(function, node)
        for one in (*node.body, *node.orelse)
        if isinstance(one, ast.Raise) and any(catches(own, one) for own in statement.handlers)
    }
    if by_some - compared:
        return True
    # A raise under a condition on the rank is compared as a divergence, and is not reported twice.
    raised = {ast.unparse(_called(node.exc)) for node in nodes if isinstance(node, ast.Raise) and node.exc is not None}
    if handler is not None and handler.type is not None and ast.unparse(handler.type) in raised:
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in nodes)
    return yields or any(
        not sequences.issues(function, call) and ast.unparse(call.func) not in raised and not _is_harmless(call)
        for call in calls
    )


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _is_harmless(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return name in ("range", "len", "print", "str", "int", "dist.get_rank", "dist.get_world_size") or (
        name.startswith("torch.") and name.count(".") == 1
    )


def _is_deterministic(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [ast.unparse(type_).rpartition(".")[2] for type_ in types if type_ is not None]
    return bool(names) and all(name in vocabulary.DETERMINISTIC for name in names)
