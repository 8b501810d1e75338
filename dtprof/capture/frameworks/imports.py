"""Act right after a module has been imported, whether that was before or is yet to come."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], object]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited modules as they would be found without it, and stands in for their loaders."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._finding = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an awaited module, of which the loader tells when it was executed."""
        del path, target
        if name not in self.hooks or getattr(self._finding, "name", None) == name:
            return None
        self._finding.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.hooks)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, gives that back, and runs the hooks."""

    def __init__(self, original: Any, hooks: dict[str, list[Hook]]) -> None:
        self._original = original
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._original, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Let the module's own loader create it."""
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Let the module's own loader execute it, then run the hooks, which never raise."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        for hook in self._hooks.pop(module.__name__, []):
            hook(module)


_finder = _Finder()


def after_import(name: str, hook: Hook) -> None:
    """Call a hook, which must not raise, with the module: now where it is imported already, else once it is."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        hook(module)
        return
    _finder.hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def replace_copies(original: Any, name: str, new: Any) -> None:
    """Replace a function of a module where modules of torch that were imported earlier have it from there."""
    for module_name in [module_name for module_name in sys.modules if module_name.startswith("torch.distributed")]:
        module = sys.modules.get(module_name)
        if module is not None and vars(module).get(name) is original:
            setattr(module, name, new)
