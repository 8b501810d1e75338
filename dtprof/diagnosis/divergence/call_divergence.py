"""Where the calls of two ranks diverge: in which function, and by which of its callers."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.common_callers import cut_callers
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.issued_operations import Operation
from dtprof.records.sites import Site, site_of_stack

MAX_STACKS = 8
"""Ranks that wait in one collective whose stacks are looked at: they are at the same place."""


class RankCall(NamedTuple):
    """An operation with the rank that issued it."""

    rank: RankState
    operation: Operation


def align_frames(*calls: RankCall) -> tuple[list[Site], list[Site], int | None]:
    """Return the frames of two calls, outermost first, and where they are in one function at two lines, or None."""
    a, b, common = _align(*([*reversed(frames_of(rank, operation))] for rank, operation in calls))
    return a, b, common if common is not None and is_in_same_function(a[common], b[common]) else None


def part_sites(job: JobState, a: Site, b: Site) -> tuple[Site, Site]:
    """Return the callers at which the ways to two calls of one line part; else the lines themselves."""
    if a != b:
        return a, b
    ways = (cut_callers(site, job.common_callers) for site in (a, b))
    mine, theirs, common = _align(*([*reversed((way, *way.callers))] for way in ways))
    if common is None:
        return a, b
    return site_of_stack(mine[common::-1]), site_of_stack(theirs[common::-1])


def _align(a: list[Site], b: list[Site]) -> tuple[list[Site], list[Site], int | None]:
    """Return frames completed, and the first that differ."""
    a, b = _with_callers(a, b), _with_callers(b, a)
    common = 0
    while common < min(len(a), len(b)) - 1 and _is_same_line(a[common], b[common]):
        common += 1
    return a, b, common if a and b and a[common].line != b[common].line else None


def _with_callers(own: list[Site], other: list[Site]) -> list[Site]:
    """Return frames of which the outer are not known with those of another rank around the same function.

    Of a line no caller may be known, and a traceback begins where the exception was caught.
    """
    if not own or len(other) < 2 or is_in_same_function(own[0], other[0]):
        return own
    alike = is_in_same_function if len(own) == 1 else _is_same_line
    at = next((i for i in range(len(other) - 1, -1, -1) if alike(own[0], other[i])), None)
    return [*other[:at], *own] if at is not None else own


def _is_same_line(a: Site, b: Site) -> bool:
    return a.line == b.line and is_in_same_function(a, b)


def is_in_same_function(a: Site, b: Site) -> bool:
    """Say whether two lines are in one function; what a signal has left knows no more than the last part of names."""
    return (a.file, a.function.rpartition(".")[2]) == (b.file, b.function.rpartition(".")[2])


def frames_of(rank: RankState, operation: Operation) -> tuple[Site, ...]:
    """Return the frames of a call, innermost first: of the stack of a rank in it, of what it raised, else as recorded.

    An asynchronous call may be waited for at another line of its function.
    """
    site = operation.site
    if site is None:
        return ()
    stacks = (rank.stack.frames if rank.stack is not None else (), rank.last_frames, *rank.raised_frames)
    for frames in stacks if operation.open else ():
        if frames and (frames[0].file, frames[0].line) == (site.file, site.line):
            return frames
    for frames in stacks if operation == rank.first_blocking else ():
        if frames and is_in_same_function(frames[0], site):
            return (site, *frames[1:])
    return (site, *site.callers)


def name_callers(job: JobState, finding: Finding) -> Finding:
    """Return a finding that names callers where culprits and others come to one line by different ones."""
    culprits, others = finding.culprit_call_sites, finding.call_sites
    return replace(
        finding,
        call_sites=_part_from(job, others, culprits.values()),
        culprit_call_sites=_part_from(job, culprits, (others or culprits).values()),
    )


def _part_from(job: JobState, sites: Mapping[int, Site], others: Collection[Site]) -> dict[int, Site]:
    parted = {}
    for rank, site in sites.items():
        other = next((other for other in others if other == site and other.callers != site.callers), site)
        parted[rank], _ = part_sites(job, site, other)
    return parted


def deviating_sites(job: JobState, calls: dict[int, Operation], reference: int) -> dict[int, Site]:
    """Return the line of each rank's call, or of the caller that only this rank comes to.

    A function that all ranks call, such as a forward pass, deviates in who calls it: the line in a branch which the
    reference rank, where it waits, is not in.
    """
    sites = call_sites(calls)
    other = job.ranks[reference]
    theirs = RankCall(other, other.first_blocking) if other.first_blocking is not None else None
    for rank, operation in calls.items():
        caller = _find_caller(job, RankCall(job.ranks[rank], operation), theirs) if theirs is not None else None
        if caller is not None:
            sites[rank] = caller
    return sites


def _find_caller(job: JobState, mine: RankCall, theirs: RankCall) -> Site | None:
    a, b, common = align_frames(mine, theirs)
    if common is None:
        return None
    # What is called from there on is called by others, too.
    here, there = job.place_in_source(a[common]), job.place_in_source(b[common])
    shared = there.branches if there is not None else ()
    return a[common] if here is not None and not set(here.branches) <= set(shared) else None


def both_sides(job: JobState, present: dict[int, Operation], culprits: tuple[int, ...]) -> tuple[Operation, Operation]:
    """Return the calls of one of the others and of one of the culprits, at the lines that tell them apart."""
    theirs, mine = next(call for rank, call in present.items() if rank not in culprits), present[culprits[0]]
    if theirs.site is None or mine.site is None:
        return theirs, mine
    places = part_sites(job, theirs.site, mine.site)
    return replace(theirs, site=places[0]), replace(mine, site=places[1])


def with_lines(finding: Finding, present: dict[int, Operation]) -> Finding:
    """Add where the ranks are at the position."""
    culprits = {rank: operation for rank, operation in present.items() if rank in finding.culprit_ranks}
    others = {rank: operation for rank, operation in present.items() if rank not in culprits}
    return replace(finding, call_sites=call_sites(others), culprit_call_sites=call_sites(culprits))
