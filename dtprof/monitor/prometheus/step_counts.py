"""Steps of one rank as they end, by the rules of `analysis.steps`: marks of the program, else bursts of optimizers."""

from bisect import bisect_left
from dataclasses import dataclass, field

from dtprof.analysis.steps.step_boundaries import BACKWARD
from dtprof.monitor.prometheus.metric_catalogue import STEP_BOUNDS
from dtprof.records import events
from dtprof.records.tables import Array, select

_BOUNDS_NS = [int(bound * 1e9) for bound in STEP_BOUNDS]


def no_counts() -> list[int]:
    """Return zeros, one for each stretch of STEP_BOUNDS."""
    return [0] * (len(STEP_BOUNDS) + 1)


@dataclass
class StepCounter:
    """Counts steps by duration. The newest burst of optimizers may still grow: it counts as it is when asked for."""

    threads: set[int] = field(default_factory=set)  # those that run the steps
    _num_closed: int = 0
    _counts: list[int] = field(default_factory=no_counts)
    _total_ns: int = 0
    _is_marked: bool = False
    _is_trained: bool = False  # a backward pass was seen
    _backward_since: bool = False  # one began after the newest optimizer span
    _optimizer_begin: int = -1  # of the newest optimizer span
    _before: int = -1  # end of the step before the newest, where that is known
    _end: int = -1  # of the newest; -1: none yet
    _number: int = -1
    _ends: list[int] = field(default_factory=list)  # of steps started to count at this poll

    @property
    def num_ended(self) -> int:
        """Steps ended so far, that without a begin included."""
        return self._num_closed + (self._end >= 0)

    def durations(self) -> tuple[list[int], int]:
        """Return how many steps there were by STEP_BOUNDS, and their sum in ns."""
        counts = list(self._counts)
        newest = self._newest_ns
        if newest is not None:
            counts[bisect_left(_BOUNDS_NS, newest)] += 1
        return counts, self._total_ns + (newest or 0)

    def add(self, spans: Array, ops: tuple[str, ...]) -> list[int]:
        """Take in spans that have ended, in order of their begin; return when steps ended that had not been counted."""
        before, self._ends = self.num_ended, []
        started = (*BACKWARD, events.GRAPH_REPLAY)  # a graph may hold the backward pass
        backward = sorted(begin for name in started for begin in _of(spans, ops, name)["begin_ns"].tolist())
        optimizer, marks = _of(spans, ops, events.OPTIMIZER), _of(spans, ops, events.STEP)
        self.threads.update(optimizer["thread"].tolist(), marks["thread"].tolist())
        if len(marks) and not self._is_marked:
            self._is_marked, self._before, self._end = True, -1, -1
        for end, step in zip(marks["end_ns"].tolist(), marks["step"].tolist(), strict=True):
            self._begin(end, step)
        if not self._is_marked:
            self._take_optimizers(optimizer, backward)
        return self._ends[len(self._ends) - (self.num_ended - before) :]

    def _take_optimizers(self, optimizer: Array, backward: list[int]) -> None:
        columns = (optimizer[name].tolist() for name in ("begin_ns", "end_ns", "step"))
        for begin, end, step in zip(*columns, strict=True):
            between = bisect_left(backward, begin) > bisect_left(backward, self._optimizer_begin)
            is_new = between or self._backward_since or self._end < 0
            self._is_trained = self._is_trained or bisect_left(backward, end) > 0
            self._backward_since, self._optimizer_begin = False, begin
            if not self._is_trained:  # an optimizer run before any backward pass ends no step
                continue
            if is_new:
                self._begin(end, step + 1)
            else:
                self._end = max(self._end, end)
        self._is_trained = self._is_trained or bool(backward)
        if backward and backward[-1] >= self._optimizer_begin:
            self._backward_since = True

    def _begin(self, end: int, number: int) -> None:
        """Close the newest step and begin one that ends at `end`."""
        newest = self._newest_ns
        if newest is not None:
            self._counts[bisect_left(_BOUNDS_NS, newest)] += 1
            self._total_ns += newest
        self._num_closed += self._end >= 0
        self._before = self._end if number == self._number + 1 else -1
        self._end, self._number = end, number
        self._ends.append(end)

    @property
    def _newest_ns(self) -> int | None:
        return self._end - self._before if self._end > self._before >= 0 else None


def _of(spans: Array, ops: tuple[str, ...], name: str) -> Array:
    """Return the spans of a name."""
    chosen = [number for number, known in enumerate(ops) if known == name]
    if len(chosen) == 1:
        return select(spans, spans["op"] == chosen[0])
    return spans[:0]
