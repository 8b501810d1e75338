"""Load the compiled hook that the launcher prepared, if it fits this process exactly."""

import os
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from dtprof import settings
from dtprof.capture.native import build
from dtprof.records import schema


def load(torch_version: str) -> tuple[Any, str]:
    """Return the native hook's module, or None and one line that says why not.

    The binary is bound to the exact torch, interpreter and dtprof: another one is never opened, not even to look.
    """
    path = os.environ.get(settings.ENV_NATIVE_HOOK, "")
    if not path:
        return None, ""
    if build.MODULE in sys.modules:
        return sys.modules[build.MODULE], ""
    if (runs := build.misfit(Path(path), torch_version, schema.cpp_header())) is not None:
        return None, (
            f"the native hook was compiled for {Path(path).parent.name}, this process runs {runs}: "
            "using the Python hook (15 to 30 us more per operation)"
        )
    if not build.is_intact(Path(path)):
        return None, f"the native hook {path} is damaged: using the Python hook (15 to 30 us more per operation)"
    try:
        extension = ExtensionFileLoader(build.MODULE, path)
        module = module_from_spec(ModuleSpec(build.MODULE, extension, origin=path))
        extension.exec_module(module)
    except ImportError as error:
        return (
            None,
            f"the native hook cannot be loaded ({error}): using the Python hook (15 to 30 us more per operation)",
        )
    sys.modules[build.MODULE] = module
    return module, ""


def use_nccl_events(native: Any) -> str:
    """Let the native hook read the events of NCCL's back end; return why it cannot, empty where it does."""
    library = Path(os.environ.get(settings.ENV_NATIVE_HOOK, "")).with_name(build.NCCL_LIBRARY)
    if not build.is_intact(library, build.NCCL_CHECKSUM):
        try:
            return library.with_name(build.NCCL_REASON).read_text(encoding="utf-8")
        except OSError:
            pass
        if library.parent.parent == build.PREBUILT:
            return (
                "the prebuilt native hook has no library of NCCL's events, and compiler or headers for it are missing"
            )
        return f"{library} is missing or damaged"
    try:
        native.use_kernel_events(str(library))
    except RuntimeError as error:
        return str(error)
    return ""
