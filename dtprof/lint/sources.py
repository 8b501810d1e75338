"""Parsed files: their imports, functions and classes, and the resolution of names across files."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
"""Nodes whose bodies do not run where they are defined."""
UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions of `read_tree`: no file, no source that this Python can parse, or one nested too deeply."""
MAX_BYTES = 5_000_000
_MAX_HOPS = 8


def last_name(node: ast.expr) -> str:
    """Return the last part of a name such as `dist.all_reduce`; empty for an expression without a name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@dataclass(eq=False)
class Function:
    """A function, a method, or the statements of a module."""

    name: str
    module: "Module"
    body: list[ast.stmt]
    node: FunctionNode | None = None  # None: the module itself
    owner: "Class | None" = None
    parent: "Function | None" = None
    inner: dict[str, "Function"] = field(default_factory=dict)

    @property
    def arguments(self) -> list[ast.arg]:
        """The parameters, in order."""
        if self.node is None:
            return []
        given = self.node.args
        return [*given.posonlyargs, *given.args, *given.kwonlyargs]


@dataclass(eq=False)
class Class:
    """A class of a module."""

    name: str
    module: "Module"
    bases: list[ast.expr]
    methods: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Module:
    """One file."""

    path: Path
    name: str
    text: str
    names: dict[str, str] = field(default_factory=dict)  # by import or alias: a dotted name
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    everything: list[Function] = field(default_factory=list)

    def dotted(self, node: ast.expr) -> str | None:
        """Return the dotted name of an expression; None unless it leads to an import or a definition."""
        if isinstance(node, ast.Name):
            if node.id in self.names:
                return self.names[node.id]
            if node.id in self.functions or node.id in self.classes:
                return f"{self.name}.{node.id}"
            return node.id if node.id in ("dist", "c10d") else None
        if isinstance(node, ast.Attribute):
            home = self.dotted(node.value)
            return None if home is None else f"{home}.{node.attr}"
        return None


class Program:
    """All files together."""

    def __init__(self, modules: list[Module]) -> None:
        """Index the modules by name."""
        self.modules = modules
        self._by_name = {module.name: module for module in modules}

    def find(self, dotted: str) -> Function | Class | None:
        """Return the function, method or class of a dotted name, through re-exports."""
        return self._find(dotted, _MAX_HOPS)

    def origin(self, dotted: str) -> str:
        """Return the dotted name of a definition, resolved through re-exports."""
        for _ in range(_MAX_HOPS):
            home, rest = self._split(dotted)
            if home is None or not rest or rest[0] not in home.names:
                return dotted
            dotted = ".".join((home.names[rest[0]], *rest[1:]))
        return dotted

    def method(self, owner: Class, name: str, hops: int = _MAX_HOPS) -> Function | None:
        """Return a method of a class or of the bases that are in the files."""
        if name in owner.methods:
            return owner.methods[name]
        for base in owner.bases if hops else ():
            dotted = owner.module.dotted(base)
            found = self.find(dotted) if dotted else None
            if isinstance(found, Class) and found is not owner and (method := self.method(found, name, hops - 1)):
                return method
        return None

    def _split(self, dotted: str) -> tuple[Module | None, list[str]]:
        parts = dotted.split(".")
        for end in range(len(parts) - 1, 0, -1):
            if module := self._by_name.get(".".join(parts[:end])):
                return module, parts[end:]
        return None, []

    def _find(self, dotted: str, hops: int) -> Function | Class | None:
        home, rest = self._split(dotted)
        if home is None or not hops:
            return None
        if rest[0] in home.functions and len(rest) == 1:
            return home.functions[rest[0]]
        if rest[0] in home.classes:
            owner = home.classes[rest[0]]
            return owner if len(rest) == 1 else self.method(owner, rest[1]) if len(rest) == 2 else None
        if rest[0] in home.names:
            return self._find(".".join((home.names[rest[0]], *rest[1:])), hops - 1)
        return None


def read_tree(path: Path) -> tuple[ast.Module, bytes]:
    """Return the syntax tree of a file, and its bytes.

    Raises:
        OSError: it cannot be read.
        SyntaxError, ValueError: it is no source that this Python can parse.
        RecursionError, MemoryError: it is nested too deeply.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES // 1_000_000} MB")
    data = path.read_bytes()
    return ast.parse(data, str(path)), data


def parse(path: Path) -> Module:
    """Parse a file into its imports, functions and classes.

    Raises:
        OSError, SyntaxError, ValueError, RecursionError, MemoryError: as of `read_tree`.
    """
    tree, data = read_tree(path)
    module = Module(path=path, name=_module_name(path), text=data.decode("utf-8", "replace"))
    is_package = path.stem == "__init__"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module.names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            home = _home(module.name, node, is_package=is_package)
            for alias in node.names:
                module.names[alias.asname or alias.name] = f"{home}.{alias.name}"
    top = Function(name="<module>", module=module, body=tree.body)
    module.everything.append(top)
    _take(tree.body, module, owner=None, parent=top)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute | ast.Name):
            dotted = module.dotted(node.value)
            for target in node.targets:
                if dotted and isinstance(target, ast.Name) and target.id not in module.names:
                    module.names[target.id] = dotted
    return module


def _module_name(path: Path) -> str:
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.absolute().parent
    while (folder / "__init__.py").exists() and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts) or path.absolute().parent.name


def _home(name: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    up = node.level - is_package
    base = parts[: len(parts) - up] if up else parts
    return ".".join([*base, *([node.module] if node.module else [])])


def _take(body: list[ast.stmt], module: Module, *, owner: Class | None, parent: Function) -> None:
    """Register the functions and classes among statements, also those under conditions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = Function(
                name=node.name, module=module, body=node.body, node=node, owner=owner or parent.owner, parent=parent
            )
            module.everything.append(function)
            if owner is not None:
                owner.methods.setdefault(node.name, function)
            elif parent.node is None:
                module.functions.setdefault(node.name, function)
            else:
                parent.inner[node.name] = function
            _take(node.body, module, owner=None, parent=function)
        elif isinstance(node, ast.ClassDef):
            new = Class(name=node.name, module=module, bases=node.bases)
            module.classes.setdefault(node.name, new)
            _take(node.body, module, owner=new, parent=parent)
        else:
            for block in ("body", "orelse", "finalbody"):
                _take(getattr(node, block, []), module, owner=owner, parent=parent)
            for handler in getattr(node, "handlers", []):
                _take(handler.body, module, owner=owner, parent=parent)
