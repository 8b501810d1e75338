"""Record what the program says of itself through dtprof.step() and dtprof.phase()."""

from dtprof import fence
from dtprof.capture.spans import Spans
from dtprof.capture.step_counter import Steps
from dtprof.records import events

MOST_NAMES = 1_000
LONGEST_NAME = 100
OTHERS = "others"
"""The name of the phases that are too many to have one."""


class UserMarks:
    """Takes the marks of this process."""

    def __init__(self, spans: Spans, steps: Steps) -> None:
        """Record on these spans."""
        self._spans = spans
        self._steps = steps
        self._names: dict[str, str] = {}

    def mark_step(self, tokens: object = None) -> None:
        """End a step in which so many tokens were consumed; None: the program does not say."""
        self._steps.mark(tokens)

    @fence.fenced("a phase of the program's own")
    def begin_phase(self, name: str) -> tuple[int, bool]:
        """Begin a phase; return what `end_phase` needs."""
        phase = self._names.get(name) or self._declare(name)
        return self._spans.begin(phase) or 0, phase == events.BACKWARD

    @fence.fenced("a phase of the program's own")
    def end_phase(self, begun: tuple[int, bool] | None, failed: bool) -> None:
        """End a phase."""
        if begun is not None:
            self._spans.end(begun[0], failed=failed, is_backward=begun[1])

    def _declare(self, name: str) -> str:
        if len(self._names) >= MOST_NAMES:
            return events.USER_PHASE + OTHERS
        short = str(name)[:LONGEST_NAME].encode("utf-8", "backslashreplace").decode()  # of a name that is no valid text
        self._names[name] = short if short in events.PHASES else events.USER_PHASE + short
        return self._names[name]
