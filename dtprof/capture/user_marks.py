"""Record the steps and phases that the program marks by dtprof.step() and dtprof.phase()."""

from dtprof import fence
from dtprof.capture.spans import Spans
from dtprof.capture.step_counter import CountedSteps
from dtprof.records import events

MOST_NAMES = 1_000
LONGEST_NAME = 100
OTHERS = "others"
"""The common name of phases beyond the first `MOST_NAMES`."""


class UserMarks:
    """Records the marks of this process."""

    def __init__(self, spans: Spans, steps: CountedSteps) -> None:
        """Record through these spans."""
        self._spans = spans
        self._steps = steps
        self._names: dict[str, str] = {}

    def mark_step(self, tokens: object = None) -> None:
        """End a step in which the program consumed so many tokens; None: count them by shape."""
        self._steps.mark(tokens)

    @fence.fenced("a phase that the program marks")
    def begin_phase(self, name: str) -> tuple[int, bool]:
        """Begin a phase; return its span and whether it is a backward pass, for `end_phase`."""
        phase = self._names.get(name) or self._declare(name)
        return self._spans.begin(phase) or 0, phase == events.BACKWARD

    @fence.fenced("a phase that the program marks")
    def end_phase(self, started: tuple[int, bool] | None, failed: bool) -> None:
        """End a phase."""
        if started is not None:
            self._spans.end(started[0], failed=failed, is_backward=started[1])

    def _declare(self, name: str) -> str:
        if len(self._names) >= MOST_NAMES:
            return events.USER_PHASE + OTHERS
        # A str may hold lone surrogates, which no file of the run can.
        short = str(name)[:LONGEST_NAME].encode("utf-8", "backslashreplace").decode()
        self._names[name] = short if short in events.PHASES else events.USER_PHASE + short
        return self._names[name]
