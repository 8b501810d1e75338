"""What a program says of itself: where its steps end, and phases of its own.

Without effect, and without cost to speak of, in a process that dtprof does not record and in code that is being
compiled. Imports nothing, so that a program may keep the calls wherever dtprof is installed.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol, TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])

    class Sink(Protocol):
        """Who records the marks; none of these may raise."""

        def mark_step(self, tokens: int | None) -> None:
            """End a step in which this process consumed so many tokens; None: not said."""

        def begin_phase(self, name: str) -> Any:
            """Begin a phase; return what `end_phase` needs."""

        def end_phase(self, begun: Any, failed: bool) -> None:
            """End a phase."""


_sink: Sink | None = None
_is_compiling: Callable[[], bool] | None = None


def send_to(sink: Sink | None, is_compiling: Callable[[], bool] | None) -> None:
    """Record the marks of this process from now on; `is_compiling` tells whether the caller is being compiled."""
    global _sink, _is_compiling
    _sink, _is_compiling = sink, is_compiling


def step(tokens: int | None = None) -> None:
    """Say that a training step ends here, and the next begins.

    From the first call on, only these calls count as steps of this process: its optimizers end none. `tokens` is how
    many of them this process consumed in the step, a number and no tensor; what is not said is taken from the shape of
    what the model was given.
    """
    if _sink is not None and _is_compiling is not None and not _is_compiling():
        _sink.mark_step(tokens)


class Phase:
    """A part of the program under a name: a context manager, or a decorator of functions."""

    __slots__ = ("_begun", "_name")

    def __init__(self, name: str) -> None:
        """Begin nothing yet."""
        self._name = name
        self._begun: list[Any] = []

    def __enter__(self) -> Phase:
        """Begin."""
        if _sink is not None and _is_compiling is not None and not _is_compiling():
            self._begun.append(_sink.begin_phase(self._name))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End."""
        if _sink is not None and self._begun:
            _sink.end_phase(self._begun.pop(), kind is not None)

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
    """Give a part of the program a name, under which the summary shows its time.

    `with dtprof.phase("tokenise"): ...`, or `@dtprof.phase("tokenise")` above a function. The names `data`, `forward`,
    `backward`, `optimizer`, `checkpoint`, `recompute`, `evaluation`, `compile` and `garbage_collection` stand for the
    phases that dtprof knows by itself. Phases may nest, and one may be entered by several threads.
    """
    return Phase(name)
