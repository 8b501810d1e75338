"""Compare what ranks record while they run: calls at one position of a group that do not go together.

What is new is compared in columns; only where that differs, the rules of finished runs decide, on the newest records.
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
"""Operations of a rank that are kept to decide on."""
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

POSITION = np.dtype([("seq", "i8"), ("arguments", "u8"), ("place", "u8")])


@dataclass
class _Watched:
    """One group: positions that wait for the other members, and when it is decided on next."""

    waiting: dict[int, Array] = field(default_factory=dict)  # POSITION, by rank
    arguments_differ: bool = False
    parted_at: int = -1  # the first position at which lines or steps differ
    compared: int = -1  # the newest position compared
    decide_at: int = 0
    closed: bool = False


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
        due = [key for key, watched in self._groups.items() if self._is_due(key, watched, is_last=is_last)]
        return self._decide(due) if due else []

    def _begin_attempt(self, attempt: int) -> None:
        """Forget an attempt when its ranks are restarted: positions count from 0 again."""
        if attempt > self._attempt:
            self._attempt, self._newest, self._groups = attempt, {}, {}

    def _add(self, tables: RankTables) -> None:
        known = self._newest.get(tables.rank)
        rows = tables.operations if known is None else join([known.operations, tables.operations])
        self._newest[tables.rank] = replace(tables, operations=rows[-WINDOW:], spans=tables.spans[:0])
        new = tables.operations[tables.operations["op"] < len(tables.ops)]
        new = new[new["kind"] != codes.POINT_TO_POINT]
        arguments, place = _arguments(new, tables), _place(new, tables)
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
            positions = np.zeros(int(mine.sum()), POSITION)
            positions["seq"], positions["arguments"], positions["place"] = (
                new["seq"][mine],
                arguments[mine],
                place[mine],
            )
            before = watched.waiting.get(tables.rank)
            positions = positions if before is None else np.concatenate([before, positions])
            watched.waiting[tables.rank] = positions[-MAX_WAITING:]

    def _is_due(self, key: GroupKey, watched: _Watched, *, is_last: bool) -> bool:
        """Compare what all local members have; say whether the rules have to decide."""
        here = [rank for rank in key.ranks if rank in self._newest]
        if watched.closed or len(here) < 2 or any(rank not in watched.waiting for rank in here):
            return False
        common = watched.waiting[here[0]]["seq"]
        for rank in here[1:]:
            common = np.intersect1d(common, watched.waiting[rank]["seq"])
        if len(common):
            self._compare(watched, here, common)
        if watched.arguments_differ or (watched.parted_at >= 0 and is_last):
            return watched.compared >= watched.decide_at or is_last
        settled = watched.compared - watched.parted_at >= SETTLING
        return watched.parted_at >= 0 and settled and watched.compared >= watched.decide_at

    @staticmethod
    def _compare(watched: _Watched, here: list[int], common: npt.NDArray[np.int64]) -> None:
        reference: Array | None = None
        for rank in here:
            rows = watched.waiting[rank]
            chosen = np.isin(rows["seq"], common)
            own = np.sort(rows[chosen], order="seq")
            watched.waiting[rank] = rows[~chosen]
            if reference is None:
                reference = own
            elif len(own) == len(reference):
                watched.arguments_differ |= bool((own["arguments"] != reference["arguments"]).any())
                parted = np.flatnonzero(own["place"] != reference["place"])
                if len(parted) and watched.parted_at < 0:
                    watched.parted_at = int(own["seq"][parted[0]])
        watched.compared = max(watched.compared, int(common[-1]))

    def _decide(self, due: list[GroupKey]) -> list[Finding]:
        """Apply the rules of finished runs to the newest records."""
        ranks = [rank_evidence(t, exit=None, stack=None, alive=True) for t in self._newest.values()]
        size = max(tables.world_size for tables in self._newest.values())
        evidence = gather(ranks, world_size=size, manifest=Manifest(), stalled=False, stopped_on_hang_ns=None)
        shift = find_shift(evidence)
        told = []
        for finding in (*find_mismatches(evidence), *([shift] if shift is not None else [])):
            key = next((k for k in due if finding.group and (k.name, k.ranks) == _name(finding)), None)
            if key is not None and finding.kind in KINDS and not self._groups[key].closed:
                self._groups[key].closed = True
                self._groups[key].waiting = {}
                told.append(finding)
        for key in due:
            # Lines may differ by rank in a program that is right: it is looked at again after as many positions.
            watched = self._groups[key]
            watched.decide_at = 2 * watched.compared + 1
            watched.arguments_differ, watched.parted_at = False, -1
        return told


def _name(finding: Finding) -> tuple[str, tuple[int, ...]]:
    return (finding.group.name, finding.group.ranks) if finding.group is not None else ("", ())


def _arguments(rows: Array, tables: RankTables) -> npt.NDArray[np.uint64]:
    """Return a number for what all members must agree on."""

    def those(names: Iterable[str]) -> npt.NDArray[np.bool_]:
        return np.asarray(np.array([name in names for name in tables.ops] or [False])[rows["op"]], np.bool_)

    number = _checksums(tables.ops)[rows["op"]].astype(np.uint64)
    for column, names in (("peer", ROOTED), ("numel", SIZES_AGREE), ("reduce_op", REDUCING)):
        value = np.where(those(names), rows[column], 0).astype(np.int64).astype(np.uint64)
        number = number * np.uint64(1_000_003) + value
    number = number * np.uint64(1_000_003) + np.where(those(("barrier",)), 0, rows["dtype"]).astype(np.uint64)
    # Splits are pairs of values, which a number of each rank cannot show to agree: those told apart are decided on.
    return np.asarray(number + np.where(those((SPLIT,)), rows["tag"], 0).astype(np.uint64), np.uint64)


def _place(rows: Array, tables: RankTables) -> npt.NDArray[np.uint64]:
    """Return a number for the line and the step of each operation."""
    sites: Mapping[int, int] = {
        number: crc32(f"{site.file}:{site.line}".encode()) for number, site in tables.sites.items()
    }
    lines = np.array([sites.get(number, 0) for number in rows["site"].tolist()], np.uint64)
    return np.asarray(lines + (rows["step"].astype(np.uint64) << np.uint64(34)), np.uint64)


def _checksums(names: Iterable[str]) -> npt.NDArray[np.uint32]:
    return np.array([crc32(name.encode()) for name in names] or [0], np.uint32)
