"""Threads issue on one group in an order that differs between ranks."""

import numpy as np

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.findings import Finding, at_line, group_words, rank_list
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.matched_collectives import at_position, group_tables, is_of_one_thread, program_calls
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array

KINDS = ("step-mismatch",)


def find_thread_order(job: JobState) -> Finding | None:
    """Return the finding for the first position that calls of different threads met at."""
    found = [finding for group, tables in group_tables(job).items() if (finding := _crossed(job, group, tables))]
    return min(found, key=lambda finding: finding.step or 0, default=None)


def _crossed(job: JobState, group: GroupId, tables: dict[int, Array]) -> Finding | None:
    if any(is_of_one_thread(table) for table in tables.values()):
        return None
    calls = {rank: program_calls(table) for rank, table in tables.items()}
    if any(is_of_one_thread(table) for table in calls.values()):
        return None
    (first, reference), *others = calls.items()
    for rank, table in others:
        _, mine, theirs = np.intersect1d(reference["seq"], table["seq"], return_indices=True)
        a, b = reference[mine], table[theirs]
        for at in np.flatnonzero((a["place"] != b["place"]) & (a["op"] == b["op"]))[:1].tolist():
            places = (int(a["place"][at]), int(b["place"][at]))
            if _by_two_threads(reference, places) and _by_two_threads(table, places):
                return _crossed_finding(job, group, tables, (first, rank), int(a["seq"][at]))
    return None


def _by_two_threads(table: Array, places: tuple[int, int]) -> bool:
    """Say whether a rank calls at both places, each from a thread of its own."""
    one, other = (set(table["thread"][table["place"] == place].tolist()) for place in places)
    return bool(one) and bool(other) and not one & other


def _crossed_finding(
    job: JobState, group: GroupId, tables: dict[int, Array], ranks: tuple[int, int], seq: int
) -> Finding:
    present = at_position(job, {rank: tables[rank] for rank in ranks}, seq)
    known = job.group(group)
    facts = [f"rank {r}: {o.op}{at_line(o.site)}, thread {o.thread}" for r, o in present.items()]
    return Finding(
        kind="step-mismatch",
        summary=f"At #{seq} of {group_words(known)} calls of different threads meet on {rank_list(ranks)}: "
        "threads issue on one group in no fixed order, and results are mixed up.",
        culprit_ranks=tuple(sorted(tables)),
        confidence=0.85,
        group=known,
        op=present[ranks[0]].op,
        seq=seq,
        step=present[ranks[0]].step,
        culprit_call_sites=call_sites(present),
        evidence=tuple(facts),
        advice=("Give each thread a group of its own, or let one thread make all calls of a group.",),
    )
