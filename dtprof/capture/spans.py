"""Spans of this process, recorded around functions of torch; the first one may open the log of the rank."""

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
"""Phases that only a training process has: they open the log of its rank."""


class _OutermostSpan(threading.local):
    """Whether a thread is inside an outermost span."""

    is_open = False


class Spans:
    """Opens and closes spans; none of its methods raises."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Get the recorder from `recorder`, which opens the log of this rank when given True: the process trains."""
        self.recorder = recorder
        self._ids: dict[str, int] = {}
        self._ids_of: Recorder | None = None
        self._inside = _OutermostSpan()
        self._before: dict[str, list[Callable[[], object]]] = {}
        self.pauses: Collection[int] = ()
        """Not empty where `finished_pauses` has pauses to record."""
        self.finished_pauses: Callable[[], Iterable[tuple[int, int]]] = tuple
        """Yields begin and end of pauses that are not recorded yet."""

    def id_of(self, recorder: Recorder, name: str) -> int:
        """Return the id of a name in the log of this recorder."""
        if recorder is not self._ids_of:
            self._ids, self._ids_of = {}, recorder  # a forked process opens another log
        known = self._ids.get(name)
        if known is None:
            known = self._ids[name] = recorder.name_id(name)
        return known

    @property
    def recording(self) -> bool:
        """Say whether anything has been recorded."""
        return self._ids_of is not None

    def before(self, phase: str, call: Callable[[], object]) -> None:
        """Call this, which must not raise, before each span of a phase."""
        self._before.setdefault(phase, []).append(call)

    def begin(self, phase: str, number: int = 0) -> int:
        """Begin a span with a number that its kind gives a meaning; return its handle, 0 where nothing is recorded."""
        # One Python frame: between the computations of the job this code leaves the CPU caches, and each call costs.
        try:
            recorder = self.recorder(phase in TRAINING)
            if recorder is None:
                return 0
            if self.pauses:
                self._record_pauses(recorder)
            op = self.id_of(recorder, phase)
            if phase in self._before:
                for call in self._before[phase]:
                    call()
            return recorder.begin_span(op, phase == events.BACKWARD, -1, number)
        except Exception as error:  # noqa: BLE001  # the hot path cannot afford `fenced`
            fence.report("the begin of a phase", error)
            return 0

    def mark(self, phase: str, number: int) -> None:
        """Record a moment as a span of no length, with a number that counts such moments.

        Raises:
            Exception: recording failed; the caller is fenced.
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
        except Exception as error:  # noqa: BLE001  # as in `begin`
            fence.report("the end of a phase", error)

    def _record_pauses(self, recorder: Recorder) -> None:
        recording = self.recording
        for begin_ns, end_ns in self.finished_pauses():
            if recording:  # pauses before the first record belong to no step
                recorder.past_span(self.id_of(recorder, events.GARBAGE_COLLECTION), begin_ns, end_ns)

    def around(
        self,
        owner: Any,
        name: str,
        phase: str,
        *,
        normal_exits: tuple[type[BaseException], ...] = (),
        outermost: bool = False,
        excluded_callers: frozenset[types.CodeType] = frozenset(),
        number_of: Callable[..., int] | None = None,
    ) -> Callable[..., Any] | None:
        """Replace a function of a module or class by one that records a span around it; None where it is missing.

        Parameters:
            owner: the module or class.
            name: name of the function.
            phase: name of the span.
            normal_exits: exceptions that are no failure of the function.
            outermost: record no span inside another outermost span of this thread.
            excluded_callers: record no span for calls from this code.
            number_of: gives the number of the span from the arguments of the call; must not raise.
        """
        original = vars(owner).get(name)
        if not isinstance(original, types.FunctionType | types.BuiltinFunctionType):
            return None
        wrapped = self.wrapped(original, phase, normal_exits=normal_exits, number_of=number_of)
        if outermost:
            wrapped = self._outermost(original, wrapped, excluded_callers)
        setattr(owner, name, wrapped)
        return wrapped

    def _outermost(
        self, original: Callable[..., Any], wrapped: Callable[..., Any], excluded_callers: frozenset[types.CodeType]
    ) -> Callable[..., Any]:
        inside = self._inside

        @fence.stands_in
        @functools.wraps(original)
        def choose(*arguments: Any, **options: Any) -> Any:
            is_outermost = not inside.is_open
            if is_outermost and excluded_callers:
                is_outermost = sys._getframe(1).f_code not in excluded_callers
            try:
                if not is_outermost:
                    return original(*arguments, **options)
                inside.is_open = True
                return wrapped(*arguments, **options)
            except BaseException as error:
                fence.hide_frame(error)
                raise
            finally:
                if is_outermost:
                    inside.is_open = False

        choose._torchdynamo_disable = True  # type: ignore[attr-defined]
        return choose

    def wrapped(
        self,
        original: Callable[..., Any],
        phase: str,
        *,
        normal_exits: tuple[type[BaseException], ...] = (),
        number_of: Callable[..., int] | None = None,
    ) -> Callable[..., Any]:
        """Return a function that records a span around another."""
        begin, end = self.begin, self.end
        is_backward = phase == events.BACKWARD

        @fence.stands_in
        @functools.wraps(original)
        def with_span(*arguments: Any, **options: Any) -> Any:
            span = begin(phase) if number_of is None else begin(phase, number_of(*arguments, **options))
            failed, flags = True, 0
            try:
                result = original(*arguments, **options)
                failed = False
                return result
            except BaseException as error:
                if isinstance(error, normal_exits):
                    failed, flags = False, schema.FLAG["skipped"]
                fence.hide_frame(error)
                raise
            finally:
                end(span, failed=failed, flags=flags, is_backward=is_backward)

        with_span._torchdynamo_disable = True  # type: ignore[attr-defined]
        return with_span
