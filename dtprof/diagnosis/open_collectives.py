"""Collectives that some members wait in, and where the other members are."""

from dataclasses import dataclass

from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.group_collectives import at_position
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation


@dataclass(frozen=True, kw_only=True)
class OpenCollective:
    """A collective that some members wait in."""

    group: GroupId
    seq: int
    waiting: dict[int, Operation]
    elsewhere: dict[int, Operation]  # members that issued this position and do not wait in it, or do another operation
    absent: tuple[int, ...]  # members with a record that never issued this position


def find_open_collectives(job: JobState) -> list[OpenCollective]:
    """Return the collectives in which ranks wait, those that began to wait first coming first."""
    places: dict[tuple[GroupId, int], dict[int, Operation]] = {}
    for rank in job.ranks.values():
        for operation in rank.open_operations:
            if not operation.p2p:
                places.setdefault((operation.group, operation.seq), {})[rank.rank] = operation
    found = []
    for (group, seq), waiting in places.items():
        members = [rank for rank in group.ranks if rank in job.ranks]
        absent = tuple(r for r in members if job.ranks[r].counts.get((group, False), 0) <= seq)
        issued = {r: o for r in members if r not in absent and (o := operation_at(job.ranks[r], group, seq))}
        elsewhere = {r: operation for r, operation in issued.items() if r not in waiting}
        found.append(OpenCollective(group=group, seq=seq, waiting=waiting, elsewhere=elsewhere, absent=absent))
    return sorted(found, key=lambda collective: max(op.issued_ns for op in collective.waiting.values()))


def operation_at(rank: RankState, group: GroupId, seq: int) -> Operation | None:
    table = rank.collectives.groups.get(group)
    return at_position({rank.rank: rank}, {rank.rank: table}, seq).get(rank.rank) if table is not None else None
