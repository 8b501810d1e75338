"""What the statements of a function make of its names, one after the other."""

import ast
from collections.abc import Iterable

from dtprof.lint import vocabulary
from dtprof.lint.rank_values import UNKNOWN, Value, calculate, elementwise, same, truth
from dtprof.lint.scopes import SUMMED, Scope, choose, either, item, prefer
from dtprof.lint.sources import Function, Program


class Scopes:
    """The scopes of all functions of a program, each made when it is first asked for."""

    def __init__(self, program: Program) -> None:
        """Start with none."""
        self.program = program
        self._known: dict[Function, Scope] = {}

    def known(self, function: Function | None) -> Scope | None:
        """Return the scope of a function, None for none."""
        if function is None:
            return None
        if function not in self._known:
            self._known[function] = scope = Scope(function, self)
            self.bind(scope)
        return self._known[function]

    def bind(self, scope: Scope) -> None:
        """Go through the statements of the function of a scope, in order."""
        _Binder(scope).block(scope.function.body)


class _Binder:
    """Goes through statements; notes what conditions and iterables are worth where they stand."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self._branch(node)
            return
        if isinstance(node, ast.For | ast.AsyncFor):
            value = self._scope.value(node.iter)
            self._scope.tests[id(node)] = UNKNOWN if value.of_data else value
            self._assign(node.target, self._element(node.iter, value))
            if isinstance(node.target, ast.Tuple) and _is_enumerate(node.iter):
                self._assign(node.target.elts[0], UNKNOWN)
            self.block([*node.body, *node.orelse])
        elif isinstance(node, ast.While):
            before = self._scope.test(node.test)
            self.block(node.body)
            self._scope.tests[id(node)] = prefer(before, self._scope.test(node.test))
            self.block(node.orelse)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self._scope.value(item.context_expr)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, value)
            self.block(node.body)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.block(node.body)
            tried = dict(self._scope.names)
            for handler in node.handlers:
                self.block(handler.body)
            self._keep_splitting(tried)
            self.block([*node.orelse, *node.finalbody])
        elif isinstance(node, ast.Match):
            for case in node.cases:
                self.block(case.body)
        elif isinstance(node, ast.Assign):
            value = self._scope.value(node.value)
            self._clean(node.value)
            for target in node.targets:
                self._assign(target, value, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self._scope.value(node.value), node.value)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                self._assign(
                    node.target, calculate(self._scope.value(node.target), node.op, self._scope.value(node.value))
                )
        elif isinstance(node, ast.Expr):
            self._scope.value(node.value)
            self._clean(node.value)

    def _branch(self, node: ast.If) -> None:
        test = self._scope.test(node.test)
        self._scope.tests[id(node)] = test
        before = dict(self._scope.names)
        self.block(node.body)
        then, self._scope.names = self._scope.names, dict(before)
        self.block(node.orelse)
        for name in then.keys() | self._scope.names.keys():
            a, b = then.get(name), self._scope.names.get(name)
            if a == b or a is None or b is None:
                self._scope.names[name] = a or b or UNKNOWN
            elif truth(test) is not None:
                self._scope.names[name] = choose(test, a, b)
            else:
                self._scope.names[name] = either(b, a) if b.splits or name not in before or before[name] != b else a

    def _keep_splitting(self, before: dict[str, Value]) -> None:
        for name, value in before.items():
            if value.splits and not self._scope.names[name].splits:
                self._scope.names[name] = value

    def _element(self, node: ast.expr, value: Value) -> Value:
        """Return what the target of a loop is worth: batches of loaders are the rank's own."""
        inner = node
        while isinstance(inner, ast.Call) and inner.args:
            inner = inner.args[0]
        if isinstance(inner, ast.Call):
            inner = inner.func
        name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")
        if vocabulary.LOADER.search(name) or value.of_data:
            return Value(differs=True, of_data=True)
        return UNKNOWN

    def _assign(self, target: ast.expr, value: Value, source: ast.expr | None = None) -> None:
        if isinstance(target, ast.Name):
            self._scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = source.elts if isinstance(source, ast.Tuple | ast.List) else []
            for i, one in enumerate(target.elts):
                if len(parts) == len(target.elts):
                    self._assign(one, self._scope.value(parts[i]), parts[i])
                elif value.known is not None:
                    self._assign(one, elementwise(item, [value, same(i)]))
                else:
                    self._assign(one, value if value.of_data else UNKNOWN)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, UNKNOWN)

    def _clean(self, node: ast.expr) -> None:
        """Forget that what went through a collective differs between ranks."""
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if SUMMED.search(last):
                for argument in (*call.args, *(word.value for word in call.keywords)):
                    root = argument
                    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                        root = root.func if isinstance(root, ast.Call) else root.value
                    if isinstance(root, ast.Name) and root.id != "self" and root.id in self._scope.names:
                        value = self._scope.names[root.id]
                        is_thing = value.wrapped or value.group is not None or value.instance is not None
                        is_thing = is_thing or value.is_plain  # which no call can change
                        if not is_thing and (value.differs or isinstance(argument, ast.Name)):
                            self._scope.names[root.id] = UNKNOWN


def _is_enumerate(node: ast.expr) -> bool:
    """Say whether a loop counts what it goes over, under tqdm and the like."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "enumerate":
            return True
        if not node.args:
            return False
        node = node.args[0]
    return False
