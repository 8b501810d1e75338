"""Ranks that ended first: by an exception, by a signal, or with status 0 while others wait."""

import re
import signal

from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, rank_list, wait_words
from dtprof.diagnosis.job_state import Evidence, Operation, RankEvidence
from dtprof.diagnosis.known_errors import find_advice, first_words
from dtprof.diagnosis.stop_detection import stop_ns
from dtprof.diagnosis.wait_graph import absent_members
from dtprof.formatting import format_bytes
from dtprof.records.tables import UNKNOWN_NS, ExceptionRecord, ProcessExit, Site

REFUSAL = re.compile(r"ProcessGroup\w*::\w+: ")
"""How back ends begin what they say of arguments that they do not take."""
TO_THE_END_NS = 1_000_000_000
"""Between the end of a program's connections and that of its interpreter."""
OUTLIVED_NS = 1_000_000_000
"""A signal to the whole job ends its ranks within this time."""
TOO_LATE = "imed out"
"""In what back ends say where nothing was lost, and only waited for too long."""
STOPPED = (-2, -15, 130, 143)
"""Exit statuses of a job that was stopped from outside."""
NATIVE_CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
LATE_THREAD = (
    "Python ends a thread of the back end that asks for the GIL while the interpreter shuts down, and torch "
    "aborts at that"
)
"""Seen on gloo with torch 2.13, in `decref_pyobject` of a tensor that a work let go of."""
END_IN_ORDER = (
    "Before the program ends: let go of DDP and FSDP modules, call gc.collect() for what cycles of objects hold, then "
    "destroy_process_group, which ends the threads of groups that nothing else holds."
)


def find_death(evidence: Evidence) -> Finding | None:
    """Return the finding of the rank that raised or was killed first by its own doing; None where nobody was."""
    crashed = [rank for rank in evidence.ranks.values() if _crashed(rank)]
    killed = [rank for rank in evidence.ranks.values() if _killed(rank, evidence)]
    in_work = [rank for rank in killed if rank.ended_ns == UNKNOWN_NS]
    first = min([*crashed, *in_work], key=_end_ns, default=None)
    if first is not None:
        return _killed_finding(first, evidence) if first in in_work else _crashed_finding(first, crashed, evidence)
    return None


def find_late_death(evidence: Evidence) -> Finding | None:
    """Return the finding of a rank that was killed after its program had ended, while the interpreter shut down."""
    late = min((rank for rank in evidence.ranks.values() if _killed(rank, evidence)), key=_end_ns, default=None)
    return _killed_finding(late, evidence) if late is not None else None


def is_late(evidence: Evidence, finding: Finding) -> bool:
    """Say whether the finding is of a rank that was killed after its program had ended."""
    return finding.kind == "rank-killed" and all(
        evidence.ranks[rank].ended_ns != UNKNOWN_NS for rank in finding.culprit_ranks
    )


def _crashed(rank: RankEvidence) -> bool:
    if rank.own_exception is not None:
        return rank.interruption is None and not _communication_failed(rank)
    failed_status = rank.exit is not None and rank.exit.status > 0
    return failed_status and not rank.exceptions


def _communication_failed(rank: RankEvidence) -> bool:
    """Say whether the exception came out of an operation that failed after waiting: a victim's."""
    error = rank.own_exception
    last = rank.operations[-1] if rank.operations else None
    if error is None or last is None or not last.failed or last.done_ns == UNKNOWN_NS:
        return False
    if REFUSAL.search(error.message):
        return False
    raised_by_it = 0 <= error.t_ns - last.done_ns < 1_000_000_000
    return raised_by_it and last.done_ns - last.issued_ns > 1_000_000 and "RuntimeError" in error.type


def _killed(rank: RankEvidence, evidence: Evidence) -> bool:
    if rank.signal_name is None or rank.exit is None or rank.exceptions:
        return False  # a rank whose exception came first may well abort afterwards
    if rank.stopped_politely and not _stopped_alone(rank.exit, evidence):
        return False
    if rank.exit.status == -signal.SIGKILL and _is_last_resort(rank.exit, rank.host, evidence):
        return False
    stopped = evidence.stopped_on_hang_ns
    return stopped is None or rank.exit.t_ns < stopped


def _is_last_resort(end: ProcessExit, host: str, evidence: Evidence) -> bool:
    """Say whether a rank was killed as the job was stopped: together with all others, or since it did not end."""
    if evidence.stop is not None and evidence.stop.by_kill:
        return True
    asked = [stop_ns(rank) for rank in evidence.ranks.values() if rank.host == host]
    return any(t_ns is not None and t_ns < end.t_ns - OUTLIVED_NS for t_ns in asked)


def _stopped_alone(end: ProcessExit, evidence: Evidence) -> bool:
    """Say whether a polite signal ended this rank first, and the others lived on: nobody stopped the whole job."""
    others = [rank for rank in evidence.ranks.values() if rank.pid != end.pid]
    return (
        bool(others)
        and evidence.manifest.exit_status not in STOPPED
        and all(_lived_on(other, end.t_ns) for other in others)
    )


def _lived_on(rank: RankEvidence, t_ns: int) -> bool:
    """Say whether a rank lost its peer by that end: once one has failed by a limit, launchers end the others."""
    error = rank.transport_exception
    if rank.exit is not None and rank.exit.t_ns <= t_ns:
        return False
    if error is not None and error.t_ns >= t_ns - OUTLIVED_NS and TOO_LATE not in error.message:
        return True
    return bool(rank.alive) if rank.exit is None else rank.exit.t_ns > t_ns + OUTLIVED_NS


def _end_ns(rank: RankEvidence) -> int:
    if rank.own_exception is not None:
        return rank.own_exception.t_ns
    return rank.exit.t_ns if rank.exit is not None else rank.last_ns


def died_in_operation(evidence: Evidence, finding: Finding) -> bool:
    """Say whether the finding is of a rank whose native code crashed inside an operation."""
    ranks = [evidence.ranks[rank] for rank in finding.culprit_ranks]
    return finding.kind == "rank-killed" and all(r.signal_name in NATIVE_CRASHES and r.front for r in ranks)


def victims(evidence: Evidence, culprits: set[int]) -> tuple[int, ...]:
    """Return the other ranks that were held up or failed because of a lost peer."""
    return tuple(
        rank.rank
        for rank in evidence.ranks.values()
        if rank.rank not in culprits
        and (rank.front is not None or rank.transport_exception is not None or _communication_failed(rank))
    )


def fronts(evidence: Evidence, ranks: tuple[int, ...]) -> dict[int, Operation]:
    """Return the operation each of these ranks was held up in."""
    return {rank: front for rank in ranks if (front := evidence.ranks[rank].front) is not None}


def common_front(waiting: dict[int, Operation]) -> Operation | None:
    """Return the operation most ranks were held up in."""
    if not waiting:
        return None
    places = [(front.group, front.seq, front.p2p) for front in waiting.values()]
    chosen = max(places, key=places.count)
    return next(f for f in waiting.values() if (f.group, f.seq, f.p2p) == chosen)


def call_sites(waiting: dict[int, Operation]) -> dict[int, Site]:
    """Return the lines of the operations."""
    return {rank: front.site for rank, front in waiting.items() if front.site is not None}


def _waiting_words(waiting: dict[int, Operation], evidence: Evidence) -> str:
    front = common_front(waiting)
    if front is None:
        return ""
    inside = [r for r, f in waiting.items() if (f.group, f.seq, f.p2p) == (front.group, front.seq, front.p2p)]
    group = group_words(evidence.group(front.group)) if front.group.ranks else "its group"
    return f"; {wait_words(inside)} in {front.op} #{front.seq} of {group}"


def _finding(
    kind: str, summary: str, culprits: tuple[int, ...], sites: dict[int, Site], job: Evidence, **rest: object
) -> Finding:
    held_up = victims(job, set(culprits))
    waiting = fronts(job, held_up)
    front = common_front(waiting)
    known = job.group(front.group) if front and front.group.ranks else None
    return Finding(
        kind=kind,
        summary=summary + _waiting_words(waiting, job) + ".",
        culprit_ranks=culprits,
        waiting_ranks=held_up,
        group=known,
        op=front.op if front else None,
        seq=front.seq if front else None,
        step=job.ranks[culprits[0]].steps,
        call_sites=call_sites(waiting),
        culprit_call_sites=sites,
        **rest,  # type: ignore[arg-type]
    )


def _crashed_finding(first: RankEvidence, crashed: list[RankEvidence], evidence: Evidence) -> Finding:
    error = first.own_exception
    if error is None:
        status = first.exit.status if first.exit else "?"
        place = first.last_site
        return _finding(
            "rank-crashed",
            f"Rank {first.rank} ended with exit status {status}, without an exception",
            (first.rank,),
            {first.rank: place} if place else {},
            evidence,
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
    lost = [r.rank for r in evidence.ranks.values() if r.transport_exception is not None]
    if lost:
        facts.append(f"{rank_list(lost)} failed afterwards because the peer was gone: a consequence")
    name = capitalised(culprits)
    known = find_advice(error.type, error.message)
    return _finding(
        "rank-crashed",
        f"{name} raised {text}{at_line(error.frame)}",
        culprits,
        sites,
        evidence,
        confidence=0.97,
        evidence=tuple(facts),
        advice=(known or f"Mend the {error.type} in {rank_list(culprits)}; errors on the other ranks follow from it.",),
    )


def _exhausted_words(rank: RankEvidence, error: ExceptionRecord) -> list[str]:
    """Say what a rank held, where the exception says that its memory ran out."""
    found = next((one for one in rank.out_of_memory if one.message[:200] == error.message[:200]), None)
    if found is None or not any(found.held_bytes.values()):
        return []
    held = sorted(((nbytes, name) for name, nbytes in found.held_bytes.items() if nbytes), reverse=True)
    words = ", ".join(f"{format_bytes(nbytes)} {name.replace('_', ' ')}" for nbytes, name in held)
    return [f"rank {rank.rank} held on {found.device}: {words}"]


def seen_at(rank: RankEvidence) -> str:
    """Return words for where a rank is or was at its end; of its last record, from which it may have gone on, so."""
    if rank.place_held is not None or rank.place is None:
        return at_line(rank.place_held)
    return f", last seen{at_line(rank.place)}"


def _memory_words(rank: RankEvidence, evidence: Evidence) -> list[str]:
    """Say what a rank held in RAM beside the other ranks of its host, where that was sampled."""
    held = evidence.find_resident() if evidence.find_resident is not None else {}
    if rank.rank not in held:
        return []
    others = sorted(nbytes for r, nbytes in held.items() if r != rank.rank and evidence.ranks[r].host == rank.host)
    text = f"rank {rank.rank} held {format_bytes(held[rank.rank])} in RAM when last sampled"
    if others:
        low, high = format_bytes(others[0]), format_bytes(others[-1])
        text += f", the other ranks of its host {low if low == high else f'{low} to {high}'}"
    return [text]


def _killed_finding(rank: RankEvidence, evidence: Evidence) -> Finding:
    name = rank.signal_name
    place = rank.place
    late = rank.ended_ns != UNKNOWN_NS
    facts = [f"rank {rank.rank}: process {rank.pid} was ended by {name}; its last record is{at_line(place)}"]
    advice = ["Ask who sent the signal: the kernel log (dmesg), the scheduler's log, other users of the host."]
    if evidence.oom_kills and name == "SIGKILL":
        facts.append(f"the kernel's OOM killer struck {evidence.oom_kills} time(s) in this job's cgroup while it ran")
        facts += _memory_words(rank, evidence)
        advice = ["The host ran out of memory: lower what each rank holds in host memory, or ask for more."]
    elif late:
        facts.append("the program had ended in order: this happened while the interpreter shut down")
        if name == "SIGABRT":
            facts.append(f"the usual cause, not looked for here: {LATE_THREAD}")
        advice = [END_IN_ORDER]
    elif name in NATIVE_CRASHES:
        advice = ["Native code crashed: look at the last lines this rank printed, and take a core dump next time."]
    return _finding(
        "rank-killed",
        f"Rank {rank.rank} was killed by {name}{' while its interpreter shut down' if late else seen_at(rank)}",
        (rank.rank,),
        {rank.rank: place} if place else {},
        evidence,
        confidence=0.97,
        evidence=tuple(facts),
        advice=tuple(advice),
    )


def find_exited(evidence: Evidence) -> Finding | None:
    """Return the finding for ranks that left with status 0 while others wait for them."""
    fronts = [front for r in evidence.ranks.values() if not r.finished and (front := r.front) is not None]
    peers = {front.peer_rank for front in fronts if front.p2p}
    places = {(front.group, front.seq) for front in fronts if not front.p2p}
    awaited = peers.union(*(absent_members(evidence, group, seq) for group, seq in places))
    awaited = {rank for rank in awaited if rank in evidence.ranks and evidence.ranks[rank].finished}
    if not awaited:
        return None
    culprits = tuple(sorted(awaited))
    sites = {rank: site for rank in culprits if (site := evidence.ranks[rank].last_site) is not None}
    steps = {rank: evidence.ranks[rank].steps for rank in culprits}
    name = capitalised(culprits)
    return _finding(
        "rank-exited",
        f"{name} left the program with status 0",
        culprits,
        sites,
        evidence,
        confidence=0.95,
        evidence=tuple(
            f"rank {rank}: ended in order after {steps[rank]} steps; its last record is{at_line(sites.get(rank))}"
            for rank in culprits
        ),
        advice=(
            "Every rank must make the same collectives: look for an early return, break or exit, "
            "or for fewer batches on that rank.",
        ),
    )


def find_left_alone(evidence: Evidence) -> Finding | None:
    """Return the finding for ranks that ended in order before others lost their connection to a peer.

    For records that do not show in which operation those others were: the last thing to look for.
    """
    lost = [error.t_ns for rank in evidence.ranks.values() if (error := rank.transport_exception) is not None]
    gone = tuple(
        sorted(
            rank.rank
            for rank in evidence.ranks.values()
            if lost and rank.finished and rank.ended_ns != UNKNOWN_NS and rank.ended_ns <= min(lost) + TO_THE_END_NS
        )
    )
    if not gone or evidence.manifest.exit_status in STOPPED:
        return None
    sites = {rank: site for rank in gone if (site := evidence.ranks[rank].last_site) is not None}
    return _finding(
        "rank-exited",
        f"{capitalised(gone)} left the program with status 0, and others lost a peer then",
        gone,
        sites,
        evidence,
        confidence=0.7,
        evidence=tuple(
            f"rank {rank.rank} lost its peer{at_line(error.frame)}: {error.type}"
            for rank in evidence.ranks.values()
            if (error := rank.transport_exception) is not None
        ),
        advice=("Every rank must make the same collectives: look for an early return, break or exit on that rank.",),
    )
