"""A rank raised an exception, or left with a status other than 0, before the others did."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import first_blocking_of, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.divergence.skip_branches import find_exit
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.known_errors import find_advice, first_words, name_exhausted
from dtprof.diagnosis.rank_failures import exit_finding, find_first_failed, has_crashed, oom_reports, resident_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import format_held, list_ranks
from dtprof.records.paths import rank_folder_name
from dtprof.records.tables import ExceptionRecord

SAME_TIME_S = 2
"""Exits this close together are at one time: agents look once a second or less, and write whole seconds."""


def find_crash(case: Case) -> Iterator[Finding]:
    """Give the finding for the rank that failed first, where it raised or left with a status above 0."""
    job = case.job
    first = find_first_failed(job)
    if first is not None and has_crashed(first):
        yield _crash_finding(first, [rank for rank in (*job.ranks.values(), *job.unnamed) if has_crashed(rank)], job)


def _crash_finding(first: RankState, crashed: list[RankState], job: JobState) -> Finding:
    error = first.own_exception
    if error is None:
        status = first.exit.status if first.exit else "?"
        waiting = first_blocking_of(job, victims(job, {first.rank}))
        place = first.left_at or find_exit(job, first, waiting)
        return exit_finding(
            "rank-crashed",
            f"Rank {first.rank} ended with exit status {status}, without an exception",
            (first.rank,),
            {first.rank: place} if place else {},
            job,
            grade=0.85,
            evidence=(f"rank {first.rank}: its last record is{at_line(first.last_site) or ' at an unknown line'}",),
            advice=("Look for sys.exit or os._exit on that rank, and at what it printed last.",),
        )
    # The same exception at the same line is one fault of the program: no rank infected the others.
    alike = [
        rank
        for rank in crashed
        if rank.own_exception is not None
        and rank.own_exception.type == error.type
        and (rank.own_exception.frame and rank.own_exception.frame.line) == (error.frame and error.frame.line)
    ]
    named = [rank for rank in alike if rank.rank in job.ranks]
    culprits = tuple(sorted(rank.rank for rank in named))
    sites = {rank.rank: site for rank in named if (site := rank.raised_at) is not None}
    message = first_words(error.message)
    text = f"{error.type}: {message}" if message else error.type
    others = [r.rank for r in crashed if r not in alike and r.rank in job.ranks]
    facts = [f"{f'rank {first.rank}' if first in named else 'a rank'}: {text}{at_line(error.frame)}"]
    if others:
        facts.append(f"{list_ranks(others)} raised later, with another exception or at another line")
    exhausted = name_exhausted(error.type, error.message)
    facts += _exhausted_words(first, error)
    if exhausted == "host" and first in named:
        facts += resident_words(first, job)
    lost = [r.rank for r in job.ranks.values() if r.transport_exception is not None]
    if lost:
        why = (
            "failed afterwards because the peer was gone" if first.sees_program else "failed as a peer was gone or late"
        )
        facts.append(f"{list_ranks(lost)} {why}: a consequence")
    facts += [f"the log tells of a kill for want of memory: {said[:160]}" for said in oom_reports(job)[:1]]
    name = capitalised(culprits) if culprits else "A rank that the log does not name"
    known = find_advice(error.type, error.message)
    return exit_finding(
        "rank-crashed",
        f"{name} {f'ran out of {exhausted} memory' if exhausted else f'raised {text}'}{at_line(error.frame)}",
        culprits,
        sites,
        job,
        grade=_confidence(named),
        evidence_class=Evidence.DIRECT if any(rank.sees_program for rank in named) else None,
        evidence=tuple(facts),
        advice=(known or _advice(error, named, job),),
    )


def _advice(error: ExceptionRecord, named: list[RankState], job: JobState) -> str:
    # A log may not say how many ranks there were: only records tell that no other rank is left.
    if len(named) == job.world_size > 1 and all(rank.sees_program for rank in named):
        return f"Fix the {error.type}, which every rank raised{' at this line' if error.frame else ''}."
    where = f" in {list_ranks(rank.rank for rank in named)}" if named else ""
    return f"Fix the {error.type}{where}; errors on the other ranks follow from it."


def _confidence(named: list[RankState]) -> float:
    """Return how sure it is that the exception ended its process, and of which rank."""
    if any(rank.sees_program for rank in named):
        return 0.97
    return 0.9 if any(rank.exit is not None for rank in named) else 0.7


def find_failed_exit(case: Case) -> Iterator[Finding]:
    """Give the finding for the ranks that exited first with a status above 0, as a log says without an exception."""
    job = case.job
    status = {r.rank: r.exit.status for r in job.ranks.values() if r.exit is not None and r.exit.status > 0}
    failed = [rank for rank in status if not job.ranks[rank].exceptions]
    if not failed or any(job.ranks[rank].sees_program for rank in failed) or job.unnamed or job.timed_out:
        return
    ends = job.log.exits if job.log is not None else {}
    times = {rank: ends[rank].time_s or 0 for rank in failed if rank in ends and ends[rank].time_s is not None}
    first_s = min(times.values(), default=0)
    later = [rank for rank in times if times[rank] > first_s + SAME_TIME_S] if len(times) == len(failed) else []
    culprits = tuple(rank for rank in failed if rank not in later)
    shown = ", ".join(str(one) for one in sorted({status[rank] for rank in culprits}))
    facts = [f"{list_ranks(culprits)}: exit status {shown}, as the launcher saw it"]
    if later:
        after_s = min(times[rank] for rank in later) - first_s
        facts.append(f"{list_ranks(later)} ended {after_s} s or more after: perhaps a consequence")
    exceptions = "its exception is" if len(culprits) == 1 else "their exceptions are"
    yield exit_finding(
        "rank-crashed",
        f"{capitalised(culprits)} ended with exit status {shown}, and {exceptions} not in the log",
        culprits,
        {},
        job,
        grade=0.5 if len(failed) == 1 else 0.4,
        evidence=tuple(facts),
        advice=("Keep every rank's output: torchrun --log-dir DIR --tee 3, or @record on main().",),
    )


def _exhausted_words(rank: RankState, error: ExceptionRecord) -> list[str]:
    """Give the memory of a rank by category, where the exception says that its memory ran out."""
    found = next((record for record in rank.out_of_memory if record.message[:200] == error.message[:200]), None)
    if found is None or not any(found.held_bytes.values()):
        return []
    files = [shot.file for shot in rank.snapshots if shot.why == "out of memory" and shot.state == "written"]
    where = f"; by tensor in {rank_folder_name(rank.rank, rank.attempt)}/{files[-1]} of the run" if files else ""
    return [f"rank {rank.rank} held on {found.device}: {format_held(found.held_bytes)}{where}"]


RULES: Declared = (
    Rule(kinds=("rank-crashed",), stages=(Stage.DEATH,), find=find_crash),
    Rule(kinds=("rank-crashed",), stages=(Stage.SUSPICION,), find=find_failed_exit),
)
