"""The marks of a program: where its steps end, and phases under names of its choice.

They have no effect, and nearly no cost, in a process that dtprof does not record and in compiled code. This module
imports nothing, so that a program may keep the calls wherever dtprof is installed.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])

    class Sink(Protocol):
        """Records the marks; none of these methods may raise."""

        def mark_step(self, tokens: int | None) -> None:
            """End a step in which this process consumed so many tokens; None: count them by shape."""

        def begin_phase(self, name: str) -> Any:
            """Begin a phase; return a handle for `end_phase`."""

        def end_phase(self, started: Any, failed: bool) -> None:
            """End a phase."""


_sink: Sink | None = None
_is_compiling: Callable[[], bool] | None = None


def send_to(sink: Sink | None, is_compiling: Callable[[], bool] | None) -> None:
    """Record the marks of this process from now on; `is_compiling` says whether the caller is being compiled."""
    global _sink, _is_compiling
    _sink, _is_compiling = sink, is_compiling


def step(tokens: int | None = None) -> None:
    """End a training step here, and begin the next.

    From the first call on, only these calls count as steps of this process, its optimizers do not. `tokens` is the
    number of tokens that this process consumed in the step, no tensor; without it dtprof counts them by the shape of
    the model's inputs.
    """
    if _sink is not None and _is_compiling is not None and not _is_compiling():
        _sink.mark_step(tokens)


class Phase:
    """A named part of the program: a context manager, or a decorator of functions."""

    __slots__ = ("_name", "_started")

    def __init__(self, name: str) -> None:
        """Name the phase; entering it begins it."""
        self._name = name
        self._started: list[Any] = []

    def __enter__(self) -> Phase:
        """Begin the phase."""
        if _sink is not None and _is_compiling is not None and not _is_compiling():
            self._started.append(_sink.begin_phase(self._name))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the phase."""
        if _sink is not None and self._started:
            _sink.end_phase(self._started.pop(), kind is not None)

    def __call__(self, function: Function) -> Function:
        """Return a function that runs inside this phase."""
        import functools

        name = self._name

        @functools.wraps(function)
        def inside(*arguments: Any, **options: Any) -> Any:
            with Phase(name):
                return function(*arguments, **options)

        return inside  # type: ignore[return-value]


def phase(name: str) -> Phase:
    """Name a part of the program; the summary shows its time under this name.

    `with dtprof.phase("tokenise"): ...`, or `@dtprof.phase("tokenise")` above a function. The names `data`, `forward`,
    `backward`, `optimizer`, `checkpoint`, `recompute`, `evaluation`, `compile` and `garbage_collection` stand for the
    phases that dtprof records by itself. Phases may nest, and one may be entered by several threads.
    """
    return Phase(name)
