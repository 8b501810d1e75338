"""Operations in flight under the Python tap, and the waits of the job for them."""

import mmap
from time import monotonic_ns
from typing import Any

from dtprof.capture.python.segments import AT, STATE, complete, pack_f32, unpack_f32


class Watched:
    """An operation in flight: its work, held so that the job is handed this very object, and its record."""

    __slots__ = ("at", "issued", "memory", "work")

    def __init__(self, work: Any, memory: mmap.mmap, at: int, issued: int) -> None:
        """Hold the work until it completes."""
        self.work = work
        self.memory = memory
        self.at = at
        self.issued = issued

    def complete(self, state: int) -> None:
        """Move the record to done or failed."""
        complete(self.memory, self.at, self.issued, state)


in_flight: dict[int, Watched] = {}
"""Operations in flight, by the id of their work, which is let go at the wait or the first event after completion."""


def watch_waits(work_class: Any) -> None:
    """Time every wait made from Python on an operation in flight."""
    original = work_class.wait
    if getattr(original, "__module__", "") == __name__:
        return  # inherited from the parent of this forked process

    def wait(self: Any, *arguments: Any, **options: Any) -> Any:
        watched = in_flight.get(id(self))
        if watched is None:
            return original(self, *arguments, **options)
        memory, at, issued = watched.memory, watched.at, watched.issued
        begun = monotonic_ns()
        if memory[at + AT["waits"]] == 0:
            pack_f32(memory, at + AT["waited_from"], begun - issued)
        memory[at + AT["waits"]] = min(memory[at + AT["waits"]] + 1, 255)
        state = STATE["failed"]
        try:
            result = original(self, *arguments, **options)
            state = STATE["done"]
        finally:
            so_far = unpack_f32(memory, at + AT["waited_for"])[0]
            pack_f32(memory, at + AT["waited_for"], so_far + monotonic_ns() - begun)
            watched.complete(state)
            in_flight.pop(id(self), None)
        return result

    wait.__doc__ = original.__doc__
    work_class.wait = wait
