"""Sibling groups: they serve one purpose on other ranks each, as the rows of a device mesh.

What ranks do with one of them is what other ranks do with another: which rank deviates is asked of all.
"""

from dtprof.columns import distinct
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.open_collectives import operation_at
from dtprof.job.axes import purpose_of
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation


def are_siblings(job: JobState, a: GroupId, b: GroupId) -> bool:
    """Say whether two groups are one, or of the same size, without a common member, and of one purpose or line."""
    if a == b:
        return True
    if a.size != b.size or not a.ranks or not b.ranks or not set(a.ranks).isdisjoint(b.ranks):
        return False
    purposes = {purpose_of(job.group(a)), purpose_of(job.group(b))}
    return (len(purposes) == 1 and "" not in purposes) or not _lines_of(job, a).isdisjoint(_lines_of(job, b))


def _lines_of(job: JobState, group: GroupId) -> set[int]:
    tables = (own.collectives.groups.get(group) for rank in group.ranks if (own := job.ranks.get(rank)) is not None)
    return {line for table in tables if table is not None for line in distinct(table["line"]).tolist()} - {0}


def sibling_of(job: JobState, rank: RankState, group: GroupId) -> GroupId | None:
    """Return the group if a rank is a member of it, else the sibling that it used; None where it used none."""
    if rank.rank in group.ranks:
        return group
    return next((own for own in rank.collectives.groups if are_siblings(job, group, own)), None)


def order_of_issue(job: JobState, a: Operation, b: Operation) -> dict[int, bool]:
    """Say of each member of the groups of two operations, or of their siblings, whether it issued `a` before `b`.

    Ranks that have issued neither, or both at one time, are left out.
    """
    is_first = {}
    for rank in job.ranks.values():
        groups = [sibling_of(job, rank, operation.group) for operation in (a, b)]
        if None in groups:
            continue
        made = (operation_at(rank, group, o.seq) for group, o in zip(groups, (a, b), strict=True) if group is not None)
        mine, other = (operation.issued_ns if operation is not None else None for operation in made)
        if mine != other:
            is_first[rank.rank] = other is None or (mine is not None and mine < other)
    return is_first
