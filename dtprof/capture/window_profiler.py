"""torch.profiler for a window: started and stopped on the thread of the program, and yielding to its profilers.

Shapes are not recorded: that would keep tensors alive, and make autograd copy gradients that it otherwise moves.
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
"""The functions by which every profiler of torch begins."""


class UserProfilers:
    """Whether the program runs a torch.profiler itself, even one that its schedule has not begun yet."""

    def __init__(self) -> None:
        """Count none."""
        self._running = 0

    @fence.fenced("whether the program runs a torch.profiler")
    def install(self) -> None:
        """Count profilers of the program that start and stop."""
        import torch.profiler

        kind: Any = torch.profiler.profile
        kind.start, kind.stop = self._counted(kind.start, 1), self._counted(kind.stop, -1)

    def _counted(self, original: Callable[..., Any], change: int) -> Callable[..., Any]:
        @fence.stands_in
        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            self._running = max(0, self._running + change)
            try:
                return original(*arguments, **options)
            except BaseException as error:
                fence.hide_frame(error)
                raise

        return call

    @property
    def any(self) -> bool:
        """Say whether a profiler of the program runs now."""
        from torch._C._autograd import _profiler_enabled

        return self._running > 0 or bool(_profiler_enabled())


class WindowProfiler:
    """The profiler of one window: of the thread that starts it, and of the autograd threads that work for it."""

    def __init__(self, give_way: Callable[[], object]) -> None:
        """Call `give_way`, which stops this profiler, before a profiler of the program begins."""
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
        @fence.stands_in
        @functools.wraps(original)
        def enable(*arguments: Any, **options: Any) -> Any:
            self._give_way()
            try:
                return original(*arguments, **options)
            except BaseException as error:
                fence.hide_frame(error)
                raise

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
        """Write the trace as plain JSON; this holds the GIL."""
        self._profiler.export_chrome_trace(str(file))
        self._profiler = None


def _trace_only() -> Any:
    """Return the configuration that omits data for torch's own tables; None where torch has none."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the profiler from announcing its start and stop in the output of the job."""
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = SILENT
    try:
        yield
    finally:
        os.environ.pop(LOG_LEVEL, None)


def forget_in_child() -> None:
    """Stop recording in a process forked within a window: nothing there would ever empty the profiler's memory."""
    import torch

    torch._C._autograd._enable_record_function(False)
