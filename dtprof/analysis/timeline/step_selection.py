"""Choose the steps that a trace shows; of a run with long logs only those are read, whatever the length of the logs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dtprof.analysis.map_reduce import long_log_survey
from dtprof.analysis.map_reduce.survey import SurveyedRun
from dtprof.analysis.steps.step_boundaries import NUMBERED, RankSteps
from dtprof.job.rank_executor import Executor, map_tasks
from dtprof.records.rank_log.step_index import StepIndex
from dtprof.records.reader import Run


@dataclass(frozen=True, kw_only=True)
class StepExtent:
    """The steps and the records of a whole run."""

    steps: tuple[int, int] | None  # the first and the last, as the program numbers them; None: it has none
    events: int  # records of all ranks

    def newest_within(self, max_events: int) -> tuple[int, int] | None:
        """Return the newest steps that hold so many records, if all steps hold alike; None: the run has no steps."""
        if self.steps is None:
            return None
        first, last = self.steps
        count = max(1, int(min(1.0, max_events / max(1, self.events)) * (last - first + 1)))
        return last - count + 1, last


@dataclass(frozen=True, kw_only=True)
class SelectedSteps:
    """A run with long logs, of which only some steps are read."""

    run: Run
    whole: StepExtent  # by its records, of which the first and the last may be of steps that have no begin or no end
    numbers: Mapping[int, tuple[int, int]]  # by rank: of the first and the last step that is read

    def are_numbered(self, steps: Mapping[int, RankSteps]) -> bool:
        """Say whether the steps found in what was read have the numbers that they have in the whole run."""
        for rank, (first, last) in self.numbers.items():
            found = steps[rank]
            if found.rule not in NUMBERED:
                return False
            if len(found.numbers) and (found.numbers[0] < first or found.numbers[-1] > last):
                return False
        return True

    def find_extent(self, steps: Mapping[int, RankSteps]) -> StepExtent:
        """Return the extent of the whole run; where what was read reaches its ends, with the steps found there."""
        assert self.whole.steps is not None
        first, last = self.whole.steps
        found = [own.numbers for own in steps.values() if len(own.numbers)]
        if any(numbers[0] <= first for numbers in self.numbers.values()):
            first = min((int(numbers[0]) for numbers in found), default=first)
        if any(numbers[1] > last for numbers in self.numbers.values()):
            last = max((int(numbers[-1]) for numbers in found), default=last)
        return replace(self.whole, steps=(first, last))


@dataclass(frozen=True, kw_only=True)
class IndexedRun:
    """A run with long logs, and where the records of each step lie in them."""

    run: Run
    indexes: Mapping[int, StepIndex]  # by rank

    @cached_property
    def whole(self) -> StepExtent:
        """What it holds."""
        first = min(index.offset for index in self.indexes.values())
        last = max(index.offset + len(index.counts) - 1 for index in self.indexes.values())
        return StepExtent(steps=(first, last), events=sum(int(index.counts.sum()) for index in self.indexes.values()))

    def select(self, first: int, last: int) -> SelectedSteps:
        """Return the run as one of which the steps from `first` to `last` are read."""
        ranges, numbers = {}, {}
        for rank, index in self.indexes.items():
            low, high = (min(max(step - index.offset, 0), len(index.counts) - 1) for step in (first, last))
            ranges[rank] = index.of(low, high)
            numbers[rank] = ranges[rank].low + index.offset, ranges[rank].high + index.offset
        return SelectedSteps(run=self.run.only_steps(ranges), whole=self.whole, numbers=numbers)

    def choose(self, steps: tuple[int, int] | None, max_events: int) -> SelectedSteps:
        """Return the run as one of which steps from the first to the last are read; None: the newest that fit.

        Parameters:
            max_events: records that fit.
        """
        if steps is not None:
            return self.select(*steps)
        newest = self.whole.newest_within(max_events)
        assert newest is not None
        first, last = newest
        return self.select(first - 1, last)  # the last may have no end

    def cut(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last of steps that are read at once, until all have been."""
        assert self.whole.steps is not None
        begin, last = self.whole.steps
        counts = np.zeros(last - begin + 1, np.int64)
        for index in self.indexes.values():
            own = slice(index.offset - begin, index.offset - begin + len(index.counts))
            counts[own] = np.maximum(counts[own], index.counts)
        for low, high in long_log_survey.cut_steps(counts, long_log_survey.ROWS_AT_ONCE):
            yield begin + low, begin + high


def index_run(run: SurveyedRun, ranks: Sequence[int], executor: Executor) -> IndexedRun | None:
    """Go through long logs once, to find where the records of each step lie.

    Parameters:
        ranks: whose logs are read.

    Returns:
        None where the run is to be read whole: its logs are short, or cannot be read by steps.
    """
    whole = long_log_survey.find_long_logs(run)
    if not ranks or whole is None:
        return None
    indexes: dict[int, StepIndex] = {}
    parts = (whole.part([rank]) for rank in ranks)
    for rank, index in zip(ranks, map_tasks(executor, _index, parts), strict=True):
        if index is None or not 0 < index.counts.max(initial=0) <= long_log_survey.MAX_OF_STEP:
            return None
        indexes[rank] = index
    return IndexedRun(run=whole, indexes=indexes)


def _index(part: Run) -> StepIndex | None:
    (rank,) = part.ranks
    return part.index_steps(rank, held=(), samples=())
