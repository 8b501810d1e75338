"""Diagnose a run on disk: its files, and the processes of the job that are still alive."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dtprof.diagnosis import job_state as facts
from dtprof.diagnosis.attempts import MAX_ATTEMPTS, Attempt, judge, remember
from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.reported_mismatches import MismatchKey, seconds_after_start
from dtprof.diagnosis.source_merging import merge
from dtprof.diagnosis.sources import recorded_ranks
from dtprof.diagnosis.sources.recorded_ranks import RankRead, read_ranks
from dtprof.diagnosis.sources.recorded_run import HostState, collect, collect_attempt, exit_of
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.records import reader, writer
from dtprof.records.rank_log.counted_segments import KnownCounts
from dtprof.session.engines import IN_THIS_PROCESS, Engine, at_hand, executor_for, open_run
from dtprof.session.process_liveness import is_alive

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary

_Fact = TypeVar("_Fact")
CALM_OPERATIONS = 20_000
"""Of all ranks together that are compared, time and again, while a job goes well."""
RECENT_SHARES = (8, 64, 512)
"""One part in so many of a running job's records is searched for a rank that has become slow."""
RECENT_EVENTS = 16
"""Of each rank, at least: what steps these are is known, where the program counts them."""
RECENT_S = 20.0
"""Shortest time in which steps are searched for it."""
RECENT_LATE_S = 10.0
"""For so long one of the slow ranks has to be late: a moment that is long is no slow rank."""
RECENT_MARGIN = 1.2
"""So many times that long is the newest part of all: steps that are cut off do not make it too short."""


def diagnose_run(
    path: Path,
    engine: Engine = IN_THIS_PROCESS,
    *,
    beside: Sequence[JobState] = (),
) -> Verdict:
    """Return the verdict on a run directory; the engine looks for stragglers.

    Facts of other sources about the same job (`beside`) are joined with the records before the rules read them.

    Raises:
        NotARunError: the path holds no run.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    opened = open_run(path, engine)
    with executor_for(engine, opened) as executor:
        run = at_hand(opened, executor)
        return diagnose_opened(run, lambda: _search(run, executor), executor, beside=beside)


def diagnose_running(
    path: Path,
    *,
    summary: "Summary | None" = None,
    is_stalled: bool = False,
    goes_well: bool = False,
    counts: KnownCounts | None = None,
) -> Verdict:
    """Return the verdict on a job that runs, or has just ended: however long it ran, in seconds.

    Its newest operations are compared, and no other stragglers are looked for than those of the summary.

    Parameters:
        summary: of the newest steps.
        is_stalled: the caller has seen the job stall.
        goes_well: the caller has seen nothing wrong: then fewer operations do.
        counts: of older records, kept from one verdict to the next; None: they are counted anew.

    Raises:
        NotARunError: the path holds no run.
    """
    run = replace(reader.open_run(path), counts=counts)
    newest = CALM_OPERATIONS if goes_well else recorded_ranks.MAX_OPERATIONS
    find_stragglers = None if summary is None else lambda: stragglers_of(summary)
    return diagnose_opened(run, find_stragglers, newest=newest, is_stalled=is_stalled)


def diagnose_opened(
    run: reader.Run,
    find_stragglers: Callable[[], facts.Stragglers] | None,
    executor: Executor = THIS_PROCESS,
    *,
    newest: int | None = None,
    is_stalled: bool = False,
    beside: Sequence[JobState] = (),
) -> Verdict:
    """Return the verdict on a run that is open.

    Parameters:
        find_stragglers: finds those of the run, where a rule needs them; None: they are not looked for.
        newest: operations of all ranks together that are compared; None for as many as memory allows.
        is_stalled: the caller watches the job and has seen it stall.
        beside: the same job according to other sources.
    """
    return _with_times_seen(_diagnose_newest_attempt(run, find_stragglers, executor, newest, is_stalled, beside), run)


def _diagnose_newest_attempt(
    run: reader.Run,
    find_stragglers: Callable[[], facts.Stragglers] | None,
    executor: Executor,
    newest: int | None,
    is_stalled: bool,
    beside: Sequence[JobState],
) -> Verdict:
    reads = list(read_ranks(run, run.ranks, executor, newest=newest))
    evidence = collect(
        run,
        reads,
        _observe(run, reads, is_stalled=is_stalled),
        find_stragglers=find_stragglers,
    )
    last = judge(merge([evidence, *beside]))
    # Beside a running job, the summary is that of the newest steps already.
    is_whole = find_stragglers is not None and newest is None
    if is_whole and not last.verdict.findings and not run.manifest.ended_realtime_ns:
        last = _judge_newest(run, executor, evidence, beside) or last
    if last.finding is None or all(len(attempts) == 1 for attempts in run.folders.values()):
        return last.verdict

    def judge_earlier(number: int) -> Attempt:
        present = [rank for rank, attempts in run.folders.items() if number in dict(attempts)]
        return judge(collect_attempt(run, read_ranks(run, present, executor, attempt=number, newest=newest)))

    numbers = Counter(number for attempts in run.folders.values() for number, _ in attempts[:-1])
    earlier = [number for number in sorted(numbers) if numbers[number] > 1][-MAX_ATTEMPTS:]
    return remember(last, [judge_earlier(number) for number in earlier])


def _judge_newest(
    run: reader.Run, executor: Executor, evidence: JobState, beside: Sequence[JobState]
) -> Attempt | None:
    """Return the verdict on the newest steps of a running job, where those show a rank that has become slow.

    Over the whole run a rank that was as fast as the others for hours is not late in most steps.
    """
    num_events = run.count_events()
    fewest = RECENT_EVENTS * len(run.ranks)
    searched, operations_per_s = num_events, 0.0
    for share in RECENT_SHARES:
        recent = num_events // share
        if recent < fewest:
            break
        attempt, took_s = _judge_part(run.only_newest(recent, of_each=RECENT_EVENTS), executor, evidence, beside)
        operations_per_s = recent / took_s if took_s else 0.0
        if attempt is None:
            break
        if attempt.verdict.findings:
            return attempt
        searched = recent
    # A rank that has just become slow is late in most of these, where parts of the run are either longer or too short.
    shortest = int(operations_per_s * RECENT_S * RECENT_MARGIN)
    if fewest <= shortest < searched / 2:
        attempt, _ = _judge_part(run.only_newest(shortest, of_each=RECENT_EVENTS), executor, evidence, beside)
        if attempt is not None and attempt.verdict.findings:
            return attempt
    return None


def _judge_part(
    part: reader.Run, executor: Executor, evidence: JobState, beside: Sequence[JobState]
) -> tuple[Attempt | None, float]:
    """Return the verdict on a part of a run, None where its steps are too few or too short; and their seconds."""
    from dtprof.analysis.stragglers.run_stragglers import search_stragglers

    searched = search_stragglers(part, executor)
    took_s = searched.took_ns() / 1e9
    if not searched.num_steps or took_s < RECENT_S:
        return None, took_s
    lasting = any(searched.late_ns(straggler) >= RECENT_LATE_S * 1e9 for straggler in searched.found)
    found = searched.found if lasting else ()
    stragglers = facts.Stragglers(steps=searched.num_steps, found=found, newest_s=took_s)
    ranks = {number: replace(rank, blocked_share=None) for number, rank in evidence.ranks.items()}
    newest = replace(evidence, ranks=ranks, find_stragglers=_constant(stragglers))
    return judge(merge([newest, *beside])), took_s


def _constant(value: _Fact) -> Callable[[], _Fact]:
    return lambda: value


def _observe(run: reader.Run, reads: Iterable[RankRead], *, is_stalled: bool = False) -> HostState:
    """Return which of the ranks that were read are alive; after the reading, so that no record comes later.

    Parameters:
        is_stalled: the caller watches the job and has seen it stall.
    """
    boot_id = writer.boot_id()
    unended = [read.evidence for read in reads if read.boot_id == boot_id and exit_of(run, read) is None]
    return HostState(
        boot_id=boot_id,
        now_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        alive={rank.rank: is_alive(rank.pid, run.path) for rank in unended},
        is_stalled=is_stalled,
    )


def _with_times_seen(verdict: Verdict, run: reader.Run) -> Verdict:
    """Add to mismatches that `dtprof run` reported while the job ran when it reported them."""
    started_ns = run.manifest.started_realtime_ns
    seen = {MismatchKey.read(row): seconds_after_start(row, started_ns) for row in run.mismatches}

    def dated(finding: Finding) -> Finding:
        after_s = seen.get(MismatchKey.of(finding))
        if after_s is None:
            return finding
        when = f"`dtprof run` reported it while the job ran, {after_s:.0f} s after its start"
        return replace(finding, evidence=(*finding.evidence[:3], when, *finding.evidence[3:]))

    return replace(verdict, findings=tuple(map(dated, verdict.findings)))


def stragglers_of(summary: "Summary") -> facts.Stragglers:
    """Return the stragglers of a summary."""
    first, last = summary.steps.used or (1, 0)
    return facts.Stragglers(steps=last - first + 1, found=summary.stragglers or ())


def _search(run: reader.Run, executor: Executor) -> facts.Stragglers:
    from dtprof.analysis.stragglers.run_stragglers import search_stragglers

    searched = search_stragglers(run.only_newest(recorded_ranks.MAX_COLLECTIVES), executor)
    return facts.Stragglers(steps=searched.num_steps, found=searched.found)
