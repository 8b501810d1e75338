"""The programs, a family a file."""

import importlib
import pkgutil


def load() -> None:
    """Import all of them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
