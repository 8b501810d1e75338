"""A rank was killed by a signal that nobody sent to the whole job."""

from dtprof.diagnosis.blocked_ranks import seen_at
from dtprof.diagnosis.findings import Finding, at_line
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.rank_failures import (
    NATIVE_CRASHES,
    end_ns,
    exit_finding,
    find_first_failed,
    has_crashed,
    was_killed,
)
from dtprof.formatting import format_bytes
from dtprof.records.tables import UNKNOWN_NS

KINDS = ("rank-killed",)
LATE_THREAD = (
    "Python ends a thread of the back end that asks for the GIL while the interpreter shuts down, and torch "
    "aborts at that"
)
"""Seen on gloo with torch 2.13, in `decref_pyobject` of a tensor that a work let go of."""
END_IN_ORDER = (
    "Before the program ends: let go of DDP and FSDP modules, call gc.collect() for what cycles of objects hold, then "
    "destroy_process_group, which ends the threads of groups that nothing else holds."
)


def find_killed(job: JobState) -> Finding | None:
    """Return the finding for the rank that failed first, where a signal killed it."""
    first = find_first_failed(job)
    return _killed_finding(first, job) if first is not None and not has_crashed(first) else None


def find_late_death(job: JobState) -> Finding | None:
    """Return the finding of a rank that was killed after its program had ended, while the interpreter shut down."""
    late = min((rank for rank in job.ranks.values() if was_killed(rank, job)), key=end_ns, default=None)
    return _killed_finding(late, job) if late is not None else None


def is_late(job: JobState, finding: Finding) -> bool:
    """Say whether the finding is of a rank that was killed after its program had ended."""
    return finding.kind == "rank-killed" and all(
        job.ranks[rank].ended_ns != UNKNOWN_NS for rank in finding.culprit_ranks
    )


def died_in_operation(job: JobState, finding: Finding) -> bool:
    """Say whether the finding is of a rank whose native code crashed inside an operation."""
    ranks = [job.ranks[rank] for rank in finding.culprit_ranks]
    return finding.kind == "rank-killed" and all(r.signal_name in NATIVE_CRASHES and r.first_blocking for r in ranks)


def _memory_words(rank: RankState, job: JobState) -> list[str]:
    """Say what a rank held in RAM beside the other ranks of its host, where that was sampled."""
    held = job.find_resident() if job.find_resident is not None else {}
    if rank.rank not in held:
        return []
    others = sorted(nbytes for r, nbytes in held.items() if r != rank.rank and job.ranks[r].host == rank.host)
    text = f"rank {rank.rank} held {format_bytes(held[rank.rank])} in RAM when last sampled"
    if others:
        low, high = format_bytes(others[0]), format_bytes(others[-1])
        text += f", the other ranks of its host {low if low == high else f'{low} to {high}'}"
    return [text]


def _killed_finding(rank: RankState, job: JobState) -> Finding:
    name = rank.signal_name
    place = rank.place
    late = rank.ended_ns != UNKNOWN_NS
    facts = [f"rank {rank.rank}: process {rank.pid} was ended by {name}; its last record is{at_line(place)}"]
    advice = ["Ask who sent the signal: the kernel log (dmesg), the scheduler's log, other users of the host."]
    if job.oom_kills and name == "SIGKILL":
        facts.append(f"the kernel's OOM killer struck {job.oom_kills} time(s) in this job's cgroup while it ran")
        facts += _memory_words(rank, job)
        advice = ["The host ran out of memory: lower what each rank holds in host memory, or ask for more."]
    elif late:
        facts.append("the program had ended in order: this happened while the interpreter shut down")
        if name == "SIGABRT":
            facts.append(f"the usual cause, not looked for here: {LATE_THREAD}")
        advice = [END_IN_ORDER]
    elif name in NATIVE_CRASHES:
        advice = ["Native code crashed: look at the last lines this rank printed, and take a core dump next time."]
    return exit_finding(
        "rank-killed",
        f"Rank {rank.rank} was killed by {name}{' while its interpreter shut down' if late else seen_at(rank)}",
        (rank.rank,),
        {rank.rank: place} if place else {},
        job,
        confidence=0.97,
        evidence=tuple(facts),
        advice=tuple(advice),
    )
