"""Ranks that ended by their own doing, or were ended, as logs tell it."""

import signal

from dtprof.diagnosis.findings import Finding, at_line, capitalised, rank_list
from dtprof.diagnosis.known_errors import HOST_MEMORY, SHARED_MEMORY, find_advice, first_words
from dtprof.diagnosis.rules.rank_killed import END_IN_ORDER, LATE_THREAD
from dtprof.diagnosis.sources.logs.log_facts import Note, Trace
from dtprof.diagnosis.sources.logs.logged_job import TERMINATED, Job, operation, simple_type


def find_crash(job: Job) -> Finding | None:
    """Return the finding of the exception that came first and tells of no peer."""
    failed = [*job.own.items(), *[(-1, trace) for trace in job.own_unknown]]
    if not failed:
        return _find_device_error(job)
    first_rank, first = min(failed, key=lambda item: item[1].order)
    alike = [rank for rank, trace in failed if _same(trace, first)]
    culprits = tuple(sorted(rank for rank in alike if rank >= 0))
    message = first_words(first.message)
    text = f"{simple_type(first)}: {message}" if message else simple_type(first)
    who = capitalised(culprits) if culprits else "A rank that the log does not name"
    facts = [f"{'rank ' + str(first_rank) if first_rank >= 0 else 'a rank'}: {text}{at_line(first.site)}"]
    later = sorted(rank for rank, trace in job.own.items() if not _same(trace, first))
    if later:
        facts.append(f"{rank_list(later)} raised another exception, or at another line, later in the log")
    waiting = job.waited_for() - set(culprits)
    if waiting:
        facts.append(f"{rank_list(sorted(waiting))} failed because a peer was gone or late: a consequence")
    facts += _death_of_loader(job)
    certain = bool(culprits) and (first.fatal or any(rank in job.exits for rank in culprits))
    return Finding(
        kind="rank-crashed",
        summary=f"{who} raised {text}{at_line(first.site)}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(sorted(waiting)),
        confidence=0.9 if certain else 0.7,
        op=None,
        call_sites=job.sites(sorted(waiting)),
        culprit_call_sites={rank: first.site for rank in culprits if first.site is not None},
        evidence=tuple(facts),
        advice=(_advice(first),),
    )


def _same(one: Trace, other: Trace) -> bool:
    return simple_type(one) == simple_type(other) and one.site == other.site


def _advice(trace: Trace) -> str:
    known = find_advice(trace.type, trace.message)
    return known or f"Mend the {simple_type(trace)}; the rest follows from it."


def _death_of_loader(job: Job) -> list[str]:
    notes: list[Note] = job.notes("oom-kill")
    return [f"the log tells of the OOM killer: {notes[0].text[:160]}"] if notes else []


def _find_device_error(job: Job) -> Finding | None:
    notes = job.notes("device-error")
    if not notes:
        return None
    first = notes[0]
    ranks = tuple(sorted({note.rank for note in notes if note.rank is not None}))
    culprits = (first.rank,) if first.rank is not None else ()
    text = first.text.partition("terminated with exception: ")[2].split(". ")[0][:120]
    return Finding(
        kind="rank-crashed",
        summary=f"{capitalised(culprits) if culprits else 'A rank'} failed on its device: {text}.",
        culprit_ranks=culprits,
        waiting_ranks=tuple(rank for rank in ranks if rank not in culprits),
        confidence=0.7 if len(ranks) <= 1 else 0.5,
        evidence=(first.text, *(note.text[:160] for note in job.notes("xid")[:1])),
        advice=("Run once with CUDA_LAUNCH_BLOCKING=1 for the line of the kernel; look for Xid in the kernel log.",),
    )


def find_killed(job: Job) -> Finding | None:
    """Return the finding of ranks ended by a signal that nobody's exception explains."""
    explained = job.waited_for() | set(job.own)
    by_signal = {r: -end.status for r, end in job.exits.items() if end.status < 0 and end.status not in TERMINATED}
    by_signal |= {r: end.status - 128 for r, end in job.exits.items() if end.status in (134, 135, 137, 139)}
    cancelled = any("CANCELLED" in note.text for note in job.notes("stopped")) and not job.has_table
    own = {r: s for r, s in by_signal.items() if not cancelled and (s == 9 or r not in explained)}
    ooms = job.notes("oom-kill")
    if not own:
        return _oom_alone(ooms, job) if ooms else _native_alone(job)
    chosen = {r: s for r, s in own.items() if s == 9} or own
    culprits = tuple(sorted(chosen))
    name = _signal_name(chosen[culprits[0]])
    everybody = len(chosen) > 1 and set(chosen) >= job.known
    facts = [f"{rank_list(culprits)} ended by {name}, as the launcher saw it"]
    if ooms:
        facts.append(f"the log tells of the OOM killer: {ooms[0].text[:200]}")
    if everybody:
        facts.append("every rank that the log names ended so: what it began with is not told")
    waiting = tuple(sorted(job.waited_for() - set(culprits)))
    if name == "SIGKILL":
        advice = (
            HOST_MEMORY
            if ooms
            else "Look for the OOM killer in the kernel log of the host (dmesg), and at who may kill."
        )
    elif name == "SIGBUS":
        advice = SHARED_MEMORY
    elif name == "SIGABRT" and (ended := job.notes("ended-thread")):
        facts.append(f"{ended[0].text!r} is what C++ says of a thread that was ended from outside: {LATE_THREAD}")
        advice = END_IN_ORDER
    else:
        advice = "Native code crashed: take a core dump or set PYTHONFAULTHANDLER=1 for the stack."
    return Finding(
        kind="rank-killed",
        summary=f"{capitalised(culprits)} {'was' if len(culprits) == 1 else 'were'} killed by {name}.",
        culprit_ranks=() if everybody else culprits,
        waiting_ranks=waiting,
        confidence=0.4 if everybody else 0.85,
        call_sites=job.sites(list(waiting)),
        evidence=tuple(facts),
        advice=(advice,),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _oom_alone(ooms: list[Note], job: Job) -> Finding:
    return Finding(
        kind="rank-killed",
        summary="A process of the job was killed because its host or container ran out of memory.",
        culprit_ranks=(),
        waiting_ranks=tuple(sorted(job.waited_for())),
        confidence=0.6,
        evidence=(ooms[0].text,),
        advice=(HOST_MEMORY,),
    )


def _native_alone(job: Job) -> Finding | None:
    crashes = job.notes("native-crash")
    if not crashes or job.waited_for():
        return None
    ranks = tuple(sorted({note.rank for note in crashes if note.rank is not None}))
    return Finding(
        kind="rank-killed",
        summary=f"{capitalised(ranks) if ranks else 'A process of the job'} crashed in native code.",
        culprit_ranks=ranks,
        confidence=0.5,
        evidence=(crashes[0].text,),
        advice=("Take a core dump or set PYTHONFAULTHANDLER=1 for the stack.",),
    )


def find_failed_exit(job: Job) -> Finding | None:
    """Return the finding for the only rank that ended with a status above 0 and left no exception."""
    failed = [r for r, end in job.exits.items() if end.status > 0 and r not in job.victims and r not in job.own]
    if len(failed) != 1 or job.victims_unknown or job.facts.timeouts:
        return None
    rank = failed[0]
    calls = {trace.call for trace in job.victims.values()}
    return Finding(
        kind="rank-crashed",
        summary=f"Rank {rank} ended with exit status {job.exits[rank].status}, and its exception is not in the log.",
        culprit_ranks=(rank,),
        waiting_ranks=tuple(sorted(job.victims)),
        confidence=0.5,
        op=operation(next(iter(calls))) if len(calls) == 1 else None,
        call_sites=job.sites(sorted(job.victims)),
        evidence=(f"rank {rank}: exit status {job.exits[rank].status}, as the launcher saw it",),
        advice=("Keep every rank's output: torchrun --log-dir DIR --tee 3, or @record on main().",),
    )
