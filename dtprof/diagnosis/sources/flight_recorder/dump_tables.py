"""Flight Recorder dumps as data: one rank at a time, small however long the ring of its recorder was.

Readers fill these tables, rules read them. Times are nanoseconds of the clock of day, as the dumps hold them.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtprof.records.sites import Site

NO_LABEL = -1


@dataclass(frozen=True, kw_only=True)
class CollectiveArguments:
    """Arguments of a collective: all but the line must agree over the members of a group at one position."""

    op: str
    numel_in: int  # -1: not known, or free to differ between members
    numel_out: int
    dtype: str  # empty: not known
    site: Site | None


class ArgumentTable:
    """Labels by number: a dump names the same few again and again."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._labels: list[CollectiveArguments] = []

    def number(self, op: str, numel_in: int, numel_out: int, dtype: str, site: Site | None) -> int:
        """Return the number of a label."""
        key = (op, numel_in, numel_out, dtype, site)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._labels)
            self._labels.append(
                CollectiveArguments(op=op, numel_in=numel_in, numel_out=numel_out, dtype=dtype, site=site)
            )
        return number

    def __getitem__(self, number: int) -> CollectiveArguments:
        return self._labels[number]

    def __iter__(self) -> Iterator[CollectiveArguments]:
        return iter(self._labels)


@dataclass(frozen=True, kw_only=True)
class DumpGroup:
    """A process group as one dump tells it; `ranks` is empty where it does not."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnfinishedOperation:
    """An operation that had not ended when the dump was made."""

    group: str
    op: str
    seq: int  # position in the group as torch counts, from 1; collectives and point-to-point apart
    p2p: bool
    row: int  # in Dump.rows
    numel_in: int
    numel_out: int
    dtype: str
    site: Site | None
    created_ns: int
    timeout_ms: int
    started: bool
    peers: tuple[int, int] | None = None  # of send and recv: sender and receiver, as ranks in the group


@dataclass(frozen=True)
class OperationColumns:
    """Operations in the order of issue, in columns: collectives, and those point-to-point that had not ended."""

    groups: "array[int]"  # in the order of Dump.issued
    seqs: "array[int]"  # -1: not known, or point-to-point
    labels: "array[int]"  # NO_LABEL: point-to-point
    issued_ns: "array[int]"  # 0: not known

    @classmethod
    def empty(cls) -> "OperationColumns":
        """Return no rows."""
        return cls(array("i"), array("q"), array("i"), array("q"))

    def __len__(self) -> int:
        return len(self.groups)

    def append(self, group: int, seq: int, label: int, issued_ns: int) -> None:
        """Add a row."""
        self.groups.append(group)
        self.seqs.append(seq)
        self.labels.append(label)
        self.issued_ns.append(issued_ns)


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One rank's dump."""

    rank: int
    path: str
    version: str
    backend: str
    groups: dict[str, DumpGroup]
    rows: OperationColumns
    cut: dict[str, int]  # position in a group of operations issued together, the first of which may be overwritten
    pending: tuple[UnfinishedOperation, ...]
    issued: dict[str, int]  # by group, in the order in which entries name them: the newest collective
    status: dict[str, tuple[int, int]]  # by group: last enqueued and last completed, collective or point-to-point
    p2p_groups: frozenset[str]  # groups in which an entry is of a point-to-point operation
    p2p_counts: dict[tuple[str, str, tuple[int, int]], int]  # by group, send or recv, and sender and receiver
    whole: bool  # nothing was overwritten in the ring or left out
    newest_ns: int  # when the newest operation was issued; 0: no entry
    last_done_ns: int  # the last known end of an operation; 0: unknown
    last_site: Site | None
    written_ns: int  # when the file was written
    problems: tuple[str, ...] = field(default=())
