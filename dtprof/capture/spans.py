"""Spans of this process: opened and closed on the recorder, which is asked for when something happens."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from dtprof import fence
from dtprof.capture.recorder import Recorder
from dtprof.records import events, schema

TRAINING = (events.FORWARD, events.BACKWARD, events.OPTIMIZER, events.STEP)
"""What only a process that trains does: opens the log of this rank."""


class _Inside(threading.local):
    """Whether a thread is inside an outermost span."""

    one = False


class Spans:
    """Opens and closes spans; none of its methods raises."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Keep the way to the recorder, which opens the log of this rank when told that the process trains."""
        self.recorder = recorder
        self._ids: dict[str, int] = {}
        self._ids_of: Recorder | None = None
        self._inside = _Inside()
        self._before_backward: list[Callable[[], object]] = []
        self.pauses: Collection[int] = ()
        """Not empty where `past` has something to give."""
        self.past: Callable[[], Iterable[tuple[int, int]]] = tuple
        """Gives begins and ends of pauses that are over and not yet recorded."""

    def id_of(self, recorder: Recorder, name: str) -> int:
        """Return the id of a name in the log of this recorder."""
        if recorder is not self._ids_of:
            self._ids, self._ids_of = {}, recorder  # a forked process has a log of its own
        known = self._ids.get(name)
        if known is None:
            known = self._ids[name] = recorder.name_id(name)
        return known

    @property
    def recording(self) -> bool:
        """Say whether anything has been recorded."""
        return self._ids_of is not None

    def before_backward(self, call: Callable[[], object]) -> None:
        """Call this, which must not raise, before each backward pass."""
        self._before_backward.append(call)

    def begin(self, phase: str) -> int:
        """Begin a span; return its handle, 0 where nothing is recorded."""
        # One frame: between the computations of the job all code has left the caches, and each page of it costs.
        try:
            recorder = self.recorder(phase in TRAINING)
            if recorder is None:
                return 0
            if self.pauses:
                self._record_pauses(recorder)
            op = self.id_of(recorder, phase)
            if phase != events.BACKWARD:
                return recorder.begin_span(op, False)
            for call in self._before_backward:
                call()
            return recorder.begin_span(op, True)
        except Exception as error:  # noqa: BLE001  # a fence of its own
            fence.report("the begin of a phase", error)
            return 0

    def mark(self, phase: str, number: int) -> None:
        """Record a moment: a span that ends where it begins, and how many of them there have been.

        Raises:
            Exception: it could not be recorded; whoever calls has a fence.
        """
        recorder = self.recorder(phase in TRAINING)
        if recorder is not None:
            if self.pauses:
                self._record_pauses(recorder)
            recorder.end_span(recorder.begin_span(self.id_of(recorder, phase), False, -1, number), False, 0, False)

    def end(self, span: int | None, *, failed: bool = False, flags: int = 0, is_backward: bool = False) -> None:
        """End a span."""
        try:
            recorder = self.recorder(False)
            if span and recorder is not None:
                recorder.end_span(span, failed, flags, is_backward)
        except Exception as error:  # noqa: BLE001  # a fence of its own
            fence.report("the end of a phase", error)

    def _record_pauses(self, recorder: Recorder) -> None:
        recording = self.recording
        for begin_ns, end_ns in self.past():
            if recording:  # what was before the first record is not of the job's steps
                recorder.past_span(self.id_of(recorder, events.GARBAGE_COLLECTION), begin_ns, end_ns)

    def around(
        self,
        owner: Any,
        name: str,
        phase: str,
        *,
        no_failures: tuple[type[BaseException], ...] = (),
        outermost: bool = False,
        not_from: frozenset[types.CodeType] = frozenset(),
    ) -> Callable[..., Any] | None:
        """Replace a function of a module or class by one that records a span around it; None where there is none.

        Args:
            owner: the module or class.
            name: of the function.
            phase: what the span is called.
            no_failures: exceptions by which the function ends in order.
            outermost: record no span inside another of this phase and thread that was also so asked for.
            not_from: record no span for calls from this code.
        """
        original = vars(owner).get(name)
        if not isinstance(original, types.FunctionType | types.BuiltinFunctionType):
            return None
        watched = self.watched(original, phase, no_failures=no_failures)
        if outermost:
            watched = self._outermost(original, watched, not_from)
        setattr(owner, name, watched)
        return watched

    def _outermost(
        self, original: Callable[..., Any], watched: Callable[..., Any], not_from: frozenset[types.CodeType]
    ) -> Callable[..., Any]:
        inside = self._inside

        @functools.wraps(original)
        def choose(*arguments: Any, **options: Any) -> Any:
            if inside.one or (not_from and sys._getframe(1).f_code in not_from):
                return original(*arguments, **options)
            inside.one = True
            try:
                return watched(*arguments, **options)
            finally:
                inside.one = False

        choose._torchdynamo_disable = True  # type: ignore[attr-defined]
        return choose

    def watched(
        self, original: Callable[..., Any], phase: str, *, no_failures: tuple[type[BaseException], ...] = ()
    ) -> Callable[..., Any]:
        """Return a function that records a span around another."""
        begin, end = self.begin, self.end
        is_backward = phase == events.BACKWARD

        @functools.wraps(original)
        def with_span(*arguments: Any, **options: Any) -> Any:
            span = begin(phase)
            failed, flags = True, 0
            try:
                result = original(*arguments, **options)
                failed = False
                return result
            except no_failures:
                failed, flags = False, schema.FLAG["skipped"]
                raise
            finally:
                end(span, failed=failed, flags=flags, is_backward=is_backward)

        with_span._torchdynamo_disable = True  # type: ignore[attr-defined]
        return with_span
