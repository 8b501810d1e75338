"""Where the records of each step lie in a long log, so that a range of steps is read without the rest.

Part of the reader. Records carry how many steps their rank had ended when they were issued. Of the log as a whole only
what is bounded by steps is kept: how many records each has, and the records that are needed beyond their own step.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.records import events, schema
from dtprof.records.rank_log.archive import RECORD_DTYPE
from dtprof.records.rank_log.segments import Records, read_segment, sound_rows
from dtprof.records.tables import Array, ids_named, join, select

STEPS_BEFORE, STEPS_AFTER = 2, 1
"""Of which records are needed beside those of a range: the step before the first one begins where the burst of
optimizers before it ends, and other ranks count steps a little earlier or later."""
MAX_STEPS = 1 << 24
"""A record that counts more is damaged, or of a program for which numbers by step take too much room."""
_FAR = np.iinfo(np.int64).max
_NOTHING = np.zeros(0, RECORD_DTYPE)
_SPAN, _SAMPLE = schema.KIND["span"], schema.KIND["sample"]
_FIRST_DEVICE_KIND = schema.KIND["device_time"]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Where the records of a range of steps lie in one rank's log; picklable."""

    first: int  # as recorded: steps that had ended before
    last: int
    segments: tuple[str, ...]  # names of files
    others: Array  # as recorded: what was issued long before and reaches into the range; wanted samples
    headers: tuple[dict[str, Any], ...]  # of all segments of the log
    problems: tuple[str, ...]

    @property
    def low(self) -> int:
        """The first step of which records are read."""
        return max(0, self.first - STEPS_BEFORE)

    @property
    def high(self) -> int:
        """The last of them."""
        return self.last + STEPS_AFTER

    def without_facts(self) -> "StepRange":
        """Return the same with what records need of the log as a whole: little more than where they lie."""
        return replace(self, headers=self.headers[:1] + self.headers[1:][-1:], problems=())


@dataclass(frozen=True, kw_only=True)
class StepIndex:
    """The index of one rank's log; picklable."""

    segments: tuple[str, ...]  # names of files
    first: Counts  # of each segment: the first step that any of its records is of; -1 without records
    last: Counts
    counts: Counts  # records of each step
    begins: Counts  # of each step: the first issue of any of its records; the largest number where it has none
    offset: int  # the number that the program gives a step, less the steps that had ended before it
    mark: Array  # as recorded: the program's first mark of a step, from which others may count; or none
    reaching: Array  # as recorded: operations and spans that last beyond the steps around their own
    held: Array  # samples of values that hold until the next one, as recorded
    samples: Array  # of the other wanted names, in a table (tables.SAMPLE)
    headers: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    device_error_ns: int | None  # of the times of a device, median over all intervals; None without any

    def of(self, first: int, last: int, *, with_held: bool = False) -> StepRange:
        """Return where the records of some steps lie; `first` and `last` as recorded.

        Parameters:
            with_held: samples of values that hold until the next one are among them, of all steps.
        """
        low, high = first - STEPS_BEFORE, last + STEPS_AFTER
        begin = int(self.begins[max(0, low) :].min(initial=_FAR))
        before = [
            select(rows, (rows["step"] < low) & reaches)
            for rows, reaches in ((self.mark, True), (self.reaching, _end_of(self.reaching) > begin))
        ]
        if with_held:
            before.append(select(self.held, (self.held["step"] < low) | (self.held["step"] > high)))
        inside = np.flatnonzero((self.first <= high) & (self.last >= low))
        return StepRange(
            first=first,
            last=last,
            segments=tuple(self.segments[i] for i in inside.tolist()),
            others=join(before),
            headers=self.headers,
            problems=self.problems,
        )


def index_log(
    files: Sequence[Path], *, ops: Sequence[str], held: Collection[str], samples: Collection[str]
) -> StepIndex | None:
    """Index a log; None where it cannot be read by steps.

    Steps may not be numbered alike throughout, or NCCL's own durations were recorded, which carry no step.

    Parameters:
        files: the segments of a rank, in order.
        ops: names of operations, spans and samples, by id.
        held: names of samples to keep whose values hold until the next one.
        samples: names of other samples to keep.

    Raises:
        NewerFormatError: a segment was written by a newer dtprof.
    """
    indexer = _Indexer(ops, held, samples)
    problems: list[str] = []
    headers, first, last = [], [], []
    for file in files:
        keeper = _Keeper()
        header = read_segment(file, keeper, problems)
        if header is not None:
            headers.append(header)
        found = indexer.take(keeper.rows())
        if found is None:
            return None
        begin, end = found
        first.append(begin)
        last.append(end)
    if len(indexer.offsets) > 1:
        return None
    return StepIndex(
        segments=tuple(file.name for file in files),
        first=np.array(first, np.int64),
        last=np.array(last, np.int64),
        counts=indexer.counts,
        begins=indexer.begins,
        offset=next(iter(indexer.offsets), 1),
        mark=indexer.mark,
        reaching=indexer.list_reaching(),
        held=join([_NOTHING, *indexer.held]),
        samples=indexer.samples.joined()[2],
        headers=tuple(headers),
        problems=tuple(problems),
        device_error_ns=indexer.find_device_error(),
    )


class _Keeper:
    """Keeps the sound records of a segment as they are."""

    def __init__(self) -> None:
        self._parts: list[Array] = []

    def take(self, rows: Array) -> int:
        """Copy the records that are sound; return how many are damaged."""
        sound, _, damaged = sound_rows(rows)
        self._parts.append(sound.copy() if sound.base is not None else sound)
        return damaged

    def rows(self) -> Array:
        """Return them, in order."""
        return join([_NOTHING, *self._parts])


class _Indexer:
    """Goes through the records of a log, segment by segment."""

    def __init__(self, ops: Sequence[str], held: Collection[str], samples: Collection[str]) -> None:
        self.counts: Counts = np.zeros(0, np.int64)
        self.held: list[Array] = []
        self.samples = Records()
        self.mark = _NOTHING
        self.offsets: set[int] = set()
        self._device_errors = Counter[int]()  # intervals by error of their times
        self._is_mark = ids_named(ops, (events.STEP,))
        self._is_held = ids_named(ops, held)
        self._is_wanted = ids_named(ops, samples)
        self.begins: Counts = np.zeros(0, np.int64)  # of steps: the first issue of any of its records
        self._reaching = _NOTHING  # what may last beyond the steps around its own

    def take(self, rows: Array) -> tuple[int, int] | None:
        """Take in a segment; return its first and last step, -1 and -1 without records; None where none can be such."""
        if not len(rows):
            return -1, -1
        kind, step = rows["kind"], rows["step"].astype(np.int64)
        if step.max() >= MAX_STEPS:
            return None
        counts = np.bincount(step)
        self.counts = _grown(self.counts, len(counts), 0)
        self.counts[: len(counts)] += counts
        is_of_device = kind >= _FIRST_DEVICE_KIND
        if is_of_device.any():
            if (kind == schema.KIND["device_time"]).any():
                return None
            errors, numbers = np.unique(
                rows["tag"][is_of_device & (rows["state"] == schema.STATE["done"])], return_counts=True
            )
            self._device_errors.update(dict(zip(errors.tolist(), numbers.tolist(), strict=True)))
        issued = rows["issued_ns"].astype(np.int64)
        self.begins = _grown(self.begins, len(counts), _FAR)
        np.minimum.at(self.begins, step, issued)
        is_sample = kind == _SAMPLE
        self.held.append(select(rows, is_sample & self._is_held[rows["op"]]))
        self.samples.take(select(rows, is_sample & self._is_wanted[rows["op"]]))
        self._take_marks(select(rows, (kind == _SPAN) & self._is_mark[rows["op"]]))
        # What a device does lies on another clock, which hosts may be many steps ahead of.
        lasting = select(rows, ~is_sample & ~is_of_device & (_end_of(rows) > issued))
        self._reaching = self._still_reaching(join([self._reaching, lasting]))
        return int(step.min()), int(step.max())

    def _take_marks(self, marks: Array) -> None:
        """Note by how much the program's numbers of steps differ from the count of the record."""
        marks = select(marks, marks["state"] == schema.STATE["done"])
        if not len(marks):
            return
        if not len(self.mark):
            self.mark = marks[:1]
        first, counted = self.mark, marks["tag"].astype(np.int64)
        step = marks["step"].astype(np.int64)
        # As step_boundaries.number_marks numbers them.
        offsets = counted - step if first["tag"][0] > 0 else np.full(len(marks), 1 - int(first["step"][0]))
        self.offsets |= set(np.unique(offsets).tolist())

    def _still_reaching(self, rows: Array) -> Array:
        """Return the records that last beyond the steps around their own, or may do so as far as is known yet."""
        following = rows["step"].astype(np.int64) + STEPS_BEFORE + 1
        known = following < len(self.begins)
        reaches = np.ones(len(rows), np.bool_)
        reaches[known] = _end_of(select(rows, known)) > self.begins[following[known]]
        newest = int(np.max(self.begins, initial=0, where=self.begins < _FAR))
        # Steps that are not here yet begin after the newest one that is.
        reaches[~known] = _end_of(select(rows, ~known)) > newest
        return select(rows, reaches)

    def find_device_error(self) -> int | None:
        """Return the median error of the times of a device; None without any."""
        if not self._device_errors:
            return None
        errors = sorted(self._device_errors)
        ends = np.cumsum([self._device_errors[error] for error in errors])
        last = int(ends[-1]) - 1
        low, high = (errors[int(np.searchsorted(ends, at, "right"))] for at in (last // 2, (last + 1) // 2))
        return int((low + high) / 2)

    def list_reaching(self) -> Array:
        """Return the records that last beyond the steps around their own."""
        following = self._reaching["step"].astype(np.int64) + STEPS_BEFORE + 1
        return select(self._reaching, following < len(self.begins))


def _end_of(rows: Array) -> npt.NDArray[np.int64]:
    """Return the last known time of records; that of their issue where no other is known."""
    done = np.where(rows["state"] >= schema.STATE["done"], rows["done_after"], 0)
    waited = np.where(rows["waits"] > 0, rows["waited_from"] + rows["waited_for"], 0)
    longest = np.maximum(np.maximum(done, waited), rows["returned_after"]).astype(np.float64)
    end: Counts = rows["issued_ns"].astype(np.int64) + np.clip(np.nan_to_num(longest), 0, 2.0**61).astype(np.int64)
    return end


def _grown(column: Counts, length: int, value: int) -> Counts:
    if len(column) >= length:
        return column
    return np.concatenate((column, np.full(length - len(column), value, np.int64)))


def read_range(folder: Path, steps: StepRange) -> Records:
    """Decode the records of some steps, those around them, and those that reach into these."""
    taker = _RangeTaker(steps.low, steps.high)
    taker.records.take(steps.others)
    for name in steps.segments:
        read_segment(folder / name, taker, [])  # the index has its problems
    return taker.records


class _RangeTaker:
    """Decodes the records of some steps."""

    def __init__(self, low: int, high: int) -> None:
        self.records = Records()
        self._low, self._high = low, high

    def take(self, rows: Array) -> int:
        """Decode those records that are of the steps."""
        step = np.ascontiguousarray(rows["step"])
        chosen = (step >= self._low) & (step <= self._high)
        if chosen.all():
            return self.records.take(rows)
        return self.records.take(select(rows, chosen)) if chosen.any() else 0
