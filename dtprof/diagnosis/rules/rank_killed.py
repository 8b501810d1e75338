"""A rank was killed by a signal that was not sent to the whole job."""

from collections.abc import Iterator
from dataclasses import replace

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.known_errors import HOST_MEMORY, NATIVE_CRASH, SIGNALLED
from dtprof.diagnosis.rank_failures import (
    NATIVE_CRASHES,
    end_ns,
    exit_finding,
    find_first_failed,
    has_crashed,
    oom_reports,
    resident_words,
    was_killed,
)
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import format_bytes, format_fraction, list_ranks, plural
from dtprof.records.sites import Site, site_of_stack
from dtprof.records.tables import UNKNOWN_NS

LATE_THREAD = (
    "Python ends a thread of the backend that asks for the GIL while the interpreter shuts down, and torch "
    "aborts at that"
)
"""Seen on gloo with torch 2.13, in `decref_pyobject` of a tensor that a work let go of."""
OUT_OF_MEMORY = "The host ran out of memory: lower what each rank holds in host memory, or ask for more."
NEAR_NS = 3_000_000_000
"""Between the kernel's report and the exit that the parent saw."""
NEARLY_FULL = 0.93
END_IN_ORDER = (
    "Before the program ends: let go of DDP and FSDP modules, call gc.collect() for what cycles of objects hold, then "
    "destroy_process_group, which ends the threads of groups that nothing else holds."
)


def find_killed(case: Case) -> Iterator[Finding]:
    """Give the finding for the rank that failed first, where a signal killed it."""
    first = find_first_failed(case.job)
    if first is not None and not has_crashed(first) and not _aborted_in_operation(first):
        yield _killed_finding(first, case.job) if first.sees_program else _reported_finding(case.job)


def find_aborted(case: Case) -> Iterator[Finding]:
    """Give the finding for the rank that failed first, where its native code crashed inside an operation."""
    first = find_first_failed(case.job)
    if first is not None and not has_crashed(first) and _aborted_in_operation(first):
        yield _killed_finding(first, case.job)


def find_late_death(case: Case) -> Iterator[Finding]:
    """Give the finding of a rank that was killed after its program had ended, while the interpreter shut down."""
    late = min((rank for rank in case.job.ranks.values() if was_killed(rank, case.job)), key=end_ns, default=None)
    if late is not None:
        yield _killed_finding(late, case.job)


def _aborted_in_operation(rank: RankState) -> bool:
    return rank.signal_name in NATIVE_CRASHES and rank.first_blocking is not None


def _last_seen_words(rank: RankState) -> str:
    """Give the known position of a rank when a signal ended it."""
    if rank.crash is None or not rank.last_frames:
        held = _place(rank)
        return f"it was{at_line(held)}" if held else f"where it was is not known: its last record is{_last_words(rank)}"
    path = " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in rank.last_frames[:4])
    hit = "" if rank.crash.thread == "main" else f"it hit a {rank.crash.thread} thread, "
    whose = "the main thread was" if rank.crash.thread == "native" else "it was"
    return f"{hit}{whose} at {path}"


def _place(rank: RankState) -> Site | None:
    """Return the line at which it ended; None where nothing shows that: an older stack and the last record do not."""
    if rank.last_frames or rank.left_at is not None:
        return site_of_stack(rank.last_frames) if rank.last_frames else rank.left_at
    return rank.first_blocking.site if rank.first_blocking is not None else None


def _last_words(rank: RankState) -> str:
    return at_line(rank.last_site) or " at an unknown line"


def _seen_words(rank: RankState) -> str:
    place = _place(rank)
    return at_line(place) if place is not None or rank.last_site is None else f", last seen{at_line(rank.last_site)}"


def _kernel_words(rank: RankState, job: JobState) -> list[str]:
    """Say that the kernel's log reports the end of a rank; a container counts its processes by other numbers."""
    for victim in job.oom_victims:
        held = f"{victim.name}, which held {format_bytes(victim.resident_bytes)}"
        if victim.pid == rank.pid:
            return [f"the kernel's log says that its OOM killer ended process {victim.pid} ({held})"]
    for victim in job.oom_victims:
        held = f"{victim.name}, which held {format_bytes(victim.resident_bytes)}"
        if rank.exit is not None and abs(victim.t_ns - rank.exit.t_ns) < NEAR_NS and _is_python(victim.name):
            return [f"the kernel's log says that its OOM killer ended process {victim.pid} of the host ({held}) then"]
    return []


def _is_python(name: str) -> bool:
    """Say whether a process of this name may be a rank."""
    return name.startswith(("python", "pt_", "torchrun"))


def _memory_use_words(rank: RankState, job: JobState) -> list[str]:
    """Say that memory was nearly full before the end, or would have been as it grew."""
    used = job.find_memory_use().get(rank.rank) if job.find_memory_use is not None else None
    if used is None or used.at_end < NEARLY_FULL:
        return []
    grew = f", and grew by {format_fraction(used.growth_per_s, 0)} a second" if used.share < NEARLY_FULL else ""
    return [
        f"{format_fraction(used.share, 0)} of the memory of its host, or container, was in use "
        f"when last sampled{f' {used.since_s:.1f} s before' if grew else ''}{grew}: perhaps its OOM killer"
    ]


def _host_words(job: JobState) -> list[str]:
    """Say that the kernel ended processes for want of memory, where its counter alone tells."""
    if not job.host_oom_kills:
        return []
    return [
        f"the kernel's OOM killer struck {plural(job.host_oom_kills, 'time')} on the hosts of this job while it ran, "
        "by their counters (/proc/vmstat); which processes, the kernel's log would tell"
    ]


def _killed_finding(rank: RankState, job: JobState) -> Finding:
    name = rank.signal_name
    place = _place(rank)
    late = rank.ended_ns != UNKNOWN_NS
    facts = [f"rank {rank.rank}: process {rank.pid} was ended by {name}; {_last_seen_words(rank)}"]
    advice = ["Ask who sent the signal: the kernel log (dmesg), the scheduler's log, other users of the host."]
    if name == "SIGKILL":
        facts += [f"the log tells of a kill for want of memory: {said[:200]}" for said in oom_reports(job)[:1]]
    if job.oom_kills and name == "SIGKILL":
        facts.append(
            f"the kernel's OOM killer struck {plural(job.oom_kills, 'time')} in this job's cgroup while it ran"
        )
        facts += resident_words(rank, job)
        advice = [OUT_OF_MEMORY]
    elif name == "SIGKILL" and (words := _kernel_words(rank, job)):
        facts += [*words, *resident_words(rank, job)]
        advice = [OUT_OF_MEMORY]
    elif name == "SIGKILL" and (words := _host_words(job)):
        facts += [*words, *_memory_use_words(rank, job), *resident_words(rank, job)]
        advice = [OUT_OF_MEMORY, *advice]
    elif name == "SIGKILL" and (words := _memory_use_words(rank, job)):
        facts += [*words, *resident_words(rank, job)]
    elif late:
        facts.append("the program had exited without an error: this happened while the interpreter shut down")
        if name == "SIGABRT":
            facts.append(f"the usual cause, not looked for here: {LATE_THREAD}")
        advice = [END_IN_ORDER]
    elif name in NATIVE_CRASHES:
        advice = ["Native code crashed: look at the last lines this rank printed, and take a core dump next time."]
    return exit_finding(
        "rank-killed",
        f"Rank {rank.rank} was killed by {name}{' while its interpreter shut down' if late else _seen_words(rank)}",
        (rank.rank,),
        {rank.rank: place} if place else {},
        job,
        grade=0.97,
        evidence_class=Evidence.DIRECT,
        evidence=tuple(facts),
        advice=tuple(advice),
    )


def _reported_finding(job: JobState) -> Finding:
    """Return the finding for ranks whose signals only the launcher reports, without a time."""
    killed = [rank for rank in job.ranks.values() if not rank.sees_program and was_killed(rank, job)]
    by_kill = [rank for rank in killed if rank.signal_name == "SIGKILL"]
    chosen = by_kill or killed
    culprits, name = tuple(sorted(rank.rank for rank in chosen)), chosen[0].signal_name
    everybody = len(culprits) > 1 and culprits == tuple(range(len(culprits))) and len(culprits) == len(job.ranks)
    facts = [f"{list_ranks(culprits)} ended by {name}, as the launcher saw it"]
    facts += [f"the log tells of a kill for want of memory: {said[:200]}" for said in oom_reports(job)[:1]]
    if everybody:
        facts.append("every rank that the log names ended so: the log does not say which was first")
    ended = job.log.notes("ended-thread") if job.log is not None else []
    if name == "SIGKILL" and oom_reports(job):
        advice = HOST_MEMORY
    elif name == "SIGABRT" and ended:
        facts.append(f"{ended[0].text!r} is what C++ says of a thread that was ended from outside: {LATE_THREAD}")
        advice = END_IN_ORDER
    else:
        advice = SIGNALLED.get(name or "", NATIVE_CRASH)
    finding = exit_finding(
        "rank-killed",
        f"{capitalised(culprits)} {'was' if len(culprits) == 1 else 'were'} killed by {name}",
        culprits,
        {},
        job,
        grade=0.4 if everybody else 0.85,
        evidence=tuple(facts),
        advice=(advice,),
    )
    return replace(finding, culprit_ranks=()) if everybody else finding


RULES: Declared = (
    Rule(kinds=("rank-killed",), stages=(Stage.DEATH,), find=find_killed),
    Rule(kinds=("rank-killed",), stages=(Stage.ABORT,), find=find_aborted),
    Rule(kinds=("rank-killed",), stages=(Stage.LATE,), find=find_late_death),
)
