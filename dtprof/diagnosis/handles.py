"""Asynchronous operations whose handle one rank never waited for, where its peers did."""

from itertools import islice

import numpy as np

from dtprof.analysis import codes
from dtprof.diagnosis.arguments import group_tables
from dtprof.diagnosis.endings import call_sites
from dtprof.diagnosis.evidence import Evidence, GroupKey, Operation
from dtprof.diagnosis.findings import Finding, at_line, group_words, wait_words
from dtprof.tables import Array

RECEIVE_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that fill a buffer on every member."""
MAX_PEERS = 8
"""Members that a rank is compared with: a thousand with a thousand would take minutes."""


def find_unwaited(evidence: Evidence) -> list[Finding]:
    """Return a finding for each line at which a rank dropped handles that other ranks wait for at that line."""
    found: dict[tuple[object, int], Finding] = {}
    for group, tables in group_tables(evidence).items():
        for rank, table in tables.items():
            others = dict(islice(((r, other) for r, other in tables.items() if r != rank), MAX_PEERS))
            for operation, count, waiting in _dropped(evidence, rank, table, others):
                key = (operation.site, rank)
                if key not in found:
                    found[key] = _finding(evidence, group, operation, rank=rank, count=count, waiting=waiting)
    return list(found.values())


def _dropped(
    evidence: Evidence, rank: int, table: Array, others: dict[int, Array]
) -> list[tuple[Operation, int, tuple[int, ...]]]:
    """Return operations never waited for, the first of each line, how often, and who waits there."""
    sweep = evidence.ranks[rank].sweep
    if sweep is None:
        return []
    is_async = (table["flags"] & codes.ASYNC) != 0
    open_ended = table["row"] >= table["row"][-1]  # the newest may be waited for yet
    mine = table[is_async & (table["waits"] == 0) & (table["place"] != 0) & ~open_ended]
    results = []
    for place in np.unique(mine["place"]):
        here = mine[mine["place"] == place]
        # A line at which this rank waits sometimes may wait by other means (is_completed) at other times.
        if ((table["place"] == place) & (table["waits"] > 0)).any():
            continue
        operation = sweep.operation(int(here["row"][0]))
        if operation.op not in RECEIVE_ALL or operation.site is None or operation.site.label is not None:
            continue
        waiting = tuple(sorted(r for r, other in others.items() if _waits_there(other, here)))
        if 2 * len(waiting) >= len(others) and waiting:
            results.append((operation, len(here), waiting))
    return results


def _waits_there(other: Array, here: Array) -> bool:
    """Say whether another rank made the same calls at the same line, and waited for all of them."""
    rows = other[np.isin(other["seq"], here["seq"]) & (other["place"] == here["place"][0])]
    return len(rows) == len(here) and bool((rows["waits"] > 0).all())


def _finding(
    evidence: Evidence, group: GroupKey, operation: Operation, *, rank: int, count: int, waiting: tuple[int, ...]
) -> Finding:
    known = evidence.group(group)
    times = f"{count} time{'' if count == 1 else 's'}"
    return Finding(
        kind="unwaited-async",
        summary=f"Rank {rank} never waited for {operation.op} #{operation.seq} of {group_words(known)}"
        f"{at_line(operation.site)}, {times}: what it fills may be used before it is there.",
        culprit_ranks=(rank,),
        confidence=0.85,
        group=known,
        op=operation.op,
        seq=operation.seq,
        step=operation.step,
        culprit_call_sites=call_sites({rank: operation}),
        evidence=(f"{wait_words(waiting)} for the handle at the same line, rank {rank} never did",),
        advice=("Call wait() on the handle on every rank before the buffer is used.",),
    )
