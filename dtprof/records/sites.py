"""Where an operation comes from: the line of the program, and the framework component that issued it.

Ranks write both, readers give both out. The standard library only: capture imports it in every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dtprof.records.schema import MOST_CALLERS

MODULE = "<module>"
"""The function of a line outside of functions."""


@dataclass(frozen=True)
class Label:
    """The framework component that issued an operation, and its purpose; the defaults: it has none."""

    api: str  # the framework in a word: ddp, fsdp, tp, pp
    text: str  # the purpose in words, as reports show it: "fsdp all-gather of layers.4"
    module: str = ""
    stage: int = -1
    microbatch: int = -1


@dataclass(frozen=True, kw_only=True)
class Site:
    """A line of the user's code and the function it called."""

    file: str
    line: int
    function: str
    api: str = ""
    label: Label | None = None
    package: str = ""  # the installed package that issued the operation; empty: the program or torch
    callers: tuple["Site", ...] = field(default=(), compare=False)
    """Lines of the user's code that led there, from the caller on; empty where none is known."""

    @cached_property
    def call_path(self) -> tuple[tuple[str, int], ...]:
        """File and line of it and of its callers, from the innermost on."""
        return tuple((place.file, place.line) for place in (self, *self.callers))

    def shares_function(self, other: "Site") -> bool:
        """Say whether another line is in the same function of the same file."""
        return (self.file, self.function) == (other.file, other.function)

    @property
    def caller(self) -> "Site | None":
        """The line that called its function; None where it is not known, or that is a module, which nothing calls."""
        return next((caller for caller in self.callers[:1] if caller.function != MODULE), None)


def site_of_stack(frames: Sequence[Site]) -> Site:
    """Return the first of these frames, which come innermost first, with the next ones as its callers."""
    return replace(frames[0], callers=tuple(frames[1 : 1 + MOST_CALLERS]))
