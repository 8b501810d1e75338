"""Wait, transfer and exposed time of every operation: its duration, split at the arrival of the last rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis.communication.blocked_time import Blocked
from dtprof.columns import is_any
from dtprof.intervals import Column, Intervals, Mask, cover
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import MatchedOperations, duration_of
from dtprof.job.device_timeline import is_placed
from dtprof.records.events import FROM_ALL, FROM_ROOT, TO_ROOT
from dtprof.records.tables import UNKNOWN_NS, Array

JUMP_NS = 1_000_000
"""So much before the last one came, and clocks or records are wrong; times are rounded to much less."""
EXACT, ESTIMATED, NOT_KNOWN = 0, 1, 2
"""How the arrival of the last rank is known: from its record; from durations; not at all."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Every operation of one rank, one row each; ns."""

    arrival: Column  # when the last rank that this one waits for arrived; on this rank's clock
    source: Column  # EXACT, ESTIMATED or NOT_KNOWN
    culprit: Column  # the rank that it waited for, -1 where not known
    duration: Column  # UNKNOWN_NS where completion is not known
    wait: Column  # UNKNOWN_NS where not known
    exposed_wait: Column  # all exposed time where the arrival is not known
    exposed_transfer: Column
    exposed_in_flight: Column  # of both, up to completion; meaningless where that is not known
    mixed: Mask  # operations that were matched with a different operation
    uncertain: Mask  # operations whose wait is smaller than the error of the clocks
    clock_error: Column  # of exposed_wait and exposed_transfer: what is too much in one is missing in the other
    impossible: Column  # ns by which they ended before the last rank, as its clock says, had begun them; 0 of others

    def of(self, begin: int, end: int) -> "Timing":
        """Return some rows."""
        return Timing(**{name: column[begin:end] for name, column in vars(self).items()})


def time_operations(
    operations: Array,
    matched: MatchedOperations,
    instance_rows: Array,
    blocked: Blocked,
    *,
    op_names: Sequence[str],
    rank: Column,
    errors: ClockErrors,
    device_error_ns: Column,
) -> Timing:
    """Split the duration and the blocked time of each operation at the arrival of the last rank.

    Where that lies within the error of the clocks, who came last is not known, and durations tell.

    Parameters:
        instance_rows: the instance of each row of `matched`.
        op_names: of instances, by number.
        rank: of each operation.
        device_error_ns: by how much times of two devices may be apart; of each operation.
    """
    done, duration = operations["done_ns"], duration_of(operations)
    # On a device it starts when the device comes to it. Where only its duration is known, when it was done is known too
    # roughly to compare between ranks: there, durations tell who waited.
    on_device = (operations["device_ns"] >= 0) & (done != UNKNOWN_NS)
    is_rough = on_device & ~is_placed(operations)
    start = np.where(on_device, done - duration, operations["issued_ns"])
    arrival = start.copy()
    source = np.full(len(operations), NOT_KNOWN, np.int64)
    culprit = np.full(len(operations), -1, np.int64)
    uncertain = np.zeros(len(operations), np.bool_)
    impossible = np.zeros(len(operations), np.int64)
    arrival_error = np.zeros(len(operations), np.int64)
    mixed = np.zeros(len(operations), np.bool_)
    if len(instance_rows):
        rows = matched.every_row
        members = matched.of_each(channel.num_members for channel in matched.channels)
        is_p2p = matched.of_each(channel.is_p2p for channel in matched.channels) > 0
        num_seen, started, took = instance_rows["num_seen"], start[rows], duration[rows]
        alone = members <= 1
        differs = instance_rows["mixed_ops"] & ~is_p2p & ~alone
        mixed[rows] = differs
        exact = (num_seen == members) & ~alone & ~instance_rows["mixed_hosts"] & ~differs & ~is_rough[rows]
        estimated = (num_seen >= 2) & (num_seen <= members) & ~differs & ~exact & (took != UNKNOWN_NS)
        arrived, for_root = _exact_arrival(op_names, is_p2p, instance_rows, started, done[rows])
        last = np.where(for_root, instance_rows["root_rank"], instance_rows["last_rank"])
        error = errors.between(rank[rows], last) + np.where(last == rank[rows], 0, device_error_ns[rows])
        questionable = exact & (arrived - started < error) & (took != UNKNOWN_NS)
        uncertain[rows] = questionable
        ahead = _find_impossible(op_names, exact & ~questionable & ~is_p2p, instance_rows, done[rows])
        if ahead.any():
            ahead[ahead <= errors.between(rank[rows], instance_rows["last_rank"])] = 0
            impossible[rows] = ahead
            questionable |= (ahead > 0) & (took != UNKNOWN_NS)
        exact, estimated = exact & ~questionable, estimated | questionable
        culprit[rows] = np.where(exact, last, -1)
        # Without all records on one clock: who was fastest waited for nobody, the others for the time they took more.
        by_duration = done[rows] - np.minimum(instance_rows["min_duration"], took)
        arrival[rows] = np.where(exact, arrived, np.where(estimated & ~alone, by_duration, started))
        source[rows] = np.where(exact | alone, EXACT, np.where(estimated, ESTIMATED, NOT_KNOWN))
        # The last one is off by the error of its clock, and any other may have been later by that of its own.
        apart = matched.of_each(errors.within(channel.members) for channel in matched.channels)
        by_records = np.where(questionable, np.abs(arrival[rows] - arrived), 0) + apart
        arrival_error[rows] = np.where(exact | questionable, by_records, 0)
    return _split(
        start,
        duration,
        arrival=arrival,
        source=source,
        culprit=culprit,
        arrival_error=arrival_error,
        blocked=blocked,
        mixed=mixed,
        uncertain=uncertain,
        impossible=impossible,
    )


def _find_impossible(op_names: Sequence[str], chosen: Mask, instance_rows: Array, done: Column) -> Column:
    """Return by how much operations were done before the last member had issued them, by one clock; else 0."""
    ahead = np.where(chosen & (done != UNKNOWN_NS), instance_rows["last_start"] - done, 0)
    ahead[ahead < JUMP_NS] = 0
    if ahead.any():
        ahead[~_is_any(instance_rows["op"], FROM_ALL, op_names)] = 0
    return ahead


def _exact_arrival(
    op_names: Sequence[str], is_p2p: Mask, instance_rows: Array, start: Column, done: Column
) -> tuple[Column, Mask]:
    """Return when the last of those arrived that each operation waited for, and whether that was just the root.

    It waited for the last of all, unless it was done before that one came. Then a broadcast or scatter waited for its
    root; a reduce or gather, being sent off, and a message, being buffered, for nobody. Operations in which everybody
    needs everybody are not done before the last one came: times that say so are off by their rounding.
    """
    last = instance_rows["last_start"]
    early = (done != UNKNOWN_NS) & (done < last)
    if not early.any():
        return np.maximum(last, start), early
    from_root = _is_any(instance_rows["op"], FROM_ROOT, op_names) & (instance_rows["root_start"] >= 0) & ~is_p2p
    for_nobody = _is_any(instance_rows["op"], TO_ROOT, op_names) | is_p2p
    for_root = early & from_root
    arrived = np.where(early, np.where(for_nobody, start, done), last)
    return np.maximum(np.where(for_root, np.minimum(instance_rows["root_start"], done), arrived), start), for_root


def _is_any(op: Column, wanted: tuple[str, ...], op_names: Sequence[str]) -> Mask:
    return is_any(op, [number for number, name in enumerate(op_names) if name in wanted])


def _split(
    start: Column,
    duration: Column,
    *,
    arrival: Column,
    source: Column,
    culprit: Column,
    arrival_error: Column,
    blocked: Blocked,
    mixed: Mask,
    uncertain: Mask,
    impossible: Column,
) -> Timing:
    known = source != NOT_KNOWN
    wait = np.where(known & (duration != UNKNOWN_NS), np.clip(arrival - start, 0, np.maximum(duration, 0)), UNKNOWN_NS)
    before = np.zeros(len(start), np.int64)
    after = np.zeros(len(start), np.int64)
    in_flight = np.zeros(len(start), np.int64)
    clock_error = np.zeros(len(start), np.int64)
    for stretch in (blocked.call, blocked.wait):
        length = stretch[:, 1] - stretch[:, 0]
        begin, end = stretch[:, 0], stretch[:, 1]
        waited = np.where(known, np.clip(arrival - begin, 0, length), length)
        before += blocked.length(begin, begin + waited)
        if arrival_error.any():
            sooner, later = (np.clip(waited + sign * arrival_error, 0, length) for sign in (-1, 1))
            clock_error += np.maximum(
                blocked.length(begin + sooner, begin + waited), blocked.length(begin + waited, begin + later)
            )
        after += blocked.length(begin + waited, end)
        in_flight += blocked.length(begin, begin + np.clip(start + duration - begin, 0, length))
    return Timing(
        arrival=arrival,
        source=source,
        culprit=culprit,
        duration=duration,
        wait=wait,
        exposed_wait=before,
        exposed_transfer=after,
        exposed_in_flight=in_flight,
        mixed=mixed,
        uncertain=uncertain,
        clock_error=np.where(known, clock_error, 0),
        impossible=impossible,
    )


def split_blocked(
    blocked: Blocked, timing: Timing, chosen: Mask, shift: Column | None = None
) -> tuple[Intervals, Intervals]:
    """Return the times blocked by the chosen operations before and after the arrival of the last rank.

    Where the arrival is not known everything counts as before: nothing shows that data moved.

    Parameters:
        shift: what is added to the times of each operation; nothing where it is not given.
    """
    begins, arrivals, ends = [], [], []
    for stretch in (blocked.call, blocked.wait):
        rows = np.flatnonzero(chosen & (stretch[:, 1] > stretch[:, 0]))
        begin, end = stretch[rows].T
        at = np.clip(timing.arrival[rows], begin, end)
        not_known = timing.source[rows] == NOT_KNOWN
        if not_known.any():
            np.copyto(at, end, where=not_known)
        own = 0 if shift is None else shift[rows]
        begins.append(begin + own)
        arrivals.append(at + own)
        ends.append(end + own)
    begin, at, end = (np.concatenate(both) for both in (begins, arrivals, ends))
    return blocked.uncovered(cover(begin, at)), blocked.uncovered(cover(at, end))
