"""Logs with nothing but counts: how far each rank had come when a watchdog asked all of them for their dumps."""

from typing import NamedTuple

from dtprof.diagnosis.findings import Finding, capitalised, group_words, rank_list
from dtprof.diagnosis.log_rule import Suspicion, log_rule
from dtprof.diagnosis.logged_job import LoggedJob, group_of
from dtprof.diagnosis.rule import Declared
from dtprof.diagnosis.rules.watchdog_timeout import COLLECT, not_entered
from dtprof.records.tables import Group


class Counts(NamedTuple):
    """How far a rank had come in a group."""

    group_rank: int
    enqueued: int
    completed: int

    @property
    def is_open(self) -> bool:
        """Say whether something had not ended."""
        return self.enqueued > self.completed


Told = dict[int, Counts]
"""By global rank."""


def find_behind(job: LoggedJob) -> Suspicion:
    """Return the finding for ranks whose count of operations stands below that of the others of their group."""
    if job.facts.timeouts or not job.notes("dump-signal"):
        return None
    groups = _groups(job)
    if not groups:
        return "a collective timed out, and the log tells neither which nor how far the ranks had come"
    open_groups = {key: told for key, told in groups.items() if any(one.is_open for one in told.values())}
    if not open_groups:
        named = ", ".join(group_words(_group(key, told)) for key, told in list(groups.items())[:3])
        return f"a collective timed out, and the ranks had ended all they had begun in {named}"
    key, told = max(open_groups.items(), key=lambda item: len(item[1]))
    group = _group(key, told)
    if len({one.group_rank for one in told.values()}) < len(told):
        return f"a collective timed out, and {group_words(group)} stands for several groups in the log"
    seq = min(one.completed for one in told.values() if one.is_open) + 1
    behind = {rank: told[rank].enqueued for rank in sorted(told) if told[rank].enqueued < seq}
    waiting = tuple(sorted(set(told) - set(behind)))
    if not behind:
        return _all_in(group, seq, waiting)
    if len(behind) > len(waiting):
        reason = f"only {rank_list(waiting)} came to #{seq} of {group_words(group)}"
        return f"a collective timed out: {reason}, which may be one operation too many"
    return not_entered(job, group, seq, enqueued=behind, waiting=waiting, confidence=0.6)


def _groups(job: LoggedJob) -> dict[tuple[str, str], Told]:
    """Return the newest counts of each rank in each group of which several ranks told theirs."""
    groups: dict[tuple[str, str], Told] = {}
    for one in job.facts.progress:
        if one.rank is not None and one.enqueued is not None and one.completed is not None:
            counts = Counts(one.group_rank, one.enqueued, one.completed)
            groups.setdefault((one.group, one.description), {})[one.rank] = counts
    return {key: told for key, told in groups.items() if len(told) > 1}


def _group(key: tuple[str, str], told: Told) -> Group | None:
    return group_of(key[0], key[1], set(told))


def _all_in(group: Group | None, seq: int, waiting: tuple[int, ...]) -> Finding:
    return Finding(
        kind="backend-stall",
        summary=f"{capitalised(waiting)} are in #{seq} of {group_words(group)} and it does not end.",
        culprit_ranks=(),
        waiting_ranks=waiting,
        confidence=0.3,
        group=group,
        seq=seq,
        evidence=("every rank that told its counts had begun it",),
        advice=("Look whether ranks of the group are silent, and at the network between the hosts.", COLLECT),
        leaves_open=(
            "whether a rank that told nothing did not come, or the network, a device or the library is at fault",
        ),
    )


RULES: Declared = (log_rule(find_behind, ("rank-skipped-collective", "backend-stall")),)
