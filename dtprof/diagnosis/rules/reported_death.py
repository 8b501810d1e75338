"""Deaths that messages report and that no exit record of a rank shows."""

from dtprof.diagnosis.findings import Finding, capitalised
from dtprof.diagnosis.known_errors import HOST_MEMORY, NATIVE_CRASH, SIGNALLED
from dtprof.diagnosis.log_findings.log_rule import log_rule
from dtprof.diagnosis.rule import Declared, Stage
from dtprof.diagnosis.sources.logs.log_facts import SIGNALS, UNNAMED_EXIT, Note
from dtprof.diagnosis.sources.logs.logged_job import LoggedJob

OUTPUT_BY_RANK = "Keep every rank's output by itself: deepspeed --enable_each_rank_log DIR, torchrun --log-dir DIR."


def find_unnamed_death(job: LoggedJob) -> Finding | None:
    """Return the finding for a process of which only the kernel, or its last line, tells that it died."""
    ooms = job.notes("oom-kill")
    return _oom_alone(ooms, job) if ooms else _ended_alone(job) or _native_alone(job) or _actor_alone(job)


def find_device_error(job: LoggedJob) -> Finding | None:
    """Return the finding for a device that failed under its watchdog."""
    notes = job.notes("device-error")
    if not notes or job.own_traces:
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
        grade=0.7 if len(ranks) <= 1 else 0.5,
        evidence=(first.text, *(note.text[:160] for note in job.notes("xid")[:1])),
        advice=("Run once with CUDA_LAUNCH_BLOCKING=1 for the line of the kernel; look for Xid in the kernel log.",),
    )


def _oom_alone(ooms: list[Note], job: LoggedJob) -> Finding:
    return Finding(
        kind="rank-killed",
        summary="A process of the job was killed because its host or container ran out of memory.",
        culprit_ranks=(),
        waiting_ranks=tuple(sorted(job.waited_for())),
        grade=0.6,
        evidence=(ooms[0].text,),
        advice=(HOST_MEMORY,),
    )


def _ended_alone(job: LoggedJob) -> Finding | None:
    """Return the finding for a process of which its launcher tells how it ended, and not which it was."""
    ends = job.notes(UNNAMED_EXIT, "signal-received")
    if not ends or job.waited_for() or job.exits:
        return None
    status = ends[0].number if ends[0].kind == UNNAMED_EXIT else -ends[0].number
    name = next((name for name, number in SIGNALS.items() if number == -status), None)
    how = f"was killed by {name or f'signal {-status}'}" if status < 0 else f"ended with exit status {status}"
    return Finding(
        kind="rank-killed" if status < 0 else "rank-crashed",
        summary=f"A process of the job {how}; the log does not say which.",
        culprit_ranks=(),
        grade=0.6,
        evidence=(ends[0].text[-160:],),
        advice=(*((SIGNALLED.get(name or "", NATIVE_CRASH),) if status < 0 else ()), OUTPUT_BY_RANK),
        leaves_open=("which rank it was: such a launcher prints the command of its last process, whichever failed",),
    )


def _native_alone(job: LoggedJob) -> Finding | None:
    crashes = job.notes("native-crash")
    if not crashes or job.waited_for():
        return None
    ranks = tuple(sorted({note.rank for note in crashes if note.rank is not None}))
    return Finding(
        kind="rank-killed",
        summary=f"{capitalised(ranks) if ranks else 'A process of the job'} crashed in native code.",
        culprit_ranks=ranks,
        grade=0.5,
        evidence=(crashes[0].text,),
        advice=(NATIVE_CRASH,),
    )


def _actor_alone(job: LoggedJob) -> Finding | None:
    """Return the finding for a worker of Ray that ended without an exception."""
    deaths = job.notes("actor-died")
    if not deaths or job.own_traces or job.waited_for():
        return None
    pids = sorted({note.number for note in deaths if note.number})
    which = f" (pid {', '.join(map(str, pids[:8]))})" if pids else ""
    return Finding(
        kind="rank-killed",
        summary=f"A worker process of Ray{which} was killed or crashed in native code; its rank is not in the log.",
        culprit_ranks=(),
        grade=0.5,
        evidence=(deaths[0].text[:160],),
        advice=("Read the output of that process in Ray's session folder, and the kernel log of its host (dmesg).",),
    )


RULES: Declared = (
    log_rule(find_device_error, ("rank-crashed",), Stage.NAMED),
    log_rule(find_unnamed_death, ("rank-killed", "rank-crashed")),
)
