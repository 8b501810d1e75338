"""Find copies of a framework under another name, such as one that a repository vendors, by what they define.

The program has imported what it trains with once its groups are created: modules are looked at then, each once.
"""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from dtprof import fence

Hook = Callable[[Any], object]


class _Sought(NamedTuple):
    """What a copy defines, and what is called with it."""

    original: str
    defines: tuple[str, ...]
    hook: Hook


class Copies:
    """Calls hooks with the modules that define what a module of a framework defines."""

    def __init__(self) -> None:
        """Start without anything to look for."""
        self._sought: dict[str, list[_Sought]] = {}  # by the first name that a copy defines
        self._looked_at = 0
        self._found: set[tuple[str, object]] = set()

    def seek(self, original: str, defines: tuple[str, ...], hook: Hook) -> None:
        """Call a hook, which must not raise, with each module that defines these names, the original left out.

        Parameters:
            original: name of the module of the framework.
            defines: functions and classes, and attributes of classes as `Class.name`, that the module itself defines.
        """
        first = defines[0].partition(".")[0]
        self._sought.setdefault(first, []).append(_Sought(original, defines, hook))

    @fence.fenced("attribution to copies of frameworks")
    def find(self, *_: Any, **__: Any) -> None:
        """Look at the modules that were imported since the last call."""
        if self._looked_at == len(sys.modules):
            return
        modules = list(sys.modules.values())
        # Where modules were removed, the newest are no longer the last ones.
        newest = modules[self._looked_at :] if self._looked_at < len(modules) else modules
        self._looked_at = len(modules)
        for module in newest:
            if not issubclass(type(module), ModuleType):
                continue
            # Past __getattribute__ of modules that are loaded when they are first used.
            members = object.__getattribute__(module, "__dict__")
            for first in self._sought.keys() & members.keys():
                for sought in self._sought[first]:
                    self._call_once(module, members, sought)

    def _call_once(self, module: ModuleType, members: dict[str, Any], sought: _Sought) -> None:
        name = members.get("__name__")
        if not _is_copy(members, name, sought) or (sought.original, name) in self._found:
            return
        self._found.add((sought.original, name))
        sought.hook(module)


def _is_copy(members: dict[str, Any], module: Any, sought: _Sought) -> bool:
    """Say whether a module with these members is a copy: what it took from another by `import` is not its own."""
    return module != sought.original and all(_defines(members, module, name) for name in sought.defines)


def _defines(members: dict[str, Any], module: Any, name: str) -> bool:
    first, _, attribute = name.partition(".")
    held = members.get(first)
    # By its type: an object of the program may run code for any other question.
    kind = type(held)
    if not (kind is FunctionType or issubclass(kind, type)) or held.__module__ != module:
        return False
    return not attribute or attribute in vars(held)


def owner_of(module: Any, path: str) -> str:
    """Return the name of the package in which a module lies at this path: of `a.b.runtime.engine` it is `a.b`."""
    return str(module.__name__).removesuffix(f".{path}")
