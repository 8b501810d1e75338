"""The valid records of one rank: possible times, names, spans by phase.

A file cut short or damaged may hold any value; what cannot be a time is left out here, and counted.
"""

from collections.abc import Collection

import numpy as np

from dtprof.columns import is_any
from dtprof.intervals import Column, Intervals, Mask, pair
from dtprof.records import codes
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables, select

MAX_TIME_NS = 1 << 60
"""36 years of uptime: no host clock goes further, and sums of differences stay within 64 bits."""
UNNAMED = "?"
ENDED = (codes.DONE, codes.FAILED)
"""States of spans that are over, however they ended."""


def valid_operations(rows: Array) -> Array:
    """Return the operations whose times can be: issued first, everything else later or unknown; the table if all can.

    An operation that failed has no completion: when it gave up says nothing about how long it takes.
    """
    # A column of a record table is strided over 100 bytes: compared several times, a contiguous copy is faster.
    issued = np.ascontiguousarray(rows["issued_ns"])
    possible = _are_within(issued, 1) & _are_within(rows["wait_ns"], 0) & (rows["seq"] >= 0) & (rows["nbytes"] >= 0)
    for column in ("returned_ns", "wait_begin_ns", "done_ns"):
        times = np.ascontiguousarray(rows[column])
        later = times >= issued
        later &= times < MAX_TIME_NS
        if not later.all():  # unknown times are the exception: most tables need no second comparison
            later |= times == UNKNOWN_NS
        possible &= later
    failed = rows["state"] == codes.FAILED
    if possible.all() and not failed.any():
        return rows
    valid = select(rows, possible)
    valid["done_ns"][failed[possible]] = UNKNOWN_NS
    return valid


def valid_spans(rows: Array) -> Array:
    """Return the spans whose times can be; the table if all can."""
    ended = (rows["end_ns"] >= rows["begin_ns"]) & _is_time(rows["end_ns"])
    possible = _is_time(rows["begin_ns"]) & ((rows["end_ns"] == UNKNOWN_NS) | ended)
    return rows if possible.all() else select(rows, possible)


def spans_of(spans: Array, tables: RankTables, phase: str, states: Collection[int]) -> Array:
    """Return the spans of one phase that have ended in one of these states."""
    return spans_of_any(spans, tables, (phase,), states)


def spans_of_any(spans: Array, tables: RankTables, phases: Collection[str], states: Collection[int]) -> Array:
    """Return the spans of several phases, in their order, that have ended in one of these states."""
    ids = [i for i, name in enumerate(tables.ops) if name in phases]
    if not ids:
        return spans[:0]
    chosen = is_any(spans["op"], ids) & is_any(spans["state"], states)
    chosen &= spans["end_ns"] != UNKNOWN_NS
    return select(spans, chosen)


def times_of(spans: Array) -> Intervals:
    """Return begin and end of every span."""
    return pair(spans["begin_ns"], spans["end_ns"])


def stride_of(count: int, most: int) -> int:
    """Return the power of two whose multiples are kept of so many numbers, so that at most `most` are.

    What one rank keeps is then among what any other keeps.
    """
    stride = 1
    while count > most * stride:
        stride *= 2
    return stride


def _is_time(column: Column) -> Mask:
    return _are_within(column, 1)


def _are_within(column: Column, least: int) -> Mask:
    """Say which times are at least this and below MAX_TIME_NS."""
    times = np.ascontiguousarray(column)
    # Two reductions without temporaries decide for sound tables, which nearly all are.
    if len(times) and times.min() >= least and times.max() < MAX_TIME_NS:
        return np.ones(len(times), np.bool_)
    return (times >= least) & (times < MAX_TIME_NS)
