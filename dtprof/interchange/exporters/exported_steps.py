"""Which steps of a run go into a trace: those asked for, or the newest that fit."""

from dataclasses import dataclass

import numpy as np

from dtprof.analysis.timeline.operation_detail import RankDetail, RunDetail
from dtprof.errors import NothingToShowError
from dtprof.formatting import format_count, format_fraction, plural


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """Steps from `first` to `last`; None: everything from there on, or up to there."""

    first: int | None = None
    last: int | None = None
    share: float = 1.0  # of the time of a run without steps, at its end
    reduced: str = ""  # why it is not everything
    apart: str = ""  # why ranks cannot be compared

    def bounds(self, rank: RankDetail) -> tuple[int, int | None]:
        """Return when the window begins and ends on one rank; 0 and None where it does not."""
        numbers, windows = rank.steps.numbers, rank.steps.windows
        if self.share < 1:
            return round(rank.tables.last_ns - self.share * (rank.tables.last_ns - rank.tables.first_ns)), None
        since, until = 0, None
        if self.first is not None:
            at = int(np.searchsorted(numbers, self.first))
            since = int(windows[at, 0]) if at < len(numbers) else rank.tables.last_ns + 1
        if self.last is not None:
            at = int(np.searchsorted(numbers, self.last, "right")) - 1
            until = int(windows[at, 1]) if at >= 0 else 0
        return since, until

    def describe(self, left_out: int = 0) -> list[str]:
        """Return remarks on steps that the file omits, one sentence each."""
        said = [sentence for sentence in (self.reduced, self.apart) if sentence]
        if left_out:
            said.append(f"{plural(left_out, 'operation')} overlapped with too many others to be drawn")
        return said


def choose_window(run: RunDetail, *, steps: tuple[int, int] | None, max_events: int) -> StepWindow:
    """Choose the steps.

    Raises:
        NothingToShowError: the run has none of the steps asked for.
    """
    apart = ""
    if not run.surveys.one_clock:
        apart = "the clocks of the hosts are not aligned: times of ranks of different hosts cannot be compared"
    extent = run.extent
    first, last = extent.steps or (0, 0)
    if steps is not None:
        if extent.steps is None or steps[0] > last or steps[1] < first:
            has = f"its steps are {first} to {last}" if extent.steps else "it has no step with a begin and an end"
            raise NothingToShowError(
                f"{run.run.path} has none of the steps {steps[0]}:{steps[1]}: {has}; choose others with --steps A:B"
            )
        return StepWindow(first=steps[0], last=steps[1], apart=apart)
    if extent.events <= max_events:
        return StepWindow(apart=apart)
    of = f"of {format_count(extent.events)} events a file of this format should hold {format_count(max_events)} at most"
    newest = extent.newest_within(max_events)
    if newest is None:
        share = max_events / extent.events
        return StepWindow(
            share=share, reduced=f"{of}: the last {format_fraction(share)} of the time are in it", apart=apart
        )
    since, _ = newest
    return StepWindow(
        first=since,
        apart=apart,
        reduced=f"{of}: steps {since} to {last} of {first} to {last} are in it; choose others with --steps A:B",
    )
