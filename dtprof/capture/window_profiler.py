"""torch.profiler as a window uses it: started and stopped on the thread of the program, out of the program's way.

The shapes of tensors are not recorded: that would keep tensors alive, and make autograd copy gradients that it moves.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtprof import fence

LOG_LEVEL = "KINETO_LOG_LEVEL"
SILENT = "99"
ENABLING = {
    "torch.autograd.profiler": ("_prepare_profiler", "_enable_profiler"),
    "torch.autograd.profiler_legacy": ("_enable_profiler_legacy",),
}
"""What every profiler of torch calls to begin."""


class OwnProfilers:
    """Whether the program runs a torch.profiler itself, be it only waiting for its turn by its schedule."""

    def __init__(self) -> None:
        """Know of none."""
        self._running = 0

    @fence.fenced("whether the program runs a torch.profiler")
    def install(self) -> None:
        """See profilers of the program start and stop."""
        import torch.profiler

        kind: Any = torch.profiler.profile
        kind.start, kind.stop = self._counted(kind.start, 1), self._counted(kind.stop, -1)

    def _counted(self, original: Callable[..., Any], change: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            self._running = max(0, self._running + change)
            return original(*arguments, **options)

        return call

    @property
    def any(self) -> bool:
        """Say whether one runs now."""
        from torch._C._autograd import _profiler_enabled

        return self._running > 0 or bool(_profiler_enabled())


class WindowProfiler:
    """One window: of the thread that starts it, and of those that act on its behalf."""

    def __init__(self, give_way: Callable[[], object]) -> None:
        """Call `give_way`, which stops this one, before a profiler of the program begins."""
        import torch
        from torch.profiler import ProfilerActivity
        from torch.profiler.profiler import _KinetoProfile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        self._profiler: Any = _KinetoProfile(activities=activities, experimental_config=_trace_only())
        self._give_way = give_way
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def start(self) -> None:
        """Begin."""
        with _quiet():
            self._profiler.start()
        import torch.autograd.profiler as current
        import torch.autograd.profiler_legacy as legacy

        for module in (current, legacy):
            for name in ENABLING[module.__name__]:
                original = getattr(module, name, None)
                if original is not None:
                    ours = self._yielding(original)
                    setattr(module, name, ours)
                    self._replaced.append((module, name, original, ours))

    def _yielding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enable(*arguments: Any, **options: Any) -> Any:
            self._give_way()
            return original(*arguments, **options)

        return enable

    def stop(self) -> None:
        """End, on the thread that began."""
        for module, name, original, ours in self._replaced:
            if getattr(module, name) is ours:
                setattr(module, name, original)
        self._replaced.clear()
        with _quiet():
            self._profiler.stop()

    def save(self, file: Path) -> None:
        """Write what was seen, as plain JSON: the interpreter does nothing else meanwhile."""
        self._profiler.export_chrome_trace(str(file))
        self._profiler = None


def _trace_only() -> Any:
    """Return the configuration by which torch leaves out what only its own tables need; None where it has none."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the profiler from writing to the job's output that it starts and stops."""
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = SILENT
    try:
        yield
    finally:
        os.environ.pop(LOG_LEVEL, None)


def forget_in_child() -> None:
    """See to it that a process forked within a window records nothing, for ever, in memory that nobody empties."""
    import torch

    torch._C._autograd._enable_record_function(False)
