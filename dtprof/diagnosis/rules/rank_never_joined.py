"""Ranks wait in init_process_group for one that does not come."""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.diagnosis.absent_ranks import JOINED_BEFORE, absent_finding, frozen_words, is_working, observed_words
from dtprof.diagnosis.blocked_ranks import last_sites_of, places_of, seen_at
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, capitalised, wait_words
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks


def find_never_joined(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that do not come while the others wait in init_process_group."""
    job = case.job
    waiting = tuple(sorted(rank.rank for rank in job.ranks.values() if rank.in_init))
    if not waiting:
        return
    sites = last_sites_of(job.ranks[rank] for rank in waiting)
    if job.missing:
        found = _without_record(job, waiting)
    else:
        absent = [rank for rank in job.ranks.values() if not (rank.in_init or rank.blocking or rank.exceptions)]
        gone = [rank for rank in absent if rank.finished]
        if not absent and len(waiting) == len(job.ranks) and all(rank.operations for rank in job.ranks.values()):
            found = _none_comes_out(waiting)
        elif absent:
            found = _gone(gone, waiting) if gone else _elsewhere(absent, waiting)
        else:
            return
    yield replace(found, call_sites=sites)


def _without_record(job: JobState, waiting: tuple[int, ...]) -> Finding:
    """Report ranks without a record, with their activity where their processes were found."""
    seen = [job.starting[rank] for rank in job.missing if rank in job.starting]
    whose = f"{capitalised(job.missing)} of {job.world_size}"
    summary, grade = f"{whose} never joined", 0.8
    advice = "Check that every rank was started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE."
    if seen and len(seen) == len(job.missing):
        does = "busy" if is_working(seen[0]) else frozen_words(seen[0]) or "blocked"
        who = "it" if len(seen) == 1 else f"rank {seen[0].rank}"
        summary = f"{whose} started and did not join: {who} is {does}{seen_at(seen[0])}"
        advice, grade = "Look at the line it is at: what comes before init_process_group.", 0.9
    unseen = [rank for rank in job.missing if rank not in job.starting]
    return Finding(
        kind="rank-never-joined",
        summary=f"{summary}; {wait_words(waiting)} in init_process_group.",
        culprit_ranks=job.missing,
        waiting_ranks=waiting,
        grade=grade,
        culprit_call_sites=places_of(seen),
        evidence=(
            *(f"rank {rank.rank} (process {rank.pid}): {observed_words(rank)}" for rank in seen[:8]),
            *([f"{list_ranks(unseen) if seen else 'they'} left no record at all"] if unseen else []),
        ),
        advice=(advice,),
        is_early=bool(seen) and not unseen and all(is_working(rank) or _reads(rank) for rank in seen),
    )


def _reads(rank: RankState) -> bool:
    """Say whether it waits for a disk, as a process does that loads libraries."""
    return rank.stack is not None and rank.stack.state == "disk-sleep"


def _gone(gone: list[RankState], waiting: tuple[int, ...]) -> Finding:
    culprits = tuple(sorted(rank.rank for rank in gone))
    return Finding(
        kind="rank-exited",
        summary=f"{capitalised(culprits)} ended; {wait_words(waiting)} for {'it' if len(gone) == 1 else 'them'} in "
        "init_process_group.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        grade=0.85,
        culprit_call_sites=places_of(gone),
        evidence=tuple(f"rank {rank.rank}: the program exited without an error" for rank in gone[:8]),
        advice=("Make every rank call init_process_group as often as the others.",),
    )


def _none_comes_out(waiting: tuple[int, ...]) -> Finding:
    return Finding(
        kind="rank-never-joined",
        summary=f"All {len(waiting)} ranks are in init_process_group again, and none comes out: they do not find one "
        "another anew.",
        culprit_ranks=(),
        waiting_ranks=waiting,
        grade=0.7,
        evidence=("each of them has issued operations of a group that it had joined before",),
        advice=(JOINED_BEFORE,),
    )


def _elsewhere(absent: list[RankState], waiting: tuple[int, ...]) -> Finding:
    found = absent_finding(absent, waiting, "init_process_group")
    if not all(rank.groups and rank.wrapped_parameters for rank in absent):
        return found
    # Seen on gloo, torch 2.13: docs/explanation/measurements/stress.md.
    held = (
        "A group that a rank had before may hang in its end, where a DDP module outlives it: let go of modules before "
        "destroy_process_group."
    )
    return replace(found, advice=(*found.advice, held))


RULES: Declared = (
    Rule(
        kinds=("rank-never-joined", "rank-exited", "rank-stuck", "rank-frozen", "long-operation"),
        stages=(Stage.WAIT,),
        find=find_never_joined,
    ),
)
