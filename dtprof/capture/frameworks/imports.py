"""Call a hook with a module: now if it is imported, else right after its import."""

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
    """Finds the awaited modules by the other finders, and wraps their loaders."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}
        self._finding = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an awaited module with a loader that runs the hooks."""
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
    """Loads a module with its original loader, restores that loader, and runs the hooks."""

    def __init__(self, original: Any, hooks: dict[str, list[Hook]]) -> None:
        self._original = original
        self._hooks = hooks

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # of a copy under construction
            raise AttributeError(name)
        return getattr(self._original, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Let the original loader create the module."""
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Let the original loader execute the module, then run the hooks, which never raise."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        for hook in self._hooks.pop(module.__name__, []):
            hook(module)


_finder = _Finder()


def after_import(name: str, hook: Hook) -> None:
    """Call a hook, which must not raise, with the module: now if it is imported, else once it is."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        hook(module)
        return
    _finder.hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def replace_copies(original: Any, name: str, new: Any) -> None:
    """Replace a function in the modules of torch.distributed that imported it by name."""
    for module_name in [module_name for module_name in sys.modules if module_name.startswith("torch.distributed")]:
        module = sys.modules.get(module_name)
        if module is not None and vars(module).get(name) is original:
            setattr(module, name, new)
