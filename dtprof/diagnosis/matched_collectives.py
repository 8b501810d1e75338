"""The collectives that all members of a group issued, matched by their position in it."""

import numpy as np

from dtprof.diagnosis.job_state import JobState, Operation
from dtprof.job.groups import GroupId
from dtprof.records import codes
from dtprof.records.tables import Array, select

MAX_SHIFT = 16
"""Operations a rank may have skipped or added in a row to be recognised."""


def group_tables(job: JobState) -> dict[GroupId, dict[int, Array]]:
    """Return, for each group of which two members left a record, their collectives by position."""
    groups: dict[GroupId, dict[int, Array]] = {}
    for rank in job.ranks.values():
        for group, table in rank.collectives.groups.items() if rank.collectives is not None else ():
            if group.ranks:
                groups.setdefault(group, {})[rank.rank] = table
    return {group: tables for group, tables in groups.items() if len(tables) > 1}


def at_position(job: JobState, tables: dict[int, Array], seq: int) -> dict[int, Operation]:
    """Return the operations of one position."""
    present = {}
    for rank, table in tables.items():
        at = int(np.searchsorted(table["seq"], seq))
        collectives = job.ranks[rank].collectives
        if collectives is not None and at < len(table) and table["seq"][at] == seq:
            present[rank] = collectives.operation(int(table["row"][at]))
    return present


def at_same_positions(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rows of two members of a group that are at the same positions in it."""
    if np.array_equal(a["seq"], b["seq"]):  # as a rule
        return a, b
    _, mine, theirs = np.intersect1d(a["seq"], b["seq"], return_indices=True)
    return select(a, mine), select(b, theirs)


def program_calls(table: Array) -> Array:
    """Return the calls of threads of the program: those of autograd's own are made while another waits for them."""
    known = (table["place"] != 0) & (table["thread"] != 0)
    return select(table, known & ((table["flags"] & codes.INFERRED_SITE) == 0))


def is_of_one_thread(table: Array) -> bool:
    """Say whether one thread made all calls."""
    return bool((table["thread"] == table["thread"][:1]).all())
