"""Replay the collectives of a job as if every call blocked until all members had made it: who waits in a ring then.

Asynchronous calls and buffers may let an order pass that hangs at another time. The replay is the strictest reading of
the order in which threads issue: a ring in it can hang on a backend that works off a group's operations in order.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from dtprof.intervals import Column
from dtprof.job.cyclic_waits import find_closed_sets
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array

MAX_REPLAYED = 200_000
"""Calls of all ranks that are replayed: programs repeat, so the first rounds show the order."""

CollectivePlace = tuple[GroupId, int]
"""A collective: its group, and its position in it."""


def find_ring(groups: Mapping[GroupId, Mapping[int, Array]]) -> dict[int, CollectivePlace]:
    """Return where ranks would wait for one another, for ever, if each call blocked; empty where all would end.

    Parameters:
        groups: the collectives of each group, by member (group_collectives.COLLECTIVE).
    """
    common = {group: _common_positions(tables) for group, tables in groups.items()}
    if _is_by_arrival(groups, common):
        return {}
    order = _order_of_threads(groups, common)
    if sum(len({group for group, _ in calls}) > 1 for calls in order.values()) < 2:
        return {}  # no two threads share several groups
    came: dict[CollectivePlace, list[tuple[int, int]]] = {}
    at = dict.fromkeys(order, 0)
    ready = deque(order)
    while ready:
        thread = ready.popleft()
        if at[thread] == len(order[thread]):
            continue
        place = order[thread][at[thread]]
        here = came.setdefault(place, [])
        here.append(thread)
        if len(here) == len(groups[place[0]]):
            for member in here:
                at[member] += 1
            ready.extend(here)
            del came[place]
    return _closed_waits(came, groups)


def _closed_waits(
    came: Mapping[CollectivePlace, list[tuple[int, int]]], groups: Mapping[GroupId, Mapping[int, Array]]
) -> dict[int, CollectivePlace]:
    """Return the places of a set of ranks that wait for one another only."""
    places = {rank: place for place, threads in came.items() for rank, _ in threads}
    if sum(map(len, came.values())) > len(places):
        return {}  # several threads of a rank wait: which of them would help which, the records do not show
    edges = {
        rank: [other for other in groups[place[0]] if places.get(other) != place] for rank, place in places.items()
    }
    rings = (ring for ring in find_closed_sets(edges) if len(ring) > 1)
    return next(({rank: places[rank] for rank in ring} for ring in rings), {})


def _is_by_arrival(groups: Mapping[GroupId, Mapping[int, Array]], common: Mapping[GroupId, tuple[int, int]]) -> bool:
    """Say whether every rank issued its collectives in the order in which their last members arrived.

    Then that order is one in which all of them can end, whatever the clocks: no rank waits for a later one. So it is in
    programs that wait for each call, and finding it out in columns spares their replay.
    """
    parts: dict[int, list[tuple[Column, Column]]] = {}
    for group, tables in groups.items():
        first, last = common[group]
        # By position, each table is in order: rows between two are a slice, which copies nothing.
        kept = {rank: table[slice(*np.searchsorted(table["seq"], (first, last + 1)))] for rank, table in tables.items()}
        reference = next(iter(kept.values()))
        if any(not np.array_equal(table["seq"], reference["seq"]) for table in kept.values()):
            return False
        arrival = np.maximum.reduce([table["issued_ns"] for table in kept.values()])
        for rank, table in kept.items():
            parts.setdefault(rank, []).append((table["row"], arrival))
    for columns in parts.values():
        rows, arrivals = (np.concatenate(column) for column in zip(*columns, strict=True))
        if (np.diff(arrivals[np.argsort(rows)]) <= 0).any():
            return False
    return True


def _common_positions(tables: Mapping[int, Array]) -> tuple[int, int]:
    """Return the first and the last position that all members have."""
    first = max(int(table["seq"][0]) if len(table) else 1 for table in tables.values())
    last = min(int(table["seq"][-1]) if len(table) else 0 for table in tables.values())
    return first, last


def _order_of_threads(
    groups: Mapping[GroupId, Mapping[int, Array]], common: Mapping[GroupId, tuple[int, int]]
) -> dict[tuple[int, int], list[CollectivePlace]]:
    """Return the collectives that all members made, by rank and thread in the order of issue."""
    keys = list(groups)
    ranks = sorted({rank for tables in groups.values() for rank in tables})
    order: dict[tuple[int, int], list[CollectivePlace]] = {}
    for rank in ranks:
        parts = []
        for number, group in enumerate(keys):
            table = groups[group].get(rank)
            if table is None:
                continue
            first, last = common[group]
            kept = table[(table["seq"] >= first) & (table["seq"] <= last)][: MAX_REPLAYED // len(ranks)]
            parts.append(np.rec.fromarrays((kept["row"], kept["thread"], kept["seq"], np.full(len(kept), number))))
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows["f0"], kind="stable")][: MAX_REPLAYED // len(ranks)]
        for thread, seq, number in zip(rows["f1"].tolist(), rows["f2"].tolist(), rows["f3"].tolist(), strict=True):
            order.setdefault((rank, thread), []).append((keys[number], seq))
    return order
