"""The input of rules: the state of a job, and facts derived from it, each computed once."""

from collections.abc import Callable, Iterable
from functools import cached_property

from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.open_collectives import OpenCollective, find_open_collectives
from dtprof.job.agreement import Disagreement, find_disagreement
from dtprof.job.group_collectives import group_tables
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.job.wait_graph import Wait, absent_members, find_cycle, is_met

Find = Callable[["Case"], Iterable[Finding]]
"""A rule: gives its findings, the most probable first."""


class Case:
    """A job under diagnosis."""

    def __init__(self, job: JobState) -> None:
        """Derive nothing yet."""
        self.job = job
        self._findings: dict[Find, tuple[Finding, ...]] = {}

    def findings(self, find: Find) -> tuple[Finding, ...]:
        """Return the findings of a rule; the columns of whole runs are compared once for all rules."""
        if find not in self._findings:
            self._findings[find] = tuple(find(self))
        return self._findings[find]

    @cached_property
    def open_collectives(self) -> list[OpenCollective]:
        """Collectives in which ranks wait, those that began to wait first coming first."""
        return find_open_collectives(self.job)

    @cached_property
    def disagreements(self) -> dict[GroupId, Disagreement]:
        """The first collective of each group on which its members disagree."""
        groups = group_tables(self.job.ranks).items()
        first = ((group, find_disagreement(self.job.ranks, group, tables)) for group, tables in groups)
        return {group: disagreement for group, disagreement in first if disagreement is not None}

    @cached_property
    def cycle(self) -> tuple[int, ...]:
        """Ranks that wait for one another and for nobody else."""
        return find_cycle(self.job.waits)

    @cached_property
    def unmet_messages(self) -> list[Wait]:
        """Waits for messages whose other end is not posted, in the order of issue."""
        awaited = [wait for waits in self.job.waits.values() for wait in waits if wait.operation.p2p and wait.awaited]
        # What is posted and held back on its device is no missing message.
        unmet = [wait for wait in awaited if not is_met(self.job.ranks, wait.rank, wait.operation)]
        return sorted(unmet, key=lambda wait: wait.operation.issued_ns)

    @cached_property
    def awaited_leavers(self) -> tuple[int, ...]:
        """Ranks that ended in order though others wait for them."""
        job = self.job
        operations = [o for r in job.ranks.values() if not r.finished and (o := r.first_blocking) is not None]
        peers = {operation.peer_rank for operation in operations if operation.p2p}
        places = {(operation.group, operation.seq) for operation in operations if not operation.p2p}
        awaited = peers.union(*(absent_members(job.ranks, group, seq, lost=job.lost) for group, seq in places))
        # What its device had not completed when a process ended, it never will.
        awaited.update(r.rank for r in job.ranks.values() if any((o.group, o.seq) in places for o in _left_open(r)))
        return tuple(sorted(rank for rank in awaited if rank in job.ranks and job.ranks[rank].finished))


def _left_open(rank: RankState) -> Iterable[Operation]:
    return (o for o in rank.open_operations if rank.finished and o.on_device and not o.p2p)
