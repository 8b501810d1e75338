"""Compare what ranks record while they run: calls at one position of a group that do not go together.

What is new is compared in columns; only where that differs, the rules of finished runs decide, on the records of each
rank around the first position that differs. Looks may be far apart: whatever came between two is compared.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
import numpy.typing as npt

from dtprof.analysis import codes
from dtprof.diagnosis.arguments import REDUCING, ROOTED, SIZES_AGREE, SPLIT, find_mismatches
from dtprof.diagnosis.evidence import GroupKey, gather
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.recorded import group_keys, rank_evidence
from dtprof.diagnosis.shifts import find_shift
from dtprof.tables import Array, Manifest, RankTables, join

WINDOW = 2048
"""Operations of a rank before a position that differs, and after it, on which is decided; so many are kept for that."""
MAX_KEPT = 16_384
"""Operations of a rank that are kept while others have not come to the same positions; beyond, the oldest are gone."""
MAX_WAITING = 65_536
"""Positions of a rank in a group that wait for the same ones of others; beyond, the oldest are not compared."""
SETTLING = 16
"""Positions after the first whose line or step differs, before it is decided whether ranks are out of step."""
KINDS = frozenset(
    {
        *("reduce-op-mismatch", "root-mismatch", "dtype-mismatch", "size-mismatch", "split-size-mismatch"),
        *("collective-order-mismatch", "step-mismatch"),
    }
)

POSITION = np.dtype(
    [("seq", "i8"), ("arguments", "u8"), ("dtype", "i2"), ("reduce_op", "i2"), ("split", "i8"), ("place", "u8")]
)
_UNEVEN = -1
ARGUMENTS, SPLITS, PLACES = "arguments", "splits", "places"
"""In what calls at one position differ: what must agree; the sizes of an exchange, which may; lines and steps."""


@dataclass
class _Watched:
    """One group: positions that wait for the other members, and from which position on it is looked at next."""

    waiting: dict[int, Array] = field(default_factory=dict)  # POSITION, by rank
    differs_at: dict[str, int] = field(default_factory=dict)  # the first position undecided, by what differs
    looks_from: dict[str, int] = field(default_factory=dict)  # the first position that counts, by what differs
    compared: int = -1  # the newest position compared
    closed: bool = False

    def note(self, differs: str, seqs: npt.NDArray[np.int64]) -> None:
        """Take the first of these positions that counts, where none is taken yet."""
        seqs = seqs[seqs >= self.looks_from.get(differs, 0)]
        if len(seqs):
            self.differs_at[differs] = min(int(seqs.min()), self.differs_at.get(differs, int(seqs.min())))

    def first_due(self, *, is_last: bool) -> int | None:
        """Return the first position that can be decided on."""
        settled = is_last or self.compared - self.differs_at.get(PLACES, 0) >= SETTLING
        due = [seq for differs, seq in self.differs_at.items() if differs != PLACES or settled]
        return min(due, default=None)

    def decided(self) -> None:
        """Look again: calls may differ in lines by rank in a program that is right, so only after as many positions."""
        for differs in self.differs_at:
            self.looks_from[differs] = 2 * self.compared + 1
        self.differs_at = {}

    def needs(self, rank: int) -> int:
        """Return the first position whose records are wanted still."""
        waiting = self.waiting.get(rank)
        first = int(waiting["seq"].min()) if waiting is not None and len(waiting) else self.compared + 1
        return min([first, *self.differs_at.values()])


class LiveComparison:
    """Compares the ranks of one host; tells of each group once."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._attempt = -1
        self._newest: dict[int, RankTables] = {}
        self._groups: dict[GroupKey, _Watched] = {}

    def take(self, grown: Iterable[RankTables], *, is_last: bool = False) -> list[Finding]:
        """Add the operations that have settled since the last call, by rank; return mismatches not told of before."""
        grown = list(grown)
        self._begin_attempt(max((tables.attempt for tables in grown), default=-1))
        for tables in grown:
            if tables.attempt == self._attempt and len(tables.operations):
                self._add(tables)
        due: dict[GroupKey, int] = {}
        for key, watched in self._groups.items():
            self._compare_group(key, watched)
            if not watched.closed and (first := watched.first_due(is_last=is_last)) is not None:
                due[key] = first
        told = [finding for key in sorted(due, key=due.__getitem__) for finding in self._decide(key, due)]
        for rank in self._newest:
            self._trim(rank)
        return told

    def _begin_attempt(self, attempt: int) -> None:
        """Forget an attempt when its ranks are restarted: positions count from 0 again."""
        if attempt > self._attempt:
            self._attempt, self._newest, self._groups = attempt, {}, {}

    def _add(self, tables: RankTables) -> None:
        known = self._newest.get(tables.rank)
        rows = tables.operations if known is None else join([known.operations, tables.operations])
        self._newest[tables.rank] = replace(tables, operations=rows, spans=tables.spans[:0])
        new = tables.operations[tables.operations["op"] < len(tables.ops)]
        new = new[new["kind"] != codes.POINT_TO_POINT]
        positions = _positions(new, tables)
        for group_id, key in group_keys(tables)[0].items():
            mine = new["group"] == group_id
            if not mine.any() or len(key.ranks) < 2:
                continue
            watched = self._groups.setdefault(key, _Watched())
            # A call that was refused takes no position in the back end: those after it cannot be counted from here.
            watched.closed |= bool((new["state"][mine] == codes.FAILED).any())
            if watched.closed:
                watched.waiting = {}
                continue
            before = watched.waiting.get(tables.rank)
            own = positions[mine] if before is None else np.concatenate([before, positions[mine]])
            watched.waiting[tables.rank] = own[-MAX_WAITING:]

    def _compare_group(self, key: GroupKey, watched: _Watched) -> None:
        """Compare what all local members have."""
        here = [rank for rank in key.ranks if rank in self._newest]
        if watched.closed or len(here) < 2 or any(rank not in watched.waiting for rank in here):
            return
        common = watched.waiting[here[0]]["seq"]
        for rank in here[1:]:
            common = np.intersect1d(common, watched.waiting[rank]["seq"])
        if not len(common):
            return
        reference: Array | None = None
        for rank in here:
            rows = watched.waiting[rank]
            chosen = np.isin(rows["seq"], common)
            own = np.sort(rows[chosen], order="seq")
            watched.waiting[rank] = rows[~chosen]
            if reference is None:
                reference = own
            elif len(own) == len(reference):
                for differs, where in _differences(reference, own):
                    watched.note(differs, own["seq"][where])
        watched.compared = max(watched.compared, int(common[-1]))

    def _decide(self, key: GroupKey, due: Mapping[GroupKey, int]) -> list[Finding]:
        """Apply the rules of finished runs to the records around the position of a group that is due."""
        rows = {rank: _row_of(tables, key, due[key]) for rank, tables in self._newest.items()}
        near = [_around(self._newest[rank], row) for rank, row in rows.items() if row is not None]
        self._groups[key].decided()
        if not near:
            return []
        ranks = [rank_evidence(tables, exit=None, stack=None, alive=True) for tables in near]
        size = max(tables.world_size for tables in near)
        evidence = gather(ranks, world_size=size, manifest=Manifest(), stalled=False, stopped_on_hang_ns=None)
        shift = find_shift(evidence)
        told = []
        for finding in (*find_mismatches(evidence), *([shift] if shift is not None else [])):
            named = next((k for k in due if finding.group and (k.name, k.ranks) == _name(finding)), None)
            if named is not None and finding.kind in KINDS and not self._groups[named].closed:
                self._groups[named].closed = True
                self._groups[named].waiting = {}
                told.append(finding)
        return told

    def _trim(self, rank: int) -> None:
        """Let go of records that nothing will be decided on."""
        tables = self._newest[rank]
        rows = tables.operations
        if len(rows) <= WINDOW:
            return
        first = len(rows)
        collective = rows["kind"] != codes.POINT_TO_POINT
        for group_id, key in group_keys(tables)[0].items():
            watched = self._groups.get(key)
            if watched is None or watched.closed:
                continue
            wanted = collective & (rows["group"] == group_id) & (rows["seq"] >= watched.needs(rank))
            if wanted.any():
                first = min(first, int(np.argmax(wanted)))
        first = max(first - WINDOW, len(rows) - MAX_KEPT, 0)
        self._newest[rank] = replace(tables, operations=rows[first:].copy())  # a view would keep the whole


def _name(finding: Finding) -> tuple[str, tuple[int, ...]]:
    return (finding.group.name, finding.group.ranks) if finding.group is not None else ("", ())


def _around(tables: RankTables, place: int) -> RankTables:
    """Return the rank with the operations around a row only."""
    return replace(tables, operations=tables.operations[max(0, place - WINDOW) : place + WINDOW])


def _row_of(tables: RankTables, key: GroupKey, seq: int) -> int | None:
    """Return the row of a collective; None where the rank has none, or not any more."""
    group_id = next((number for number, known in group_keys(tables)[0].items() if known == key), -1)
    rows = tables.operations
    found = np.flatnonzero((rows["group"] == group_id) & (rows["seq"] == seq) & (rows["kind"] != codes.POINT_TO_POINT))
    return int(found[0]) if len(found) else None


def _positions(rows: Array, tables: RankTables) -> Array:
    """Return what is compared of each operation."""

    def those(names: Iterable[str]) -> npt.NDArray[np.bool_]:
        return np.asarray(np.array([name in names for name in tables.ops] or [False])[rows["op"]], np.bool_)

    found = np.zeros(len(rows), POSITION)
    number = _checksums(tables.ops)[rows["op"]].astype(np.uint64)
    for column, names in (("peer", ROOTED), ("numel", SIZES_AGREE)):
        value = np.where(those(names), rows[column], 0).astype(np.int64).astype(np.uint64)
        number = number * np.uint64(1_000_003) + value
    found["seq"], found["arguments"], found["place"] = rows["seq"], number, _place(rows, tables)
    found["dtype"] = np.where(those(("barrier",)), codes.NONE, rows["dtype"])
    found["reduce_op"] = np.where(those(REDUCING), rows["reduce_op"], codes.NONE)
    found["split"] = np.where(those((SPLIT,)), np.where(rows["tag"] == 0, rows["numel"] + 1, _UNEVEN), 0)
    return found


def _differences(a: Array, b: Array) -> Iterable[tuple[str, npt.NDArray[np.bool_]]]:
    """Say where the same positions of two ranks differ, and in what."""
    differ = a["arguments"] != b["arguments"]
    for column in ("dtype", "reduce_op"):
        differ |= (a[column] != b[column]) & (a[column] != codes.NONE) & (b[column] != codes.NONE)
    # Uneven splits are pairs of values, which a number of each rank cannot show to agree: the rules decide.
    splits = (a["split"] != b["split"]) | ((a["split"] == _UNEVEN) & (b["split"] == _UNEVEN))
    return ((ARGUMENTS, differ), (SPLITS, splits), (PLACES, a["place"] != b["place"]))


def _place(rows: Array, tables: RankTables) -> npt.NDArray[np.uint64]:
    """Return a number for the line and the step of each operation."""
    sites: Mapping[int, int] = {
        number: crc32(f"{site.file}:{site.line}".encode()) for number, site in tables.sites.items()
    }
    lines = np.array([sites.get(number, 0) for number in rows["site"].tolist()], np.uint64)
    return np.asarray(lines + (rows["step"].astype(np.uint64) << np.uint64(34)), np.uint64)


def _checksums(names: Iterable[str]) -> npt.NDArray[np.uint32]:
    return np.array([crc32(name.encode()) for name in names] or [0], np.uint32)
