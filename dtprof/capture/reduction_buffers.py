"""Buffers into which frameworks copy gradients to reduce them; those of torch's DDP and FSDP are known without this.

A framework may hold them while a step is under way and give them back at its end: they are no activations then.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dtprof.capture.live_objects import LiveObjects

BuffersOf = Callable[[Any], Iterable[Any]]

_owners = LiveObjects()
_buffers_of: dict[type[Any], BuffersOf] = {}


def declare(owner: Any, buffers_of: BuffersOf) -> None:
    """Remember an object for as long as it lives; `buffers_of(owner)` gives the tensors that it holds now."""
    _buffers_of[type(owner)] = buffers_of
    _owners.add(owner)


def are_known() -> bool:
    """Say whether any object that lives has declared its buffers."""
    return any(True for _ in _owners)


def held_now() -> Iterator[Any]:
    """Yield the tensors that are held now."""
    for owner in _owners:
        yield from _buffers_of[type(owner)](owner)
