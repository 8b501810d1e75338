"""Evaluate the expressions of a function on each rank, and bind its names statement by statement.

Both stand here because each needs the other: binding a statement evaluates its expressions, and evaluating a call binds
the statements of the called function.
"""

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dtprof.lint import vocabulary
from dtprof.lint.rank_values import (
    GLOBAL,
    NUM_RANKS,
    UNKNOWN,
    UNWRAPPED,
    WORLD,
    Value,
    all_or_any,
    calculate,
    compare,
    elementwise,
    merge,
    negate,
    one_rank,
    ranks_of,
    same,
    truth,
)
from dtprof.lint.sources import Class, Function, Program, last_name
from dtprof.lint.syntax import TryStatement

MAX_DEPTH = 4
MAX_NESTING = 60
_CALCULATING = (int, bool, str, len, abs, min, max, divmod, list, tuple, set, sorted, range, frozenset)
_BUILTINS: dict[str, Callable[..., object]] = {function.__name__: function for function in _CALCULATING}
_PASSED_ON = frozenset(
    {"enumerate", "zip", "reversed", "iter", "tqdm", "trange", "DataLoader", "Subset", "islice", "cycle"}
)
_GROUP_RANK = re.compile(r"get_\w*rank")
_OF_FORM = frozenset({"shape", "size", "device", "dtype", "ndim", "keys", "dim", "numel", "grad_fn", "requires_grad"})
_JUDGING = frozenset({"item", "any", "all", "isnan", "isinf", "isfinite", "equal", "allclose"})
_TYPES = frozenset({"isinstance", "hasattr", "type", "callable", "is_tensor", "len", "getattr", "id"})
SUMMED = re.compile(r"reduce|gather|broadcast|sync|average|consensus|agree")


class Scope:
    """Evaluates the expressions of one function; `tests` holds the values of its conditions and iterables."""

    def __init__(self, function: Function, scopes: "Scopes", *, depth: int = 0) -> None:
        """Start with the parameters."""
        self.function = function
        self.tests: dict[int, Value] = {}
        self._scopes = scopes
        self._program = scopes.program
        self._module = function.module
        self._parent = scopes.known(function.parent)
        self._depth = depth
        self._nesting = 0
        self.names: dict[str, Value] = {}
        for argument in function.arguments:
            self.names[argument.arg] = self._parameter(argument)

    @property
    def wrapped(self) -> str:
        """The wrapper of a model of this function, or of the code around it: ddp, fsdp; empty for none."""
        found = next((value.wrapped for value in self.names.values() if value.wrapped), "")
        if not found and self.function.owner is not None:
            found = next((v.wrapped for v in self._attributes(self.function.owner).values() if v.wrapped), "")
        return found or (self._parent.wrapped if self._parent is not None else "")

    def group(self, call: ast.Call, at: int | None) -> tuple[str, frozenset[int] | None]:
        """Return the group of a call, empty for the default group, and its members if known."""
        given = next((word.value for word in call.keywords if word.arg in vocabulary.GROUP_WORDS), None)
        if given is None and at is not None and len(call.args) > at:
            given = call.args[at]
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            return "", None
        value = self.value(given)
        return (ast.unparse(given), None) if value.group is None else (value.group, value.members)

    def called(self, call: ast.Call) -> str | None:
        """Return the dotted name of the called function, resolved through imports."""
        dotted = self._module.dotted(call.func)
        return None if dotted is None else self._program.origin(dotted)

    def target(self, call: ast.Call) -> Function | None:
        """Return the called function if the linted files define it."""
        func = call.func
        if isinstance(func, ast.Name):
            scope: Scope | None = self
            while scope is not None:
                if func.id in scope.function.inner:
                    return scope.function.inner[func.id]
                scope = scope._parent
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            owner: object = self.value(func.value).instance
            if func.value.id in ("self", "cls") and self.function.owner is not None:
                owner = self.function.owner
            if isinstance(owner, Class):
                return self._program.method(owner, func.attr)
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call):
            inner = func.value
            if isinstance(inner.func, ast.Name) and inner.func.id == "super" and self.function.owner is not None:
                bases = of_bases(self.function.owner)
                return self._program.method(bases, func.attr)
        dotted = self._module.dotted(func)
        found = self._program.find(dotted) if dotted else None
        return self._program.method(found, "__init__") if isinstance(found, Class) else found

    def value(self, node: ast.expr) -> Value:
        """Return the value of an expression; UNKNOWN where it is nested too deeply."""
        if self._nesting >= MAX_NESTING:
            return UNKNOWN
        self._nesting += 1
        try:
            return self._value(node)
        finally:
            self._nesting -= 1

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant):
            return same(node.value)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = zip(sides, node.ops, sides[1:], strict=False)
            return all_or_any([self._compare(a, how, b) for a, how, b in pairs], conjunction=True)
        if isinstance(node, ast.BoolOp):
            return all_or_any([self.test(one) for one in node.values], conjunction=isinstance(node.op, ast.And))
        if isinstance(node, ast.UnaryOp):
            operand = self.value(node.operand)
            if isinstance(node.op, ast.Not):
                return negate(self.test(node.operand))
            if isinstance(node.op, ast.USub):
                return elementwise(_minus, [operand])
            return operand
        if isinstance(node, ast.BinOp):
            return calculate(self.value(node.left), node.op, self.value(node.right))
        if isinstance(node, ast.IfExp):
            return choose(self.test(node.test), self.value(node.body), self.value(node.orelse))
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            kinds = {ast.Tuple: lambda *a: a, ast.List: lambda *a: list(a), ast.Set: lambda *a: set(a)}
            return elementwise(kinds[type(node)], [self.value(elt) for elt in node.elts]) if node.elts else same([])
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.NamedExpr):
            found = self.value(node.value)
            self.names[node.target.id] = found
            return found
        if isinstance(node, ast.Starred | ast.Await):
            return self.value(node.value)
        return UNKNOWN

    def test(self, node: ast.expr) -> Value:
        """Return the value of a condition; data count only where they are compared, or reduced to a flag."""
        found = self.value(node)
        if found.of_data and isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return UNKNOWN
        if found.of_data and isinstance(node, ast.Call):
            return found if last_name(node.func) in _JUDGING else UNKNOWN
        return found

    def _compare(self, left: ast.expr, how: ast.cmpop, right: ast.expr) -> Value:
        a, b = self.value(left), self.value(right)
        if (a.of_data or b.of_data) and isinstance(how, ast.In | ast.NotIn | ast.Is | ast.IsNot):
            return UNKNOWN
        return compare(a, how, b)

    def _parameter(self, argument: ast.arg) -> Value:
        name = argument.arg
        if name in vocabulary.RANK_NAMES:
            return ranks_of(vocabulary.RANK_NAMES[name])
        if name in vocabulary.MAIN_NAMES:
            return one_rank(vocabulary.MAIN_NAMES[name])
        if argument.annotation is not None:
            dotted = self._module.dotted(argument.annotation)
            found = self._program.find(dotted) if dotted else None
            if isinstance(found, Class):
                return Value(instance=found)
            wrapper = vocabulary.WRAPPERS.get((dotted or "").rpartition(".")[2], "")
            return Value(wrapped=wrapper) if wrapper else UNKNOWN
        return UNKNOWN

    def _name(self, node: ast.Name) -> Value:
        scope: Scope | None = self
        while scope is not None:
            if node.id in scope.names:
                return scope.names[node.id]
            scope = scope._parent
        return self._by_name(node.id)

    @staticmethod
    def _by_name(name: str) -> Value:
        plain = name.lower().strip("_")
        if plain in vocabulary.RANK_NAMES:
            return ranks_of(vocabulary.RANK_NAMES[plain])
        if plain in vocabulary.MAIN_NAMES:
            return one_rank(vocabulary.MAIN_NAMES[plain])
        return same(NUM_RANKS) if plain in vocabulary.SIZE_NAMES else UNKNOWN

    def _attribute(self, node: ast.Attribute) -> Value:
        dotted = self._module.dotted(node)
        if dotted is not None and dotted.startswith(vocabulary.DISTRIBUTED):
            return (
                WORLD if dotted.endswith((".group.WORLD", ".GroupMember.WORLD")) else Value(known=(dotted,) * NUM_RANKS)
            )
        if isinstance(node.value, ast.Name) and node.value.id == "self" and self.function.owner is not None:
            own = self._attributes(self.function.owner)
            if node.attr in own:
                return own[node.attr]
        base = self.value(node.value)
        if base.wrapped and node.attr == "module":
            return UNWRAPPED
        if base.of_data and node.attr not in _OF_FORM:
            return base
        if isinstance(base.instance, Class):
            own = self._attributes(base.instance)
            if node.attr in own:
                return own[node.attr]
        return UNKNOWN if base.of_data else self._by_name(node.attr)

    def _attributes(self, owner: Class) -> dict[str, Value]:
        """Return the values that the methods of a class assign to its attributes."""
        known: dict[str, Value] | None = getattr(owner, "_attribute_values", None)
        if known is not None:
            return known
        found: dict[str, Value] = {}
        owner._attribute_values = found  # type: ignore[attr-defined]
        for method in owner.methods.values():
            scope = Scope(method, self._scopes, depth=self._depth + 1)
            for node in ast.walk(method.node) if method.node is not None else ():
                if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                    continue
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                    ):
                        value = scope.value(node.value)
                        found[target.attr] = prefer(found.get(target.attr), value)
        return found

    def _subscript(self, node: ast.Subscript) -> Value:
        dotted = self._module.dotted(node.value)
        if dotted == "os.environ" and isinstance(node.slice, ast.Constant):
            scope = vocabulary.RANK_VARIABLES.get(str(node.slice.value))
            return ranks_of(scope) if scope else UNKNOWN
        base = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            # A slice whose bounds depend on the rank is a share, of the same size on all ranks.
            bounds = [self.value(part) for part in (node.slice.lower, node.slice.upper) if part is not None]
            strided = node.slice.step is not None and any(bound.splits for bound in bounds)
            return merge([*bounds, base], differs=True) if strided else base if base.of_data else UNKNOWN
        index = self.value(node.slice)
        if base.of_data:
            return base
        return elementwise(item, (base, index)) if index.splits or base.splits else UNKNOWN

    def _call(self, node: ast.Call) -> Value:
        name = self.called(node) or ""
        last = last_name(node.func)
        values = [self.value(argument) for argument in node.args]
        if name in ("os.environ.get", "os.getenv") and node.args and isinstance(node.args[0], ast.Constant):
            scope = vocabulary.RANK_VARIABLES.get(str(node.args[0].value))
            return ranks_of(scope) if scope else UNKNOWN
        if last in ("new_group", "split_group") and name.startswith(vocabulary.DISTRIBUTED):
            return self._new_group(node, values)
        if last == "get_world_size":
            return same(NUM_RANKS) if not node.args and not node.keywords else UNKNOWN
        if not name and last in _BUILTINS:
            if any(value.of_data for value in values):
                return UNKNOWN if last in _TYPES else merge(values, differs=True)
            return elementwise(_BUILTINS[last], values) if values else UNKNOWN
        if isinstance(node.func, ast.Name) and last in _TYPES:
            return UNKNOWN
        own = self._returned(node, values)
        if own is not None and (own.splits or own.wrapped or own.instance is not None):
            return own
        if last in vocabulary.MAIN_NAMES:
            return one_rank(vocabulary.MAIN_NAMES[last])
        if last in vocabulary.RANK_FUNCTIONS or _GROUP_RANK.fullmatch(last):
            of_another = last == "get_global_rank" and len(values) == 2  # the group, and a rank in it
            return values[1] if of_another else self._rank(node, last)
        if last in vocabulary.WRAPPERS:
            home = name.rpartition(".")[0]
            if home.startswith(vocabulary.WRAPPER_HOMES) or last != "replicate":
                return Value(wrapped=vocabulary.WRAPPERS[last])
        if last in _PASSED_ON and not any(word.arg in ("sampler", "batch_sampler") for word in node.keywords):
            return merge(values, differs=any(value.splits for value in values))
        if SUMMED.search(last) or last in _TYPES or last in _OF_FORM:
            return UNKNOWN
        receiver = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else UNKNOWN
        data = [value for value in (*values, receiver) if value.of_data]
        if receiver.wrapped and last in ("to", "cuda", "train", "eval", "half", "bfloat16"):
            return receiver
        return merge(data, differs=True) if data else UNKNOWN

    def _new_group(self, node: ast.Call, values: list[Value]) -> Value:
        given = values[0] if values else next((self.value(w.value) for w in node.keywords if w.arg == "ranks"), None)
        members = None
        ranks = given.known[0] if given is not None and given.known is not None and not given.splits else None
        if isinstance(ranks, list | tuple | set | range) and all(isinstance(rank, int) for rank in ranks):
            members = frozenset(ranks)
        return Value(group=f"new_group of line {node.lineno}:{node.col_offset}", members=members)

    def _rank(self, node: ast.Call, last: str) -> Value:
        scope = vocabulary.RANK_FUNCTIONS.get(last, last)
        if node.args and not (isinstance(node.args[0], ast.Constant) and node.args[0].value is None):
            scope = ast.unparse(node.args[0])
        elif node.keywords:
            scope = ast.unparse(node.keywords[0].value)
            scope = GLOBAL if scope == "None" else scope
        return ranks_of(scope)

    def _returned(self, node: ast.Call, values: list[Value]) -> Value | None:
        """Return the value that a called function of the files returns; None for other calls."""
        dotted = self._module.dotted(node.func)
        found = self._program.find(dotted) if dotted else None
        if isinstance(found, Class):
            return Value(instance=found)
        function = self.target(node)
        if function is None or function.node is None or self._depth >= MAX_DEPTH:
            return None
        returns = [one for one in ast.walk(function.node) if isinstance(one, ast.Return) and one.value is not None]
        if not returns or len(returns) > 6:
            return None
        scope = Scope(function, self._scopes, depth=self._depth + 1)
        arguments = function.arguments[1 if function.owner is not None else 0 :]
        for argument, value in zip(arguments, values, strict=False):
            if value != UNKNOWN:
                scope.names[argument.arg] = value
        if len(function.body) <= 30:
            self._scopes.bind(scope)
        result: Value | None = None
        for return_ in returns:
            result = prefer(result, scope.value(return_.value))  # type: ignore[arg-type]
        return result


class Scopes:
    """The scopes of all functions of a program, created on demand."""

    def __init__(self, program: Program) -> None:
        """Start without scopes."""
        self.program = program
        self._known: dict[Function, Scope] = {}

    def known(self, function: Function | None) -> Scope | None:
        """Return the scope of a function; None for None."""
        if function is None:
            return None
        if function not in self._known:
            self._known[function] = scope = Scope(function, self)
            self.bind(scope)
        return self._known[function]

    def bind(self, scope: Scope) -> None:
        """Bind the names of the function of a scope, statement by statement."""
        _Binder(scope).block(scope.function.body)


class _Binder:
    """Binds names in order of statements, and evaluates conditions and iterables at their place."""

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
        elif isinstance(node, TryStatement):
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
        """Return the value of the target of a loop: batches of a data loader differ between ranks."""
        inner = node
        while isinstance(inner, ast.Call) and inner.args:
            inner = inner.args[0]
        if isinstance(inner, ast.Call):
            inner = inner.func
        if vocabulary.LOADER.search(last_name(inner)) or value.of_data:
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
        """Forget that an argument of a collective differed between ranks: its result does not."""
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            if SUMMED.search(last_name(call.func)):
                for argument in (*call.args, *(word.value for word in call.keywords)):
                    root = argument
                    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                        root = root.func if isinstance(root, ast.Call) else root.value
                    if isinstance(root, ast.Name) and root.id != "self" and root.id in self._scope.names:
                        value = self._scope.names[root.id]
                        is_thing = value.wrapped or value.group is not None or value.instance is not None
                        is_thing = is_thing or value.is_plain  # no call can change a number or a text
                        if not is_thing and (value.differs or isinstance(argument, ast.Name)):
                            self._scope.names[root.id] = UNKNOWN


def _is_enumerate(node: ast.expr) -> bool:
    """Say whether a loop iterates over enumerate(), also inside tqdm and the like."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "enumerate":
            return True
        if not node.args:
            return False
        node = node.args[0]
    return False


def of_bases(owner: Class) -> Class:
    """Return a class without its own methods, for calls through super()."""
    return Class(name=owner.name, module=owner.module, bases=owner.bases)


def _minus(one: Any) -> object:
    return -one


def item(of: Any, at: Any) -> object:
    return of[at]


def choose(test: Value, then: Value, otherwise: Value) -> Value:
    """Return the value of a conditional expression, rank by rank."""
    decided = truth(test)
    if decided is None:
        return either(otherwise, then)
    if then.known is not None and otherwise.known is not None:
        known = tuple(a if own else b for own, a, b in zip(decided, then.known, otherwise.known, strict=True))
        found = merge([test, then, otherwise], known)
        return replace(found, assumed=found.assumed or test.assumed)
    return prefer(otherwise, then)


def either(known: Value, new: Value) -> Value:
    """Return the better known value; a model unwrapped on one side was not wrapped on the other."""
    return UNWRAPPED if known.unwrapped or new.unwrapped else prefer(known, new)


def prefer(known: Value | None, new: Value) -> Value:
    """Return the better known value: one that differs between ranks before one that may not."""
    if known is None or known == UNKNOWN:
        return new
    if new == UNKNOWN or (known.splits and not new.splits) or (known.wrapped and not new.wrapped):
        return known
    return new
