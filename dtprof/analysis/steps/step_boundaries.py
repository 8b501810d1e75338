"""Where the steps of each rank begin and end, and which of them figures are taken from.

A step runs from one end of a step to the next. The first of these rules that any rank of the run meets says where steps
end; ranks that do not meet it have no steps:

- marks: where the program calls `dtprof.step()`;
- optimizer: at the end of a burst, a row of optimizer spans with no backward pass started between them;
- data: where the program asks the data loader for the next batch;
- operations: where the sequence of operations repeats, at its longest pause (step_periods.py).

The first step has no begin and is warm-up; so are the steps after it while they last more than WARM_UP_FACTOR times the
median of the later half, up to a quarter of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dtprof.analysis.results import Caveat
from dtprof.analysis.steps.step_periods import find_period_ends
from dtprof.columns import begins_of, distinct, is_any, median
from dtprof.formatting import list_ranks
from dtprof.intervals import NONE, Column, Intervals, pair, union
from dtprof.job.rank_batches import RankBatch, batch_ranks
from dtprof.job.valid_records import ENDED, spans_of, times_of
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables

WARM_UP_FACTOR = 1.25
BACKWARD = (events.BACKWARD, *events.PIPELINE_BACKWARD)
MARKS, OPTIMIZER, DATA, OPERATIONS = "marks", "optimizer", "data", "operations"
RULES = (MARKS, OPTIMIZER, DATA, OPERATIONS)
NUMBERED = (MARKS, OPTIMIZER)
"""Rules that number steps alike whichever records are left."""
FEWEST_BATCHES = 3
FEWEST_UNTRACED = 3
MOST_TRACED = 0.01
"""Share of steps with profiler windows up to which figures use all steps: some times as slow, they add some percent."""
_DONE = (codes.DONE,)
_WHAT_ENDS = {
    MARKS: "dtprof.step()",
    OPTIMIZER: "optimizer step",
    DATA: "batch of a data loader",
    OPERATIONS: "period of operations",
}
_NEITHER = "no rank ended an optimizer step after a backward pass or called dtprof.step(); "
_INSTEAD = {
    DATA: "a step is taken to run from one request to the data loader to the next",
    OPERATIONS: "a step is taken to be the period in which operations repeat",
}


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The steps of one rank: `numbers` (from 1) and `windows` of those whose begin and end are known."""

    rank: int
    count: int  # steps ended, that without a begin included
    numbers: Column
    windows: Intervals
    threads: tuple[int, ...]  # those that run the steps
    rule: str = OPTIMIZER
    traced: tuple[tuple[int, int], ...] = ()  # first and last of those in which it took a profiler window

    def between(self, first: int, last: int) -> tuple[Column, Intervals]:
        """Return numbers and windows of the steps from `first` to `last`."""
        chosen = (self.numbers >= first) & (self.numbers <= last)
        return self.numbers[chosen], self.windows[chosen]


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The steps that every rank has, warm-up left out, without a gap; `first` > `last` where there are none."""

    count: int
    first: int
    last: int
    warm_up: int  # steps left out at the beginning
    caveats: tuple[Caveat, ...]
    within: tuple[int, int] | None = None  # where a range of steps is read: its first and last; else all are

    def of(self, own: RankSteps) -> tuple[Column, Intervals]:
        """Return the numbers and windows of the measured steps of a rank, as far as they are read."""
        first, last = self.within or (self.first, self.last)
        return own.between(max(self.first, first), min(self.last, last))

    @property
    def known(self) -> bool:
        """Say whether there is any step to take figures from."""
        return self.first <= self.last


def find_steps(batch: RankBatch) -> list[RankSteps]:
    """Find the steps of each rank by the first rule that it meets."""
    spans = batch.spans
    ended = is_any(spans.table["state"], ENDED) & (spans.table["end_ns"] != UNKNOWN_NS)
    optimizer = spans.chosen(spans.is_named((events.OPTIMIZER,)) & ended)
    marks = spans.chosen(spans.is_named((events.STEP,)) & ended & (spans.table["state"] == codes.DONE))
    backward = spans.chosen(spans.is_named(BACKWARD))
    replays = spans.chosen(spans.is_named((events.GRAPH_REPLAY,)))
    return [
        _find_steps(
            batch,
            i,
            optimizer=optimizer.of(i),
            marks=marks.of(i),
            backward=np.concatenate((backward.of(i)["begin_ns"], _outside(replays.of(i), optimizer.of(i)))),
        )
        for i in range(len(batch.tables))
    ]


def _outside(replays: Array, optimizer: Array) -> Column:
    """Return when graphs were replayed that may hold a backward pass: not those that an optimizer replays."""
    begin, own = replays["begin_ns"], union(times_of(optimizer))
    before = np.searchsorted(own[:, 0], begin, "right") - 1
    return begin[(before < 0) | (begin >= own[before, 1])] if len(own) else begin


def find_steps_of(tables: RankTables) -> RankSteps:
    """Find the steps of one rank."""
    (found,) = find_steps(batch_ranks([tables]))
    return found


def _find_steps(batch: RankBatch, position: int, *, optimizer: Array, marks: Array, backward: Column) -> RankSteps:
    tables = batch.tables[position]
    if len(marks):
        marks = marks[np.argsort(marks["end_ns"], kind="stable")]
        return _steps(
            tables, marks["end_ns"], number_marks(marks), rule=MARKS, threads=[marks["thread"], optimizer["thread"]]
        )
    ends, numbers = _bursts(optimizer, np.sort(backward))
    if len(ends):
        return _steps(tables, ends, numbers, rule=OPTIMIZER, threads=[optimizer["thread"]])
    data = spans_of(batch.spans.of(position), tables, events.DATA, _DONE)
    if len(data):
        threads, counts = np.unique(data["thread"], return_counts=True)
        data = data[data["thread"] == threads[np.argmax(counts)]]
    if len(data) >= FEWEST_BATCHES:
        ends = distinct(data["begin_ns"])
        return _steps(tables, ends, np.arange(1, len(ends) + 1), rule=DATA, threads=[data["thread"]])
    ends, thread = find_period_ends(batch.operations.of(position))
    return _steps(tables, ends, np.arange(1, len(ends) + 1), rule=OPERATIONS, threads=[thread[: len(ends)]])


def number_marks(marks: Array) -> Column:
    """Return the number of the step that each mark of the program ends, given the marks in order of time.

    Optimizers may have ended steps before the program said that it marks them itself. A mark says how many there have
    been; where that is not recorded (imported runs, older ones), the first that is there is the first.
    """
    numbers = marks["microbatch"].astype(np.int64)
    if (numbers[:1] > 0).all() and (np.diff(numbers) > 0).all():
        return numbers
    return marks["step"].astype(np.int64) - int(marks["step"][0]) + 1


def _steps(tables: RankTables, ends: Column, numbers: Column, *, rule: str, threads: Sequence[Column]) -> RankSteps:
    """Return the steps between these ends; one whose predecessor was dropped has no begin."""
    follows = (np.diff(numbers) == 1) & (np.diff(ends) > 0)
    return RankSteps(
        rank=tables.rank,
        count=int(numbers[-1]) if len(numbers) else 0,
        numbers=numbers[1:][follows],
        windows=pair(ends[:-1][follows], ends[1:][follows]),
        threads=tuple(int(thread) for thread in distinct(np.concatenate(threads))),
        rule=rule,
        # The profiler writes what it saw in the step after the last.
        traced=tuple((window.first, window.last + 1) for window in tables.windows if window.begin_ns >= 0),
    )


def _bursts(optimizer: Array, backward_begin: Column) -> tuple[Column, Column]:
    """Return the end of every burst and the number of the step that it ends."""
    optimizer = optimizer[np.argsort(optimizer["begin_ns"], kind="stable")]
    begin, end = times_of(optimizer).T
    backwards = np.searchsorted(backward_begin, begin, "left")
    if not len(backwards):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    first = np.flatnonzero(begins_of(backwards))
    ends = np.maximum.accumulate(np.maximum.reduceat(end, first))
    trained = np.searchsorted(backward_begin, ends, "left") > 0  # an optimizer run before any backward ends no step
    numbers = optimizer["step"][first].astype(np.int64) + 1
    ends, numbers = ends[trained], numbers[trained]
    growing = np.diff(numbers) > 0
    if not growing.all() or not np.all(np.diff(ends) > 0):
        ends = distinct(ends)
        numbers = np.arange(1, len(ends) + 1)
    return ends, numbers


def agree_on_rule(ranks: Mapping[int, RankSteps]) -> dict[int, RankSteps]:
    """Return the steps of all ranks by the first rule that any of them meets; the others have none."""
    met = {steps.rule for steps in ranks.values() if steps.count}
    rule = next((rule for rule in RULES if rule in met), OPTIMIZER)
    return {
        rank: steps
        if steps.rule == rule
        else replace(steps, count=0, numbers=np.zeros(0, np.int64), windows=NONE, rule=rule)
        for rank, steps in ranks.items()
    }


def choose_steps(ranks: Sequence[RankSteps]) -> MeasuredSteps:
    """Choose the steps that all ranks have had, without the warm-up."""
    caveats = []
    without = [steps.rank for steps in ranks if steps.count == 0]
    stepping = [steps for steps in ranks if steps.count]
    if stepping and stepping[0].rule in _INSTEAD:
        caveats.append(Caveat("steps", _NEITHER + _INSTEAD[stepping[0].rule]))
    if without and stepping:
        what = _WHAT_ENDS[stepping[0].rule]
        caveats.append(Caveat("steps", f"{list_ranks(without)} ended no {what}; steps are those of the other ranks"))
    counts = {steps.count for steps in stepping}
    if len(counts) > 1:
        fewest = [steps.rank for steps in stepping if steps.count == min(counts)]
        caveats.append(
            Caveat(
                "steps",
                f"ranks ended between {min(counts)} and {max(counts)} steps, {list_ranks(fewest)} the fewest; "
                "figures use the steps that all have",
            )
        )
    count = min(counts, default=0)
    complete = [steps for steps in stepping if len(steps.numbers)]
    first, last = 1, 0
    if complete and len(complete) == len(stepping):
        first, last, others = _find_longest_row(complete)
        if others:
            caveats.append(
                Caveat(
                    "steps",
                    f"{others:,} more are known of every rank, but some between were dropped; figures use the "
                    "longest row without a gap",
                )
            )
    if not stepping:
        caveats.append(Caveat("steps", _NEITHER + "collectives cover the whole run"))
    elif first > last:
        caveats.append(
            Caveat(
                "steps",
                "no step has a begin and an end on every rank (the first has no begin); "
                "collectives cover the whole run",
            )
        )
    else:
        first += _warm_up(complete, first, last)
    warm_up = first - 1
    first, last, caveat = _outside_windows(complete, first, last)
    return MeasuredSteps(count=count, first=first, last=last, warm_up=warm_up, caveats=(*caveats, *caveat))


def _find_longest_row(ranks: Sequence[RankSteps]) -> tuple[int, int, int]:
    """Return the longest row of steps that all ranks have, of several the last, and how many others they have."""
    numbers = distinct(ranks[0].numbers)
    for steps in ranks[1:]:
        if not np.array_equal(steps.numbers, numbers):
            numbers = np.intersect1d(numbers, distinct(steps.numbers), assume_unique=True)
    if not len(numbers):
        return 1, 0, 0
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    lengths = np.diff(begins, append=len(numbers))
    at = len(lengths) - 1 - int(np.argmax(lengths[::-1]))
    first, length = int(numbers[begins[at]]), int(lengths[at])
    return first, first + length - 1, len(numbers) - length


def _outside_windows(ranks: Sequence[RankSteps], first: int, last: int) -> tuple[int, int, list[Caveat]]:
    """Return the longest range of steps without a profiler window, which slows all ranks; and the caveat."""
    traced = sorted({span for steps in ranks for span in steps.traced if span[0] <= last and span[1] >= first})
    if not traced or first > last:
        return first, last, []
    free, begin = [], first
    for low, high in traced:
        free.append((begin, low - 1))
        begin = max(begin, high + 1)
    free.append((begin, last))
    low, high = max(free, key=lambda row: row[1] - row[0])
    reason = f"{list_ranks(s.rank for s in ranks if s.traced)} took profiler windows, which slow steps down"
    num_traced = (last - first + 1) - sum(max(0, high - low + 1) for low, high in free)
    if num_traced <= MOST_TRACED * (last - first + 1):
        return first, last, [Caveat("steps", f"{reason}; figures use all steps, {num_traced} of them with one")]
    if high - low + 1 < FEWEST_UNTRACED:
        return first, last, [Caveat("steps", f"{reason}, and too few are without one")]
    return low, high, [Caveat("steps", f"{reason}; figures use the longest row of steps without one")]


def _warm_up(ranks: Sequence[RankSteps], first: int, last: int) -> int:
    """Return how many steps from `first` on are warm-up, by their mean duration over ranks."""
    num_steps = last - first + 1
    total, present = np.zeros(num_steps), np.zeros(num_steps)
    for steps in ranks:
        numbers, windows = steps.between(first, last)
        total[numbers - first] += windows[:, 1] - windows[:, 0]
        present[numbers - first] += 1
    mean = total / np.maximum(present, 1)
    is_slow = mean[: num_steps // 4] > WARM_UP_FACTOR * median(mean[num_steps // 2 :])
    return int(np.argmin(np.r_[is_slow, False]))
