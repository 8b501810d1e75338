"""Threads issue operations on one group in an order that differs between ranks."""

import numpy as np

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.group_collectives import at_position, at_same_positions, group_tables, is_of_one_thread, program_calls
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array


def find_thread_order(case: Case) -> list[Finding]:
    """Return the finding for the first sequence number at which operations of different threads were paired."""
    groups = group_tables(case.job.ranks).items()
    found = [finding for group, tables in groups if (finding := _crossed(case.job, group, tables)) is not None]
    return sorted(found, key=lambda finding: finding.step or 0)[:1]


def _crossed(job: JobState, group: GroupId, tables: dict[int, Array]) -> Finding | None:
    if any(is_of_one_thread(table) for table in tables.values()):
        return None
    calls = {rank: program_calls(table) for rank, table in tables.items()}
    if any(is_of_one_thread(table) for table in calls.values()):
        return None
    (first, reference), *others = calls.items()
    for rank, table in others:
        a, b = at_same_positions(reference, table)
        for at in np.flatnonzero((a["line"] != b["line"]) & (a["op"] == b["op"]))[:1].tolist():
            places = (int(a["line"][at]), int(b["line"][at]))
            if _by_two_threads(reference, places) and _by_two_threads(table, places):
                return _crossed_finding(job, group, tables, (first, rank), int(a["seq"][at]))
    return None


def _by_two_threads(table: Array, places: tuple[int, int]) -> bool:
    """Say whether a rank calls at both places, each from a thread of its own."""
    one, other = (set(table["thread"][table["line"] == place].tolist()) for place in places)
    return bool(one) and bool(other) and not one & other


def _crossed_finding(
    job: JobState, group: GroupId, tables: dict[int, Array], ranks: tuple[int, int], seq: int
) -> Finding:
    present = at_position(job.ranks, {rank: tables[rank] for rank in ranks}, seq)
    known = job.group(group)
    facts = [f"rank {r}: {o.op}{at_line(o.site)}, thread {o.thread}" for r, o in present.items()]
    return Finding(
        kind="step-mismatch",
        summary=f"At #{seq} of {group_words(known)} calls of different threads meet on {list_ranks(ranks)}: "
        "threads issue on one group in no fixed order, and results are mixed up.",
        culprit_ranks=tuple(sorted(tables)),
        grade=0.85,
        group=known,
        op=present[ranks[0]].op,
        seq=seq,
        step=present[ranks[0]].step,
        culprit_call_sites=call_sites(present),
        evidence=tuple(facts),
        advice=("Give each thread a group of its own, or let one thread make all calls of a group.",),
    )


RULES: Declared = (Rule(kinds=("step-mismatch",), stages=(Stage.MISPAIRED,), find=find_thread_order),)
