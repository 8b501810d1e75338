"""Logs with nothing but counts: how far each rank had come when a watchdog asked all of them for their dumps."""

from dtprof.diagnosis.findings import Finding, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.logs.facts import Progress
from dtprof.diagnosis.logs.job import Job, group_of
from dtprof.diagnosis.logs.watchdog import COLLECT
from dtprof.tables import Group

Told = dict[int, Progress]
AFTER = "whether they did not call it or were stuck inside the call: the count is raised after it returns"


def find_behind(job: Job) -> tuple[Finding | None, tuple[str, ...]]:
    """Return the finding for ranks whose count of operations stands below that of the others of their group."""
    if job.facts.timeouts or not job.notes("dump-signal", "dump-from"):
        return None, ()
    groups = _groups(job)
    if not groups:
        return None, ("a collective timed out, and the log tells neither which nor how far the ranks had come",)
    open_groups = {key: told for key, told in groups.items() if any(_outstanding(one) for one in told.values())}
    if not open_groups:
        named = ", ".join(group_words(_group(key, told)) for key, told in list(groups.items())[:3])
        return None, (f"a collective timed out, and the ranks had ended all they had begun in {named}",)
    key, told = max(open_groups.items(), key=lambda item: len(item[1]))
    group = _group(key, told)
    if len({one.group_rank for one in told.values()}) < len(told):
        return None, (f"a collective timed out, and {group_words(group)} stands for several groups in the log",)
    seq = min(one.completed for one in told.values() if one.completed is not None and _outstanding(one)) + 1
    behind = tuple(sorted(rank for rank, one in told.items() if one.enqueued is not None and one.enqueued < seq))
    waiting = tuple(sorted(set(told) - set(behind)))
    if not behind:
        return _all_in(group, seq, waiting)
    if len(behind) > len(waiting):
        reason = f"only {rank_list(waiting)} came to #{seq} of {group_words(group)}"
        return None, (f"a collective timed out: {reason}, which may be one operation too many",)
    return Finding(
        kind="rank-skipped-collective",
        summary=f"{capitalised(behind)} had not entered #{seq} of {group_words(group)}; {wait_words(waiting)} in it.",
        culprit_ranks=behind,
        waiting_ranks=waiting,
        confidence=0.6,
        group=group,
        seq=seq,
        call_sites=job.sites(list(waiting)),
        evidence=tuple(f"rank {rank}: last enqueued #{told[rank].enqueued}" for rank in behind[:4]),
        advice=("Look at what these ranks did last: saving, evaluation, a shorter input, an early return.", COLLECT),
    ), (AFTER,)


def _groups(job: Job) -> dict[tuple[str, str], Told]:
    """Return the newest counts of each rank in each group of which several ranks told theirs."""
    groups: dict[tuple[str, str], Told] = {}
    for one in job.facts.progress:
        if one.rank is not None and one.enqueued is not None and one.completed is not None:
            groups.setdefault((one.group, one.description), {})[one.rank] = one
    return {key: told for key, told in groups.items() if len(told) > 1}


def _group(key: tuple[str, str], told: Told) -> Group | None:
    return group_of(key[0], key[1], set(told))


def _outstanding(one: Progress) -> bool:
    return one.enqueued is not None and one.completed is not None and one.enqueued > one.completed


def _all_in(group: Group | None, seq: int, waiting: tuple[int, ...]) -> tuple[Finding, tuple[str, ...]]:
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
    ), ("whether a rank that told nothing did not come, or the network, a device or the library is at fault",)
