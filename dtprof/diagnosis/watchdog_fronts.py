"""The front of each rank in each group: the oldest operation that NCCL's watchdog gave up on."""

from dataclasses import dataclass

from dtprof.diagnosis.log_facts import MAX_RANK, LoggedProgress, Timeout
from dtprof.diagnosis.logged_job import LoggedJob, group_of, operation
from dtprof.records.tables import Group


@dataclass(frozen=True, kw_only=True)
class Front:
    """The oldest operation of a rank in a group that did not end."""

    timeout: Timeout
    progress: LoggedProgress | None


Fronts = dict[int, Front]
Key = tuple[str, str] | None


def fronts_by_group(job: LoggedJob) -> dict[Key, Fronts]:
    """Return the oldest timed-out operation of each rank in each group."""
    named = {(one.rank, one.work): one for one in job.facts.progress if one.work is not None}
    certain = any(not timeout.rank_in_group for timeout in job.facts.timeouts)
    result: dict[Key, Fronts] = {}
    for timeout in job.facts.timeouts:
        if timeout.rank is None or (certain and timeout.rank_in_group):
            continue
        progress = named.get((timeout.rank, timeout.seq))
        key = (progress.group, progress.description) if progress else None
        fronts = result.setdefault(key, {})
        if timeout.rank not in fronts or timeout.seq < fronts[timeout.rank].timeout.seq:
            fronts[timeout.rank] = Front(timeout=timeout, progress=progress)
    return _joined(result)


def _joined(groups: dict[Key, Fronts]) -> dict[Key, Fronts]:
    """Add ranks whose line with the group is missing to the only group that has the same operation."""
    unnamed = groups.get(None)
    if unnamed and len(groups) == 2:
        key = next(name for name in groups if name is not None)
        places = {(front.timeout.seq, front.timeout.op) for front in groups[key].values()}
        alike = {rank: one for rank, one in unnamed.items() if (one.timeout.seq, one.timeout.op) in places}
        groups[key] = {**alike, **groups[key]}
        groups[None] = {rank: one for rank, one in unnamed.items() if rank not in groups[key]}
    return {key: fronts for key, fronts in groups.items() if fronts}


def one_number_for_many(timeouts: list[Timeout]) -> bool:
    """Say whether lines of several processes carry the same rank of a group, and nothing else tells them apart."""
    if not all(one.rank_in_group for one in timeouts):
        return False
    streams: dict[int | None, set[str]] = {}
    for one in timeouts:
        streams.setdefault(one.group_rank, set()).add(one.stream)
    return any(len(names) > 1 for names in streams.values())


def group_at(key: Key, ranks: set[int]) -> Group | None:
    return group_of(key[0], key[1], ranks) if key else None


def usual_front(fronts: Fronts) -> Timeout:
    """Return the operation most ranks are in."""
    places = [(one.timeout.seq, one.timeout.op) for one in fronts.values()]
    chosen = max(places, key=places.count)
    return next(one.timeout for one in fronts.values() if (one.timeout.seq, one.timeout.op) == chosen)


def is_ambiguous(fronts: Fronts) -> bool:
    """Say whether one name covers several groups: the same rank of a group on several global ranks."""
    ranks = [one.timeout.group_rank for one in fronts.values() if one.progress is None] + [
        one.progress.group_rank for one in fronts.values() if one.progress is not None
    ]
    return len(ranks) != len(set(ranks))


def begins_at_zero(key: Key, fronts: Fronts) -> bool:
    """Say whether the group's members are the ranks from 0 on: then ranks of the group are global ranks."""
    if key is None or key[1] == "default_pg" or (key[0] == "0" and not key[1]):
        return True
    return all(one.progress is not None and one.progress.group_rank == rank for rank, one in fronts.items())


def group_size(job: LoggedJob, fronts: Fronts) -> tuple[int, bool]:
    """Return how many members the group has, 0 where nothing tells, and whether it is certain."""
    size, certain = _told_size(job, fronts)
    return (size, certain) if size <= MAX_RANK else (0, False)  # damaged numbers are no jobs


def _told_size(job: LoggedJob, fronts: Fronts) -> tuple[int, bool]:
    least = max(fronts) + 1
    ratios = set()
    for one in fronts.values():
        big, small = max(one.timeout.numel_in or 0, one.timeout.numel_out or 0), one.timeout.numel_in or 0
        if operation(one.timeout.op) == "reduce_scatter":
            small = one.timeout.numel_out or 0
        if operation(one.timeout.op) in ("all_gather", "reduce_scatter") and small and big % small == 0:
            ratios.add(big // small)
    if len(ratios) == 1 and (size := ratios.pop()) >= least:
        return size, True
    if job.facts.world_size >= least:
        return job.facts.world_size, True
    if job.has_table:
        return max(least, len(job.known)), True
    # Whole machines: any other number of ranks hints at higher ones that are silent, too.
    plausible = max(least, len(job.known))
    return (plausible if plausible in (2, 4) or plausible % 8 == 0 else 0), False
