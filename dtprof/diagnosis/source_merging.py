"""One state of a job out of several sources: records, Flight Recorder dumps and logs, joined before rules read them.

What one source does not know, another fills in. Positions of operations are counted in each source's own way: all that
is told by position comes from the source that has most ranks. What speaks against one job is said, not hidden.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce

from dtprof.diagnosis.device_progress import find_uncounted, merge_progress
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.verdict import decide
from dtprof.formatting import plural
from dtprof.job.issued_operations import RankOperations
from dtprof.job.world_size import resolve_world_size
from dtprof.records.tables import UNKNOWN_NS, ProcessExit

BY_POSITION = (*(field.name for field in fields(RankOperations)), "groups")
"""Fields of a rank that must come from one source, with all that they count."""


def merge(sources: Sequence[JobState]) -> JobState:
    """Return the merged state of the sources of a job, given in the order of trust.

    Sources of different jobs are not joined: the one in which something went wrong stands, and says so.
    """
    return reduce(_join, sources)


def _join(first: JobState, second: JobState) -> JobState:
    names = (*first.sources, *second.sources)
    foreign = _ranks(second) - _ranks(first) if _ranks(first) else set()
    if "run" in first.sources and "flight_recorder" in second.sources and foreign:
        words = (
            f"the dumps are of {plural(len(_ranks(second)), 'rank')}, the run of {len(_ranks(first))}: not of one job; "
            "give what belongs together"
        )
        return _with_problem(second if _went_well(first) else first, words, names)
    goes_on = not first.manifest.ended_realtime_ns  # records of devices that nobody follows show no hang
    if first.sources == ("run",) and _went_well(first) and not (goes_on or _went_well(second)):
        sources = ", ".join(second.sources).replace("_", " ")
        words = f"the run given shows a job in which nothing went wrong: is it the job of the {sources} given?"
        return _with_problem(second, words, names)
    base, other = (second, first) if len(_issuers(second)) > len(_issuers(first)) else (first, second)
    ranks = {rank: _fill(state, other.ranks.get(rank)) for rank, state in base.ranks.items()}
    ranks |= {rank: state for rank, state in other.ranks.items() if rank not in ranks and _has_ended(state)}
    members = {*(base.members or ()), *(other.members or ()), *ranks}
    return replace(
        base,
        ranks=ranks,
        world_size=resolve_world_size((first.world_size, second.world_size), members),
        members=tuple(sorted(members)) if base.members is not None else None,
        lost=tuple(rank for rank in base.lost if rank not in ranks),
        manifest=first.manifest if first.manifest.exit_status is not None else second.manifest,
        stalled=base.stalled or (other.stalled and (goes_on or not _went_well(base))),
        timed_out=first.timed_out if first.timed_out is not None else second.timed_out,
        unnamed=(*first.unnamed, *second.unnamed),
        log=first.log or second.log,
        problems=(*_contradictions(first, second), *_uncounted(base, other), *first.problems, *second.problems),
        sources=names,
    )


def _with_problem(job: JobState, words: str, sources: tuple[str, ...]) -> JobState:
    return replace(job, problems=(words, *job.problems), sources=sources)


def _ranks(job: JobState) -> set[int]:
    return {*job.ranks, *job.missing}


def _issuers(job: JobState) -> set[int]:
    """Return the ranks of which a source tells operations."""
    return {rank.rank for rank in job.ranks.values() if rank.counts or rank.operations or rank.sees_program}


def _went_well(job: JobState) -> bool:
    """Say whether a source shows nothing that went wrong."""
    named = job.sources == ("log",) and decide(job).faults  # what sentences alone show
    ends = any(_has_ended(rank) and not rank.finished for rank in job.ranks.values())
    return not (job.went_wrong or ends or job.unnamed or named)


def _has_ended(rank: RankState) -> bool:
    return bool(rank.exceptions) or rank.exit is not None


def _parted_ends(rank: RankState, other: RankState) -> bool:
    """Say whether two sources tell other ends of a rank: then they are of different jobs, or one is wrong."""
    return rank.exit is not None and other.exit is not None and rank.exit.status != other.exit.status


def _fill(rank: RankState, other: RankState | None) -> RankState:
    """Return a rank with its unknown facts taken from another source of it."""
    if other is None or _parted_ends(rank, other):
        return rank
    seer = other if other.sees_program and not rank.sees_program else rank
    filled = replace(seer, **{name: getattr(rank, name) for name in BY_POSITION})
    source = rank if seer is other else other
    if not filled.exceptions and source.exceptions:
        # Lines of a log stand in an order, at no time that other sources could be compared with.
        errors = tuple(replace(error, t_ns=UNKNOWN_NS) for error in source.exceptions)
        filled = replace(filled, exceptions=errors, lost_peer=source.lost_peer)
    filled = replace(
        filled,
        exit=filled.exit or source.exit,
        host=filled.host or source.host,
        pid=filled.pid or source.pid,
    )
    return merge_progress(filled, other, shift=_shift(rank, other))


def _shift(rank: RankState, other: RankState) -> int:
    """Return the offset of sequence numbers to those of the other source: records begin with 0, dumps with 1."""
    return int(rank.sees_program) - int(other.sees_program)


def _uncounted(base: JobState, other: JobState) -> tuple[str, ...]:
    """Say of the first rank of which two sources count operations each in their own way."""
    both = ((rank, other.ranks.get(number)) for number, rank in sorted(base.ranks.items()))
    problems = (find_uncounted(rank, own, shift=_shift(rank, own)) for rank, own in both if own is not None)
    return next((words for words in problems if words), ())[:1]


def _contradictions(first: JobState, second: JobState) -> list[str]:
    """Say of which ranks two sources tell other ends."""
    both = ((rank, state, second.ranks.get(rank)) for rank, state in sorted(first.ranks.items()))
    return [
        f"rank {rank} ended with {_status(one.exit)} in {', '.join(first.sources)}, with {_status(other.exit)} in "
        f"{', '.join(second.sources)}: are they of one job?"
        for rank, one, other in both
        if other is not None and _parted_ends(one, other)
    ]


def _status(end: ProcessExit | None) -> str:
    if end is None:
        return "an unknown status"
    return f"exit status {end.status}" if end.status >= 0 else f"signal {-end.status}"
