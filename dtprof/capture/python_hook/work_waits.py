"""Operations in flight under the Python hook, and the waits of the job for them."""

import mmap
import os
from itertools import islice
from time import monotonic_ns
from typing import Any

from dtprof.capture.python_hook.segment_writer import AT, STATE, complete, pack_f32, pack_two_f32, unpack_f32

MAX_WATCHED = 64
"""Operations in flight whose Work is held; beyond these, the oldest are released and stay `returned`."""
POLLED_AT_ONCE = 4
DONE, FAILED = STATE["done"], STATE["failed"]
WAITS, WAITED_FROM, WAITED_FOR = AT["waits"], AT["waited_from"], AT["waited_for"]
"""The field behind the last is `done_after`: both are written at once."""

_in_flight: dict[int, tuple[Any, mmap.mmap, int, int]] = {}
"""Work, memory and offset of its record, time of issue, by the id of the Work; oldest first.

Holding the Work keeps the id valid: the job gets this very object. It is released at the wait, or at the first event of
the rank after completion.
"""

_inherited: list[Any] = []
"""Operations in flight in the parent of this forked process. They stay referenced: their destructors could wait for
threads that do not exist here."""


def watch(work: Any, memory: mmap.mmap, at: int, issued: int) -> None:
    """Watch an operation until it completes."""
    _in_flight[id(work)] = (work, memory, at, issued)
    if len(_in_flight) > MAX_WATCHED:
        for oldest in list(islice(_in_flight, 1)):
            _in_flight.pop(oldest, None)


def poll() -> None:
    """Complete the records of the oldest operations in flight that have completed.

    A callback on the operation's future would be immediate, but it takes the GIL on gloo's thread and costs the
    launching thread up to 100 us to hand it over. An operation that failed before anything waited for it reads as done:
    asking torch for its success would warn on stderr.
    """
    if not _in_flight:
        return
    for key in list(islice(_in_flight, POLLED_AT_ONCE)):
        held = _in_flight.get(key)
        if held is None:
            continue  # another thread removed it
        work, memory, at, issued = held
        if not work.is_completed():
            return
        complete(memory, at, issued, STATE["done"])
        _in_flight.pop(key, None)


def _set_aside() -> None:
    _inherited.append(_in_flight.copy())
    _in_flight.clear()


def settle() -> None:
    """Complete the records of all completed operations and release every Work: the interpreter exits.

    A done future counts as well: gloo's thread completes the future, on which the job may have waited in C++, a moment
    before the Work. Nothing stays held, so that gloo's threads never need the interpreter to destroy it.
    """
    for work, memory, at, issued in list(_in_flight.values()):
        if work.is_completed() or _is_future_done(work):
            complete(memory, at, issued, STATE["done"])
    _in_flight.clear()


def _is_future_done(work: Any) -> bool:
    try:
        return bool(work.get_future().done())
    except RuntimeError:  # it has none
        return False


def watch_waits(work_class: Any) -> None:
    """Time every wait made from Python on an operation in flight."""
    original = work_class.wait
    if getattr(original, "__module__", "") == __name__:
        return  # inherited from the parent of this forked process
    os.register_at_fork(after_in_child=_set_aside)

    def wait(self: Any, *arguments: Any, **options: Any) -> Any:
        held = _in_flight.get(id(self))
        if held is None:
            return original(self, *arguments, **options)
        _, memory, at, issued = held
        started = monotonic_ns()
        waits = memory[at + WAITS]
        if waits == 0:
            pack_f32(memory, at + WAITED_FROM, started - issued)
        memory[at + WAITS] = min(waits + 1, 255)
        state = FAILED
        try:
            result = original(self, *arguments, **options)
            state = DONE
        finally:
            ended = monotonic_ns()
            waited = ended - started + (unpack_f32(memory, at + WAITED_FOR)[0] if waits else 0)
            if memory[at] < DONE:  # issued or returned
                pack_two_f32(memory, at + WAITED_FOR, waited, ended - issued)
                memory[at] = state
            else:
                pack_f32(memory, at + WAITED_FOR, waited)
            _in_flight.pop(id(self), None)
        return result

    wait.__doc__ = original.__doc__
    work_class.wait = wait
