"""The programs, a family or a batch a file; `python -m tests.faults --list KIND` says which show a fault, and where.

A family is named after its subject (`groups.py`, `loaders.py`). A batch (`NAME_faults.py`, `NAME_twins.py`) is named
after the occasion it was written for, in many styles, and frozen before its first run. It measures how often verdicts
are right at first sight, so none of its programs is moved or rewritten. "Twins", "sound" and "that are right" mean the
same: programs with `@healthy`, about which nothing may be found.
"""

import importlib
import pkgutil


def load() -> None:
    """Import all of them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
