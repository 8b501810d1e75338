"""The front of each rank in each group: the oldest operation that NCCL's watchdog gave up on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dtprof.diagnosis.sources.logs.log_facts import MAX_RANK, LoggedProgress, Timeout
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob, group_of, operation
from dtprof.job.axes import DEFAULT_GROUP
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
    named: dict[tuple[int | None, int | None], LoggedProgress] = {
        (progress.rank, progress.work): progress for progress in job.facts.progress if progress.work is not None
    }
    certain = any(not timeout.rank_in_group for timeout in job.facts.timeouts)
    result: dict[Key, Fronts] = {}
    for timeout in job.facts.timeouts:
        if timeout.rank is None or (certain and timeout.rank_in_group):
            continue
        progress = named.get((timeout.rank, timeout.seq))
        key = (progress.group, progress.description) if progress else None
        fronts = result.setdefault(key, {})
        known = fronts.get(timeout.rank)
        if known is None or is_older(timeout, known.timeout):
            fronts[timeout.rank] = Front(timeout=timeout, progress=progress)
    for front in list(_told_by_progress(named.values(), result)):
        key = (front.progress.group, front.progress.description) if front.progress else None
        result[key].setdefault(front.timeout.rank if front.timeout.rank is not None else -1, front)
    return _joined(result)


def is_older(one: Timeout, other: Timeout) -> bool:
    """Say whether an operation comes before another of its rank and group; without numbers, in the order of the log."""
    return one.seq is not None and other.seq is not None and one.seq < other.seq


def _told_by_progress(reported: Iterable[LoggedProgress], groups: dict[Key, Fronts]) -> Iterator[Front]:
    """Yield the fronts of ranks whose line with the timeout is missing: what failed has its number in the next line."""
    for progress in reported:
        fronts = groups.get((progress.group, progress.description), {})
        alike = next((front.timeout for front in fronts.values() if front.timeout.seq == progress.work), None)
        if progress.rank is not None and progress.rank not in fronts and alike is not None:
            yield Front(timeout=replace(alike, rank=progress.rank, group_rank=progress.group_rank), progress=progress)


def _joined(groups: dict[Key, Fronts]) -> dict[Key, Fronts]:
    """Add ranks whose line with the group is missing to the only group that has the same operation."""
    unnamed = groups.get(None)
    if unnamed and len(groups) == 2:
        key = next(name for name in groups if name is not None)
        places = {(front.timeout.seq, front.timeout.op) for front in groups[key].values()}
        alike = {rank: front for rank, front in unnamed.items() if (front.timeout.seq, front.timeout.op) in places}
        groups[key] = {**alike, **groups[key]}
        groups[None] = {rank: front for rank, front in unnamed.items() if rank not in groups[key]}
    return {key: fronts for key, fronts in groups.items() if fronts}


def one_number_for_many(timeouts: list[Timeout]) -> bool:
    """Say whether lines of several processes carry the same rank of a group, and nothing else tells them apart."""
    if not all(timeout.rank_in_group for timeout in timeouts):
        return False
    streams: dict[int | None, set[str]] = {}
    for timeout in timeouts:
        streams.setdefault(timeout.group_rank, set()).add(timeout.stream)
    return any(len(names) > 1 for names in streams.values())


def group_at(key: Key, ranks: set[int]) -> Group | None:
    return group_of(key[0], key[1], ranks) if key else None


def usual_front(fronts: Fronts) -> Timeout:
    """Return the operation most ranks are in."""
    places = [(front.timeout.seq, front.timeout.op) for front in fronts.values()]
    chosen = max(places, key=places.count)
    return next(front.timeout for front in fronts.values() if (front.timeout.seq, front.timeout.op) == chosen)


def operation_of(timeout: Timeout) -> str | None:
    """Return the operation of a timeout; of coalesced ones all_gather, where each adds the members' parts."""
    numel_in, numel_out = timeout.numel_in or 0, timeout.numel_out or 0
    if timeout.op == "COALESCED" and 0 < numel_in < numel_out and numel_out % numel_in == 0:
        return "all_gather"
    return operation(timeout.op)


def place_of(timeout: Timeout) -> str:
    """Return an operation in words: `all_reduce #12`; before torch 1.12 without its number."""
    name = operation_of(timeout) or timeout.op
    return name if timeout.seq is None else f"{name} #{timeout.seq}"


def is_ambiguous(fronts: Fronts) -> bool:
    """Say whether one name covers several groups: the same rank of a group on several global ranks."""
    ranks = [front.timeout.group_rank for front in fronts.values() if front.progress is None] + [
        front.progress.group_rank for front in fronts.values() if front.progress is not None
    ]
    return len(ranks) != len(set(ranks))


def begins_at_zero(key: Key, fronts: Fronts) -> bool:
    """Say whether the group's members are the ranks from 0 on: then ranks of the group are global ranks."""
    if key is None or key[1] == DEFAULT_GROUP or (key[0] == "0" and not key[1]):
        return True
    return all(front.progress is not None and front.progress.group_rank == rank for rank, front in fronts.items())


def group_size(job: LoggedJob, fronts: Fronts) -> tuple[int, bool]:
    """Return how many members the group has, 0 where nothing tells, and whether it is certain."""
    size, certain = _reported_size(job, fronts)
    return (size, certain) if size <= MAX_RANK else (0, False)  # damaged numbers are no jobs


def _reported_size(job: LoggedJob, fronts: Fronts) -> tuple[int, bool]:
    least = max(fronts) + 1
    ratios = set()
    for front in fronts.values():
        big, small = max(front.timeout.numel_in or 0, front.timeout.numel_out or 0), front.timeout.numel_in or 0
        if operation_of(front.timeout) == "reduce_scatter":
            small = front.timeout.numel_out or 0
        if operation_of(front.timeout) in ("all_gather", "reduce_scatter") and small and big % small == 0:
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
