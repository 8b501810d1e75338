"""Operations in flight under the Python tap, and the waits of the job for them."""

import mmap
import threading
from collections import deque
from time import monotonic_ns
from typing import Any

from dtprof.capture.python.segments import AT, STATE, complete, pack_f32, unpack_f32

MAX_WATCHED = 64
"""Operations in flight whose work is held; of more, the oldest are let go and stay `returned`."""
POLLED_AT_ONCE = 4


class Watched:
    """An operation in flight: its work, held so that the job is handed this very object, and its record."""

    __slots__ = ("at", "issued", "memory", "work")

    def __init__(self, work: Any, memory: mmap.mmap, at: int, issued: int) -> None:
        """Hold the work until it completes."""
        self.work = work
        self.memory = memory
        self.at = at
        self.issued = issued

    def end(self, state: int) -> None:
        """Move the record to done or failed, and let the work go."""
        complete(self.memory, self.at, self.issued, state)
        self.let_go()

    def let_go(self) -> None:
        """Hold the work no longer."""
        _by_work.pop(id(self.work), None)
        self.work = None


_by_work: dict[int, Watched] = {}
"""Operations in flight, by the id of their work, which is let go at the wait or the first event after completion."""
_oldest_first: deque[Watched] = deque()
_polling = threading.Lock()


def watch(watched: Watched) -> None:
    """Follow an operation until it completes."""
    _by_work[id(watched.work)] = watched
    _oldest_first.append(watched)
    if len(_oldest_first) > MAX_WATCHED and _polling.acquire(blocking=False):
        _oldest_first.popleft().let_go()
        _polling.release()


def poll() -> None:
    """See which of the oldest operations in flight have completed.

    A callback on the operation's future would tell at once, but it takes the GIL on gloo's thread and costs the
    launching thread up to 100 us in handing it over.
    """
    if not _oldest_first or not _polling.acquire(blocking=False):
        return  # another thread is at it
    try:
        for _ in range(min(len(_oldest_first), POLLED_AT_ONCE)):
            oldest = _oldest_first[0]
            if oldest.work is not None:
                if not oldest.work.is_completed():
                    return
                oldest.end(STATE["done"])
            _oldest_first.popleft()
    finally:
        _polling.release()


def watch_waits(work_class: Any) -> None:
    """Time every wait made from Python on an operation in flight."""
    original = work_class.wait
    if getattr(original, "__module__", "") == __name__:
        return  # inherited from the parent of this forked process

    def wait(self: Any, *arguments: Any, **options: Any) -> Any:
        watched = _by_work.get(id(self))
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
            watched.end(state)
        return result

    wait.__doc__ = original.__doc__
    work_class.wait = wait
