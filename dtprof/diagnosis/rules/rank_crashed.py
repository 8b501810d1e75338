"""A rank raised an exception, or left with a status other than 0, before the others did."""

from dtprof.diagnosis.findings import Finding, at_line, capitalised, rank_list
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.known_errors import find_advice, first_words
from dtprof.diagnosis.rank_failures import exit_finding, find_first_failed, has_crashed
from dtprof.formatting import format_bytes
from dtprof.records.tables import ExceptionRecord

KINDS = ("rank-crashed",)


def find_crash(job: JobState) -> Finding | None:
    """Return the finding for the rank that failed first, where it raised or left with a status above 0."""
    first = find_first_failed(job)
    if first is None or not has_crashed(first):
        return None
    return _crash_finding(first, [rank for rank in job.ranks.values() if has_crashed(rank)], job)


def _crash_finding(first: RankState, crashed: list[RankState], job: JobState) -> Finding:
    error = first.own_exception
    if error is None:
        status = first.exit.status if first.exit else "?"
        place = first.last_site
        return exit_finding(
            "rank-crashed",
            f"Rank {first.rank} ended with exit status {status}, without an exception",
            (first.rank,),
            {first.rank: place} if place else {},
            job,
            confidence=0.85,
            evidence=(f"rank {first.rank}: its last record is{at_line(place) or ' at an unknown line'}",),
            advice=("Look for sys.exit or os._exit on that rank, and at what it printed last.",),
        )
    alike = [
        rank
        for rank in crashed
        if rank.own_exception is not None
        and rank.own_exception.type == error.type
        and (rank.own_exception.frame and rank.own_exception.frame.line) == (error.frame and error.frame.line)
    ]
    culprits = tuple(sorted(rank.rank for rank in alike))
    sites = {r.rank: r.own_exception.frame for r in alike if r.own_exception and r.own_exception.frame}
    message = first_words(error.message)
    text = f"{error.type}: {message}" if message else error.type
    others = [r.rank for r in crashed if r not in alike]
    facts = [f"rank {first.rank}: {text}{at_line(error.frame)}"]
    if others:
        facts.append(f"{rank_list(others)} raised later, with another exception or at another line")
    facts += _exhausted_words(first, error)
    lost = [r.rank for r in job.ranks.values() if r.transport_exception is not None]
    if lost:
        facts.append(f"{rank_list(lost)} failed afterwards because the peer was gone: a consequence")
    name = capitalised(culprits)
    known = find_advice(error.type, error.message)
    return exit_finding(
        "rank-crashed",
        f"{name} raised {text}{at_line(error.frame)}",
        culprits,
        sites,
        job,
        confidence=0.97,
        evidence=tuple(facts),
        advice=(known or f"Mend the {error.type} in {rank_list(culprits)}; errors on the other ranks follow from it.",),
    )


def _exhausted_words(rank: RankState, error: ExceptionRecord) -> list[str]:
    """Say what a rank held, where the exception says that its memory ran out."""
    found = next((one for one in rank.out_of_memory if one.message[:200] == error.message[:200]), None)
    if found is None or not any(found.held_bytes.values()):
        return []
    held = sorted(((nbytes, name) for name, nbytes in found.held_bytes.items() if nbytes), reverse=True)
    words = ", ".join(f"{format_bytes(nbytes)} {name.replace('_', ' ')}" for nbytes, name in held)
    return [f"rank {rank.rank} held on {found.device}: {words}"]
