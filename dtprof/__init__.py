"""Profile and diagnose distributed PyTorch training.

A program needs none of the names here to be recorded; it may use `step` and `phase` to mark its steps and phases.
`open_run` gives the results of a run to Python, `log_to` to an experiment tracker; nothing of them is loaded before it
is used.
"""

from dtprof.marks import phase, step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtprof.api import open_run
    from dtprof.api.trackers import log_to

__all__ = ["log_to", "open_run", "phase", "step"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "open_run":
        from importlib import import_module

        return import_module("dtprof.api").open_run
    if name == "log_to":
        from importlib import import_module

        return import_module("dtprof.api.trackers").log_to
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
