"""Compare the calls of ranks by as many callers as the ranks have in common.

A rank that trains from a line of its own, as one that hands a writer to the function of all, has another outer caller
in every call. Of each line so many callers count, from the innermost on, that of no two ranks each has a way to it
which the other lacks.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.job.group_collectives import line_of
from dtprof.job.issued_operations import LazyOperations, Operation, RankCollectives
from dtprof.records.schema import MOST_CALLERS
from dtprof.records.sites import Site
from dtprof.records.tables import Array


def with_common_callers(job: JobState) -> JobState:
    """Return a job that compares calls by the callers that its ranks have in common."""
    sites = {id(site): site for rank in job.ranks.values() for site in rank.call_sites}
    # As a rule all ranks have the same sites, of which sources keep one object each.
    distinct = {frozenset(map(id, rank.call_sites)) for rank in job.ranks.values()}
    counts = count_common_callers([[sites[number] for number in numbers] for numbers in distinct])
    if not counts:
        return job
    numbers = {line_of(site): line_of(cut_callers(site, counts)) for site in sites.values() if site in counts}
    ranks = {number: _compared_by(rank, counts, numbers) for number, rank in job.ranks.items()}
    return replace(job, ranks=ranks, common_callers=counts)


def count_common_callers(ranks: Collection[Iterable[Site]]) -> dict[Site, int]:
    """Return how many callers count of each line of which not all do, given the call sites of each rank."""
    ways: dict[Site, list[set[tuple[Site, ...]]]] = {}
    for sites in ranks:
        own: dict[Site, set[tuple[Site, ...]]] = {}
        for site in sites:
            own.setdefault(site, set()).add(site.callers)
        for site, callers in own.items():
            ways.setdefault(site, []).append(callers)
    counts = {}
    for site, known in ways.items():
        count = next(count for count in range(MOST_CALLERS, -1, -1) if not _are_alternatives(known, count))
        if count < MOST_CALLERS:
            counts[site] = count
    return counts


def _are_alternatives(ways: Collection[set[tuple[Site, ...]]], count: int) -> bool:
    cut = {frozenset(callers[:count] for callers in own) for own in ways}
    return any(a - b and b - a for a, b in combinations(cut, 2))


def cut_callers(site: Site, counts: Mapping[Site, int]) -> Site:
    """Return a site with the callers that count."""
    return replace(site, callers=site.callers[: counts.get(site, MOST_CALLERS)])


def _compared_by(rank: RankState, counts: Mapping[Site, int], numbers: Mapping[int, int]) -> RankState:
    """Return a rank whose calls have the callers that count in their labels, and in their numbers of lines."""

    def cut(operation: Operation) -> Operation:
        count = counts.get(operation.site) if operation.site is not None else None
        return operation if count is None else replace(operation, common_callers=count)

    groups = {group: _renumbered_table(table, numbers) for group, table in rank.collectives.groups.items()}
    collectives = RankCollectives(groups=groups, operation=lambda row: cut(rank.collectives.operation(row)))
    operations = LazyOperations(lambda at: cut(rank.operations[at]), first=0, end=len(rank.operations))
    open_operations = tuple(map(cut, rank.open_operations))
    return replace(rank, collectives=collectives, operations=operations, open_operations=open_operations)


def _renumbered_table(table: Array, numbers: Mapping[int, int]) -> Array:
    known = np.array(sorted(numbers), np.uint32)
    place = np.minimum(np.searchsorted(known, table["line"]), len(known) - 1)
    chosen = known[place] == table["line"]
    if not chosen.any():
        return table
    table = table.copy()
    table["line"][chosen] = np.array([numbers[number] for number in known.tolist()], np.uint32)[place[chosen]]
    return table
