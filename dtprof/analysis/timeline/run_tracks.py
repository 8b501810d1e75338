"""The bars of one rank over the whole run: its phases or pipeline actions in one lane, its operations in another."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dtprof.analysis.map_reduce.placed_ranks import PlacedRank
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.columns import distinct, number_alike, number_distinct
from dtprof.formatting import format_bytes
from dtprof.interning import Interned
from dtprof.intervals import Column, Intervals, paint, pair
from dtprof.job.api_names import find_apis
from dtprof.job.device_timeline import start_of
from dtprof.job.valid_records import ENDED, spans_of
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables

WORK, COMMUNICATION = 0, 1
"""Lanes of a rank, from top to bottom: phases or the actions of a pipeline; operations."""
MAX_NAMES = 20_000
OTHER_NAME = "(one of many)"
IN_FLIGHT, POINT_TO_POINT, BLOCKING = "overlapped", "point to point", "exposed"
_ACTIONS = {
    events.PP_FORWARD: ("forward", "F"),
    events.PP_LOSS: ("loss", "loss"),
    events.PP_BACKWARD: ("backward", "B"),
    events.PP_BACKWARD_INPUT: ("backward", "I"),
    events.PP_BACKWARD_WEIGHT: ("weight_gradient", "W"),
}


@dataclass(frozen=True, kw_only=True)
class Track:
    """The bars of one rank by begin, one row each in every column."""

    rank: int
    begin_ns: Column
    length_ns: Column
    lane: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]  # position in the kinds of all tracks
    name: npt.NDArray[np.uint16]  # position in their names
    left_out: int
    step_ends_ns: Column


class BarNames:
    """Kinds and names of bars by number; of names at most MAX_NAMES."""

    def __init__(self) -> None:
        """Start empty."""
        self.kinds: Interned[str] = Interned()
        self.names: Interned[str] = Interned([OTHER_NAME])

    def name(self, name: str) -> int:
        """Return the number of a name; that of OTHER_NAME where there are too many."""
        return self.names.number(name) if len(self.names) < MAX_NAMES or name in self.names else 0

    def renumber(self, track: Track, others: "BarNames") -> Track:
        """Return a track with kinds and names renumbered to this table; new ones are added."""
        kinds = np.array([self.kinds.number(kind) for kind in others.kinds] or [0], np.uint8)
        names = np.array([0, *(self.name(name) for name in others.names.values[1:])], np.uint16)
        return replace(track, kind=kinds[track.kind], name=names[track.name])

    def only(self, measured: Column) -> tuple["BarNames", npt.NDArray[np.uint16]]:
        """Return those of some names, and the new number of each name."""
        few, numbers = BarNames(), np.zeros(len(self.names), np.uint16)
        few.kinds = self.kinds
        for number in measured.tolist():
            numbers[number] = few.name(self.names[number]) if number else 0
        return few, numbers


def bars_each(max_bars: int, num_ranks: int) -> int:
    """Return how many bars each rank may have of all."""
    return max(50, max_bars // max(1, num_ranks))


def draw_track(rank: PlacedRank, *, limit: int) -> tuple[Track, BarNames]:
    """Return the bars of one rank, of more than `limit` the longest, and their names."""
    names = BarNames()
    tables, steps = rank.tables, rank.steps
    parts = [
        _phases(tables, rank.phases, names),
        _actions(tables, rank.spans, names),
        _operations(tables, rank.operations, names),
    ]
    begin, length, lane, kind, name = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    left_out = max(0, len(begin) - limit)
    if left_out:
        chosen = np.argsort(-length, kind="stable")[:limit]
        begin, length, lane, kind, name = (column[chosen] for column in (begin, length, lane, kind, name))
    order = np.argsort(begin, kind="stable")
    begin, length, lane, kind, name = (column[order] for column in (begin, length, lane, kind, name))
    names, numbers = names.only(distinct(name))
    track = Track(
        rank=tables.rank,
        begin_ns=begin,
        length_ns=length,
        lane=lane.astype(np.uint8),
        kind=kind.astype(np.uint8),
        name=numbers[name],
        left_out=left_out,
        step_ends_ns=np.ascontiguousarray(steps.windows[:, 1]),
    )
    return track, names


_Columns = tuple[Column, Column, Column, Column, Column]


def _rows(times: Intervals, lane: int, kind: Column | int, name: Column | int) -> _Columns:
    size = len(times)
    return (
        times[:, 0],
        times[:, 1] - times[:, 0],
        np.full(size, lane),
        np.broadcast_to(kind, size).astype(np.int64),
        np.broadcast_to(name, size).astype(np.int64),
    )


def _phases(tables: RankTables, phases: dict[str, Intervals], names: BarNames) -> _Columns:
    known = [times for times in phases.values() if len(times)]
    if not known:
        return _rows(np.zeros((0, 2), np.int64), WORK, 0, 0)
    whole = np.array([[min(int(t[0, 0]) for t in known), max(int(t[-1, 1]) for t in known)]])
    cuts, owner = paint([phases[phase] for phase in ORDER], whole)
    changes = np.flatnonzero(np.diff(owner, prepend=-2))
    begin, end = cuts[changes], np.append(cuts[changes[1:]], cuts[-1])
    owner = owner[changes]
    shown = (owner >= 0) & (owner < len(ORDER)) & (end > begin)
    if events.PP_FORWARD in tables.ops:  # its actions stand for both
        shown &= ~np.isin(owner, [ORDER.index(events.FORWARD), ORDER.index(events.BACKWARD)])
    owner = owner[shown].astype(np.int64)
    kinds = np.array([names.kinds.number(phase) for phase in ORDER])
    called = np.array([names.name(phase.replace("_", " ")) for phase in ORDER])
    return _rows(pair(begin[shown], end[shown]), WORK, kinds[owner], called[owner])


def _actions(tables: RankTables, spans: Array, names: BarNames) -> _Columns:
    times, kinds, called = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for action, (kind, letter) in _ACTIONS.items():
        rows = spans_of(spans, tables, action, ENDED)
        if not len(rows):
            continue
        place, first = number_alike(rows["stage"], rows["microbatch"])
        words = [names.name(f"{letter}{row['microbatch']} of stage {row['stage']}") for row in rows[first]]
        times.append(pair(rows["begin_ns"], rows["end_ns"]))
        kinds.append(np.full(len(rows), names.kinds.number(kind)))
        called.append(np.array(words)[place])
    return _rows(np.concatenate(times), WORK, np.concatenate(kinds), np.concatenate(called))


def _operations(tables: RankTables, operations: Array, names: BarNames) -> _Columns:
    if not len(operations):
        return _rows(np.zeros((0, 2), np.int64), COMMUNICATION, 0, 0)
    returned = np.maximum(operations["returned_ns"], operations["issued_ns"])
    end = np.where(operations["done_ns"] == UNKNOWN_NS, returned, operations["done_ns"])
    blocked = np.maximum(returned - operations["issued_ns"], operations["wait_ns"])
    start = start_of(operations)
    length = end - start
    is_p2p = operations["kind"] == codes.POINT_TO_POINT
    kinds = np.where(
        is_p2p,
        names.kinds.number(POINT_TO_POINT),
        np.where(2 * blocked >= length, names.kinds.number(BLOCKING), names.kinds.number(IN_FLIGHT)),
    )
    apis = find_apis(tables, operations)
    sizes, size = number_distinct(operations["nbytes"])
    columns = (operations["op"], operations["group"], apis.of_operation, size)
    place, first = number_alike(*columns)
    words = []
    for op, group, api, number in zip(*(column[first].tolist() for column in columns), strict=True):
        called = tables.ops[op] if op < len(tables.ops) else "?"
        of = tables.groups.get(group)
        by = f" ({apis.names[api]})" if apis.names[api] not in ("", called) else ""
        where = f" of {of.description or of.name}" if of else ""
        words.append(names.name(f"{called}{by}{where}, {format_bytes(int(sizes[number]))}"))
    return _rows(pair(start, end), COMMUNICATION, kinds, np.array(words)[place])
