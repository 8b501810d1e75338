"""Logs with counts only: the progress of each rank when a watchdog asked all of them for dumps."""

from typing import NamedTuple

from dtprof.diagnosis.findings import Finding, capitalised, group_words, wait_words
from dtprof.diagnosis.log_findings.log_rule import Suspicion, log_finding, log_rule
from dtprof.diagnosis.log_findings.logged_absences import COLLECT, DID_LAST, fewer_calls_finding
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, group_of
from dtprof.formatting import list_ranks
from dtprof.records.tables import Group


class Counts(NamedTuple):
    """The progress of a rank in a group."""

    group_rank: int
    enqueued: int
    completed: int

    @property
    def is_open(self) -> bool:
        """Say whether an operation had not completed."""
        return self.enqueued > self.completed


RankCounts = dict[int, Counts]
"""By global rank."""


def find_behind(job: LoggedJob) -> Suspicion:
    """Return the finding for ranks that issued fewer operations than the others of their group."""
    if job.facts.timeouts or not job.notes("dump-signal"):
        return None
    groups = _groups(job)
    if not groups:
        return "a collective timed out, and the log names neither the collective nor the progress of the ranks"
    open_groups = {key: counts for key, counts in groups.items() if any(rank.is_open for rank in counts.values())}
    if not open_groups:
        named = ", ".join(group_words(_group(key, counts)) for key, counts in list(groups.items())[:3])
        return f"a collective timed out, and the ranks had completed all they had issued in {named}"
    key, counts = max(open_groups.items(), key=lambda item: len(item[1]))
    group = _group(key, counts)
    if len({rank.group_rank for rank in counts.values()}) < len(counts):
        return f"a collective timed out, and {group_words(group)} stands for several groups in the log"
    seq = min(rank.completed for rank in counts.values() if rank.is_open) + 1
    behind = {rank: counts[rank].enqueued for rank in sorted(counts) if counts[rank].enqueued < seq}
    waiting = tuple(sorted(set(counts) - set(behind)))
    if not behind:
        return _find_observer(job, group, seq, waiting) or _all_in(job, group, seq, waiting)
    if len(behind) > len(waiting):
        reason = f"only {list_ranks(waiting)} came to #{seq} of {group_words(group)}"
        return f"a collective timed out: {reason}, which may be one operation too many"
    return fewer_calls_finding(job, group, seq, enqueued=behind, waiting=waiting, grade=0.6)


def _find_observer(job: LoggedJob, group: Group | None, seq: int, waiting: tuple[int, ...]) -> Finding | None:
    """Return the finding for ranks that saw others' signal to dump, and had no timeout of their own."""
    observers = sorted({note.rank for note in job.notes("dump-observed") if note.rank is not None} - set(waiting))
    if not observers or len(observers) >= len(waiting):
        return None
    return log_finding(
        job,
        "rank-skipped-collective",
        f"{capitalised(observers)} had no timeout; {wait_words(waiting)} in #{seq} of {group_words(group)}.",
        culprits=observers,
        waiting=waiting,
        grade=0.4,
        group=group,
        seq=seq,
        evidence=(f"{list_ranks(observers)} only observed that other ranks asked for dumps",),
        advice=(DID_LAST, COLLECT),
        leaves_open=("how far these ranks had come: their counts are not in the log",),
    )


def _groups(job: LoggedJob) -> dict[tuple[str, str], RankCounts]:
    """Return the newest counts of each rank, by group, of groups with the counts of several ranks."""
    groups: dict[tuple[str, str], RankCounts] = {}
    for progress in job.facts.progress:
        if progress.rank is not None and progress.enqueued is not None and progress.completed is not None:
            counts = Counts(progress.group_rank, progress.enqueued, progress.completed)
            groups.setdefault((progress.group, progress.description), {})[progress.rank] = counts
    return {key: counts for key, counts in groups.items() if len(counts) > 1}


def _group(key: tuple[str, str], counts: RankCounts) -> Group | None:
    return group_of(key[0], key[1], set(counts))


def _all_in(job: LoggedJob, group: Group | None, seq: int, waiting: tuple[int, ...]) -> Finding:
    return log_finding(
        job,
        "backend-stall",
        f"{capitalised(waiting)} are in #{seq} of {group_words(group)}, and it does not complete.",
        waiting=waiting,
        grade=0.3,
        group=group,
        seq=seq,
        evidence=("every rank that reported its counts had issued it",),
        advice=("Look whether ranks of the group are silent, and at the network between the hosts.", COLLECT),
        leaves_open=("whether a silent rank did not join, or the network, a device or the library is at fault",),
    )


RULES: Declared = (log_rule(find_behind, ("rank-skipped-collective", "backend-stall")),)
