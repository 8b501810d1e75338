"""The rules in order: operations that do not fit, ranks that do not come, devices that do not finish, cycles."""

from dataclasses import replace

from dtprof.diagnosis.findings import Finding, Verdict, at_line, group_words, rank_list, wait_words
from dtprof.diagnosis.sources.flight_recorder import dump_divergence, dump_stalls
from dtprof.diagnosis.sources.flight_recorder.absent_dump_ranks import absent_finding
from dtprof.diagnosis.sources.flight_recorder.dump_tables import Dump, Labels
from dtprof.diagnosis.sources.flight_recorder.dump_wait_cycles import cycle_finding
from dtprof.diagnosis.sources.flight_recorder.dump_wait_graph import Waits, find_waits
from dtprof.diagnosis.sources.flight_recorder.dumped_job import Job, assemble, dumps_of

SOURCE = ("flight_recorder",)


def diagnose_dumps(dumps: list[Dump], problems: list[str], unreadable: list[int], labels: Labels) -> Verdict:
    """Return the verdict on dumps as their reader gives them.

    Raises:
        NotADumpError: they are of jobs with different members.
    """
    return decide(assemble(dumps, labels, unreadable=unreadable, problems=problems))


def decide(job: Job) -> Verdict:
    """Return the verdict on the dumps of a job."""
    pending = any(dump.pending for dump in job.dumps.values())
    held_up = pending and not job.moving
    finding = _first_cause(job, held_up=held_up)
    culprits = finding.culprit_ranks if finding is not None else ()
    reasons = []
    outcome = "hang" if held_up and finding is not None else "risk" if finding is not None else "healthy"
    if held_up and finding is None:
        outcome = "unknown"
        reasons.append(_open_question(job))
    elif pending and not held_up:
        reasons.append("operations still ended when the dumps were written: they show a moment of a job that goes on")
    silent = [rank for rank in job.missing if rank in job.silent]
    lost = [rank for rank in job.missing if rank not in job.silent and rank not in culprits]
    reasons += job.problems[:1]
    if silent:
        reasons.append(f"{dumps_of(silent)} could not be used: what {_they(silent)} did is not known")
    if lost:
        reasons.append(
            f"{rank_list(lost)} left no dump: ended, killed, or not given here; what {_they(lost)} did is not known"
        )
    return Verdict(
        outcome=outcome,
        source=SOURCE,
        ranks_seen=tuple(sorted(job.dumps)),
        ranks_missing=job.missing,
        findings=(finding,) if finding is not None else (),
        cannot_tell=(*reasons, *job.problems[1:]),
    )


def _they(ranks: list[int]) -> str:
    return "they" if len(ranks) > 1 else "it"


def _open_question(job: Job) -> str:
    """Say what does not end, and what would tell why."""
    waits = find_waits(job)
    held = "operations have not ended"
    if waits.fronts:
        front = waits.fronts[0]
        place = f"{front.first.op} #{front.seq} of {group_words(job.group(front.key))}{at_line(front.first.site)}"
        held = f"{wait_words(sorted(front.waiting))} in {place}"
    elif waits.meetings:
        one = waits.meetings[0].first
        held = f"rank {waits.meetings[0].waiter} is in {one.op} #{one.seq}{at_line(one.site)}"
    lacking = f"give {dumps_of(job.missing)} too, or " if job.missing else ""
    return (
        f"{held}, and these dumps do not show why: {lacking}take the stacks of all ranks while it hangs (py-spy dump)"
    )


def _first_cause(job: Job, *, held_up: bool) -> Finding | None:
    waits = find_waits(job) if held_up else Waits(fronts=(), meetings=(), edges={})
    partings = dump_divergence.find_mismatches(job)
    if partings:
        stuck = {front.key for front in waits.fronts}
        first, *others = sorted(partings, key=lambda parting: (parting.key not in stuck, -parting.confidence))
        waiting = tuple(sorted({r for f in waits.fronts if f.key == first.key for r in f.waiting} - {*first.culprits}))
        finding = dump_divergence.finding_of(job, first, waiting=waiting, held_up=held_up)
        more = tuple(f"group {parting.key.name} #{parting.seq}: {parting.fact}" for parting in others[:3])
        return replace(finding, evidence=(*finding.evidence, *more))
    if not held_up:
        return None
    return dump_stalls.size_finding(job, waits) or _from_waits(job, waits)


def _from_waits(job: Job, waits: Waits) -> Finding | None:
    sinks = waits.sinks
    idle = [rank for rank in sinks if rank in job.dumps and not job.of(rank)]
    if idle:
        return absent_finding(job, waits, tuple(idle))
    lost = [rank for rank in sinks if rank not in job.dumps]
    unknown = [rank for rank in lost if rank in job.silent]
    if lost and not unknown:
        return absent_finding(job, waits, tuple(lost)) if 2 * len(lost) <= len(job.world) else None
    if unknown:
        return None
    busy = [rank for rank in sinks if job.of(rank)]
    if busy or not waits.edges:
        return dump_stalls.stall_finding(job, waits, busy or list(job.dumps))
    cycle = waits.cycle()
    return cycle_finding(job, waits, cycle) if cycle else None
