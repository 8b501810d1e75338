"""The main line of one rank: computation between the operations it issues and those it waits for.

The line is cut where an operation is issued, where the rank begins and ceases to wait, where its phase changes and
where steps end. A piece between two cuts is computation of its phase, or a wait; a wait ends when its operation is
done, and what it lasts beyond that is the time to wake up.
"""

from dataclasses import dataclass

import numpy as np

from dtprof.analysis.communication.bucket_reductions import find_superseded
from dtprof.analysis.map_reduce.placed_ranks import RankTiming
from dtprof.analysis.map_reduce.reduction_tasks import RankTask
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.columns import distinct
from dtprof.intervals import Column, Mask, near, paint
from dtprof.job.axes import purpose_of
from dtprof.job.groups import Channel
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS

OTHER = "other"
"""Computation of no phase."""
LABELS = (events.HOST_BOUND, *ORDER, OTHER)
LATE_NS, LATE_ON_BUSY_HOST_NS = 50_000, 5_000_000
"""A completion recorded so long after a call, or after a wait, was still what ended it: another thread records it.

Calls of asynchronous operations return before they are done. Waits do not, but the thread that records their
completion may wait for a core: on 2 cores at load 5, a third of DDP's were more than 50 us late, the latest 1.9 ms.
"""


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """The measured steps of one rank; times in ns on the clock of the reference."""

    rank: int
    host: str
    steps: Column  # their numbers
    bounds: Column  # begin of the first, and the end of each
    cuts: Column  # of the line; the first is where it begins
    label: Column  # of the piece that ends at each cut, position in LABELS; meaningless for waits
    waits_for: Column  # the operation that the piece waits for, a row of those below; -1: it computes
    channels: tuple[Channel, ...]
    channel: Column  # of each operation, position in channels
    seq: Column
    op: Column  # position in ops
    ops: tuple[str, ...]
    group: Column  # position in groups
    groups: tuple[str, ...]
    group_sizes: tuple[int, ...]
    nbytes: Column
    is_wide_sum: Mask  # reductions of 32-bit numbers on a device
    is_superseded: Mask  # gradients that are reduced again in the same step
    issued: Column
    done: Column
    seen_from: Column  # messages on the host: when it began to wait, before which no completion is seen; else `issued`
    unknown: int  # operations in these steps of which nobody saw when they were done
    stage: int = -1


@dataclass(frozen=True, kw_only=True)
class LineCollector:
    """Collects the main line of each rank; picklable."""

    first: int  # step
    last: int

    def at(self, rank: RankTiming, _: RankTask) -> RankLine:
        """Return the line of one rank over these steps."""
        return draw_line(rank, self.first, self.last)


def draw_line(rank: RankTiming, first: int, last: int) -> RankLine:
    """Return the main line of one rank from the first to the last of these steps."""
    tables, operations = rank.tables, rank.operations
    numbers, windows = rank.steps.between(first, last)
    bounds = np.r_[windows[:1, 0], windows[:, 1]]
    begin, end = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
    issued = operations["issued_ns"]
    channel = np.full(len(operations), -1, np.int64)
    seq = np.zeros(len(operations), np.int64)
    for number, (rows, seqs) in enumerate(zip(rank.matched.rows, rank.matched.seqs, strict=True)):
        channel[rows], seq[rows] = number, seqs
    inside = (
        (issued < end) & ((operations["done_ns"] > begin) | (operations["done_ns"] == UNKNOWN_NS)) & (issued >= begin)
    )
    chosen = np.flatnonzero(inside & (channel >= 0) & (operations["done_ns"] != UNKNOWN_NS) & rank.blocked.known)
    unknown = int(np.count_nonzero(inside)) - len(chosen)
    chosen = chosen[np.argsort(issued[chosen], kind="stable")]
    done = operations["done_ns"][chosen].copy()
    wait_begin, wait_end, waits_for = _list_waits(rank, chosen, done, (begin, end))
    window = np.array([[begin, end]])
    layers = [near(rank.phases[phase], window) for phase in LABELS[:-1]]
    times, owner = paint(layers, window)
    cuts = np.concatenate((times[(times > begin) & (times < end)], bounds[1:-1]))
    # A rank that waits does so until the operation is done: what else happens meanwhile cuts no piece.
    cuts = cuts[~_are_inside(cuts, wait_begin, wait_end)]
    cuts = distinct(
        np.concatenate(
            (
                cuts,
                issued[chosen][~_are_inside(issued[chosen], wait_begin, wait_end)],
                wait_begin,
                wait_end,
                [begin, end],
            )
        )
    )
    cuts = cuts[(cuts >= begin) & (cuts <= end)]
    middle = cuts - np.diff(cuts, prepend=cuts[0]) // 2 - 1
    label = (
        owner[np.clip(np.searchsorted(times, middle, "right") - 1, 0, None)]
        if len(times)
        else np.zeros(len(cuts), np.int64)
    )
    of_cut = np.full(len(cuts), -1, np.int64)
    of_cut[np.searchsorted(cuts, wait_end)] = waits_for
    seen_from = issued[chosen].copy()
    on_host = ((operations["flags"][chosen] & codes.DEVICE) == 0) & (operations["kind"][chosen] == codes.POINT_TO_POINT)
    waited = np.flatnonzero(on_host[waits_for])
    seen_from[waits_for[waited]] = wait_begin[waited]
    groups = {number: purpose_of(group) or group.name for number, group in tables.groups.items()}
    numbering = sorted(groups)
    return RankLine(
        rank=tables.rank,
        host=tables.host,
        steps=numbers,
        bounds=bounds,
        cuts=cuts,
        label=np.where(label < 0, len(LABELS) - 1, label),
        waits_for=of_cut,
        channels=tuple(rank.matched.channels),
        channel=channel[chosen],
        seq=seq[chosen],
        op=operations["op"][chosen].astype(np.int64),
        ops=(*tables.ops, "?"),
        group=np.searchsorted(numbering, operations["group"][chosen]),
        groups=tuple(groups[number] for number in numbering),
        group_sizes=tuple(tables.groups[number].size for number in numbering),
        nbytes=operations["nbytes"][chosen],
        is_wide_sum=(operations["dtype"][chosen] == codes.DTYPE_CODES["float32"])
        & ((operations["flags"][chosen] & codes.DEVICE) != 0)
        & (operations["reduce_op"][chosen] != codes.NONE),
        is_superseded=find_superseded(rank, chosen, np.searchsorted(bounds[1:], issued[chosen], "left")),
        issued=np.minimum(np.maximum(issued[chosen], begin), end),
        done=done,
        seen_from=np.minimum(np.maximum(seen_from, begin), end),
        unknown=unknown,
    )


def _list_waits(
    rank: RankTiming, chosen: Column, done: Column, window: tuple[int, int]
) -> tuple[Column, Column, Column]:
    """Return begin and end of each wait in order of time, and the operation it is for; a time is waited for one only.

    The completion of an operation that was recorded just after the wait for it is set to the end of that.
    """
    blocked = rank.blocked
    stretches = (blocked.wait,) if len(blocked.covered) else (blocked.call, blocked.wait)
    parts = []
    for stretch in stretches:
        begin, end = stretch[chosen, 0], stretch[chosen, 1]
        late = LATE_ON_BUSY_HOST_NS if stretch is blocked.wait else LATE_NS
        waits = blocked.counts[chosen] & (end > begin) & (done > begin) & (done <= end + late)
        waits &= (begin >= window[0]) & (end <= window[1])
        rows = np.flatnonzero(waits)
        done[rows] = np.minimum(done[rows], end[rows])
        parts.append((begin[rows], end[rows], rows))
    begin, end, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((end, begin))
    begin, end, rows = begin[order], end[order], rows[order]
    before = np.concatenate(([window[0]], np.maximum.accumulate(end)[:-1])) if len(end) else end
    begin = np.maximum(begin, before)
    kept: Mask = (end > begin) & (done[rows] > begin)
    return begin[kept], end[kept], rows[kept]


def _are_inside(times: Column, begin: Column, end: Column) -> Mask:
    """Say which times lie inside one of these sorted stretches, not at their ends."""
    if not len(begin):
        return np.zeros(len(times), np.bool_)
    at = np.searchsorted(begin, times, "left") - 1
    inside: Mask = (at >= 0) & (times < end[np.maximum(at, 0)])
    return inside
