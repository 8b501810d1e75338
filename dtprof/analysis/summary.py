"""The summary of a run: rank by rank, then across ranks. Nothing grows with ranks times events."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from dtprof.analysis.alignment import (
    Clocks,
    Marks,
    MeasuredClock,
    find_measured,
    list_clocks,
    state_errors,
    tighten,
    worst_error_ns,
)
from dtprof.analysis.collectives import RowKey, add_sums, list_collectives
from dtprof.analysis.critical_path import MAX_ROWS, find_critical_path
from dtprof.analysis.doubts import list_doubts
from dtprof.analysis.endings import describe_end
from dtprof.analysis.intervals import Column
from dtprof.analysis.meetings import Meetings
from dtprof.analysis.pipeline import RankPipeline, find_windows, measure_pipelines, windows_of
from dtprof.analysis.ranks import RankFacts, RankReduction, reduce_rank, survey
from dtprof.analysis.results import (
    ClockResult,
    CriticalPathResult,
    GroupResult,
    Overhead,
    RankResult,
    Spread,
    Steps,
    StepSeries,
    StragglerResult,
    Summary,
)
from dtprof.analysis.steps import RankSteps, UsedSteps, agree_on_rule, choose_steps
from dtprof.analysis.stragglers import bin_width, find_stragglers
from dtprof.analysis.timeline import MAX_INTERVALS, draw_timeline
from dtprof.tables import Array, Manifest, ProcessExit, RankTables

MAX_WORLD_SIZE = 1 << 20


class Run(Protocol):
    """Where the records come from; run_format.reader.Run is one."""

    @property
    def path(self) -> Path:
        """The run directory."""

    @property
    def manifest(self) -> Manifest:
        """What is known of the job as a whole."""

    @property
    def exits(self) -> Mapping[int, ProcessExit]:
        """How processes ended, by pid."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be read, a sentence each."""

    @property
    def folders(self) -> Mapping[int, Sequence[tuple[int, Path]]]:
        """(attempt, folder) of every rank, ascending."""

    def load(self, rank: int, attempt: int | None = None) -> RankTables:
        """Read one rank."""

    def host_clocks(self) -> Mapping[str, MeasuredClock]:
        """Return the clocks that launchers measured, by host name."""


@dataclass(frozen=True, kw_only=True)
class Surveys:
    """The first map of all ranks, on the clock of the reference as far as clocks are aligned."""

    facts: list[RankFacts]
    steps: dict[int, RankSteps]
    meetings: Meetings
    pipelines: dict[int, RankPipeline]
    clocks: Clocks
    boots: dict[int, str]  # by rank, as recorded

    @property
    def one_clock(self) -> bool:
        """Say whether all ranks are on one clock."""
        return len({fact.boot_id for fact in self.facts}) <= 1


def survey_run(run: Run, ranks: Sequence[int]) -> Surveys:
    """Survey all ranks; once more where the records of several hosts tell their clocks better than launchers did."""
    measured = run.host_clocks()
    several = len(run.manifest.hosts) != 1 or len(measured) > 1
    found, marks = _survey_on(run, ranks, find_measured(measured), several_clocks=several)
    if len(set(found.boots.values())) < 2:
        return found
    spans: dict[str, tuple[int, int]] = {}
    for fact in found.facts:
        if 0 < fact.first_ns <= fact.last_ns:
            first, last = spans.get(found.boots[fact.rank], (fact.first_ns, fact.last_ns))
            spans[found.boots[fact.rank]] = min(first, fact.first_ns), max(last, fact.last_ns)
    clocks = tighten(found.clocks, marks, spans)
    if clocks.corrections:
        return _survey_on(run, ranks, clocks, several_clocks=False)[0]
    return replace(found, clocks=clocks)


def _survey_on(run: Run, ranks: Sequence[int], clocks: Clocks, *, several_clocks: bool) -> tuple[Surveys, Marks]:
    surveys = Surveys(facts=[], steps={}, meetings=Meetings(), pipelines={}, clocks=clocks, boots={})
    marks = Marks()
    for rank in ranks:
        tables = run.load(rank)
        surveys.boots[rank] = tables.boot_id
        seen = survey(clocks.align(tables), several_clocks=several_clocks)
        surveys.facts.append(seen.facts)
        surveys.steps[rank] = seen.steps
        surveys.meetings.add(seen.meetings)
        marks.add(tables.boot_id, seen.marks)
        if seen.pipeline is not None:
            surveys.pipelines[rank] = seen.pipeline
    return surveys, marks


def summarise(run: Run) -> Summary:
    """Summarise a run. Each rank is read twice, one at a time; three times where clocks of hosts are to be aligned."""
    newest = max((attempts[-1][0] for attempts in run.folders.values()), default=0)
    chosen = sorted(rank for rank, attempts in run.folders.items() if attempts[-1][0] == newest)
    surveys = survey_run(run, chosen)
    facts, meetings, pipelines, clocks = surveys.facts, surveys.meetings, surveys.pipelines, surveys.clocks
    steps = agree_on_rule(surveys.steps)
    used = choose_steps(list(steps.values()))
    windows = find_windows(list(pipelines.values()))
    one_clock = surveys.one_clock
    errors = state_errors(clocks, surveys.boots)

    reductions: list[RankReduction] = []
    sums: dict[RowKey, Array] = {}
    width = bin_width(used.last - used.first + 1, len(chosen))
    max_bars = _max_bars(len(chosen)) if one_clock and used.known else 0
    for rank in chosen:
        reduction = reduce_rank(
            clocks.align(run.load(rank)),
            own=steps[rank],
            used=used,
            meetings=meetings,
            max_bars=max_bars,
            pipeline_windows=windows_of(pipelines.get(rank), windows),
            width=width,
            errors=errors,
            max_hops=MAX_ROWS // max(1, len(chosen)) if one_clock else 0,
        )
        reductions.append(reduction)
        for rows in (reduction.rows, reduction.dropped):
            for key, row in rows.items():
                sums[key] = add_sums(sums[key], row) if key in sums else row

    world_size = _world_size(facts)
    missing = tuple(sorted(set(range(world_size)) - set(chosen)))
    durations = _durations(steps.values(), used)
    collectives = list_collectives(sums)
    pipeline, pipeline_doubts = measure_pipelines(list(pipelines.values()), windows, used)
    return Summary(
        run=str(run.path),
        command=run.manifest.command,
        world_size=world_size,
        hosts=tuple(sorted({fact.host for fact in facts if fact.host})) or run.manifest.hosts,
        backend=_backend(facts),
        torch=_most_common(fact.torch_version for fact in facts),
        tap=_tap(facts),
        complete=not missing and not run.problems and bool(facts) and all(map(_is_complete, facts)),
        missing_ranks=missing,
        dropped_events=sum(fact.dropped_events for fact in facts),
        events=sum(fact.events for fact in facts),
        clock_error_ns=worst_error_ns(clocks, surveys.boots.values()) if one_clock else None,
        wall_ns=_wall_ns(facts),
        overhead=_overhead(facts, reductions),
        groups=_list_groups(facts),
        steps=Steps(
            count=used.count,
            used=(used.first, used.last) if used.known else None,
            duration_ns=_spread(durations),
        ),
        step_series=tuple(_series(own) for own in steps.values() if len(own.numbers)),
        ranks=tuple(_rank_result(fact, reduction, run) for fact, reduction in zip(facts, reductions, strict=True)),
        collectives=collectives,
        pipeline=pipeline,
        stragglers=_stragglers(facts, reductions, pipelines, used=used, width=width, durations=durations),
        timeline=draw_timeline([reduction.bars for reduction in reductions if reduction.bars is not None]),
        cannot_tell=list_doubts(
            facts=facts,
            reductions=reductions,
            used=used,
            collectives=collectives,
            missing=missing,
            one_clock=one_clock,
            run_problems=run.problems,
            stale=sorted(set(run.folders) - set(chosen)),
            restarts=newest,
            pipeline=pipeline_doubts,
            clocks=clocks,
            boots=surveys.boots,
        ),
        critical_path=_critical_path(reductions),
        clocks=_list_clocks(surveys),
    )


def _critical_path(reductions: Sequence[RankReduction]) -> CriticalPathResult | None:
    paths = [reduction.path for reduction in reductions if reduction.path is not None]
    return find_critical_path(paths) if len(paths) == len(reductions) else None


def _list_clocks(surveys: Surveys) -> tuple[ClockResult, ...]:
    boots = surveys.boots
    if len(set(boots.values())) < 2:
        return ()
    middle = [
        (fact.first_ns + fact.last_ns) // 2 for fact in surveys.facts if boots[fact.rank] in surveys.clocks.errors_ns
    ]
    hosts = {boots[fact.rank]: fact.host for fact in reversed(surveys.facts)}
    return list_clocks(surveys.clocks, hosts, int(np.median(middle)) if middle else 0)


def _max_bars(num_ranks: int) -> int:
    """Return how many bars a rank may bring per step: all that fit for a few ranks, fewer each for many."""
    return MAX_INTERVALS if num_ranks <= 8 else max(16, 8 * MAX_INTERVALS // num_ranks)


def _world_size(facts: Sequence[RankFacts]) -> int:
    seen = max((fact.rank + 1 for fact in facts), default=0)
    told = Counter(fact.world_size for fact in facts if 0 < fact.world_size <= MAX_WORLD_SIZE)
    return max(seen, told.most_common(1)[0][0] if told else 0)


def _backend(facts: Sequence[RankFacts]) -> str | None:
    told = (group.backend for fact in facts for group in fact.groups.values() if group.backend)
    by_feature = (name.split(":", 1)[1] for fact in facts for name in fact.features if name.startswith("backend:"))
    return _most_common(told) or _most_common(by_feature)


def _most_common(names: Iterable[str]) -> str | None:
    counts = Counter(name for name in names if name)
    return counts.most_common(1)[0][0] if counts else None


def _tap(facts: Sequence[RankFacts]) -> str | None:
    taps = {fact.tap for fact in facts if fact.tap}
    return "mixed" if len(taps) > 1 else next(iter(taps), None)


def _is_complete(fact: RankFacts) -> bool:
    return fact.closed and not (fact.truncated or fact.problems or fact.errors or fact.dropped_events or fact.unsound)


def _wall_ns(facts: Sequence[RankFacts]) -> int | None:
    """Return the longest time from first to last event on any one clock."""
    spans: dict[str, tuple[int, int]] = {}
    for fact in facts:
        if 0 < fact.first_ns <= fact.last_ns:
            first, last = spans.get(fact.boot_id, (fact.first_ns, fact.last_ns))
            spans[fact.boot_id] = min(first, fact.first_ns), max(last, fact.last_ns)
    return max((last - first for first, last in spans.values()), default=None)


def _overhead(facts: Sequence[RankFacts], reductions: Sequence[RankReduction]) -> Overhead:
    total, count = sum(fact.capture_ns for fact in facts), sum(fact.events for fact in facts)
    shares = [
        fact.capture_ns / fact.events * reduction.events_per_step / reduction.step_ns
        for fact, reduction in zip(facts, reductions, strict=True)
        if fact.events and reduction.step_ns and reduction.events_per_step is not None
    ]
    return Overhead(
        capture_ns_per_event=total // count if count else None,
        capture_ns_total=total,
        share_of_step=sum(shares) / len(shares) if shares else None,
    )


def _list_groups(facts: Sequence[RankFacts]) -> tuple[GroupResult, ...]:
    found: dict[tuple[str, tuple[int, ...]], GroupResult] = {}
    for fact in facts:
        for group in fact.groups.values():
            found.setdefault(
                (group.name, group.ranks),
                GroupResult(
                    name=group.name,
                    description=group.description,
                    ranks=group.ranks,
                    axis=group.axis,
                ),
            )
    return tuple(found.values())


def _durations(steps: Iterable[RankSteps], used: UsedSteps) -> Column:
    columns = [windows[:, 1] - windows[:, 0] for _, windows in (own.used(used.first, used.last) for own in steps)]
    return np.concatenate(columns) if columns else np.zeros(0, np.int64)


def _spread(durations: Column) -> Spread | None:
    if not len(durations):
        return None
    p10, median, p90 = np.percentile(durations, (10, 50, 90))
    return Spread(median=round(median), p10=round(p10), p90=round(p90))


def _series(own: RankSteps) -> StepSeries:
    durations = (own.windows[:, 1] - own.windows[:, 0]).tolist()
    return StepSeries(rank=own.rank, duration_ns=tuple(durations), first_step=int(own.numbers[0]))


def _rank_result(fact: RankFacts, reduction: RankReduction, run: Run) -> RankResult:
    manifest = run.manifest
    return RankResult(
        rank=fact.rank,
        step_ns=reduction.step_ns,
        partition_ns=reduction.partition_ns,
        phases_ns=reduction.phases_ns,
        peak_bytes=fact.peak_bytes,
        memory_categories=fact.memory_categories,
        memory_bytes=fact.memory_bytes,
        out_of_memory=fact.out_of_memory,
        user_phases_ns=reduction.user_phases_ns,
        events=fact.events,
        ended=describe_end(
            exit_seen=run.exits.get(fact.pid),
            ended_ns=fact.ended_ns,
            has_exception=fact.has_exception,
            job_has_ended=manifest.ended_realtime_ns != 0 if manifest.started_realtime_ns else None,
        ),
    )


def _stragglers(
    facts: Sequence[RankFacts],
    reductions: Sequence[RankReduction],
    pipelines: Mapping[int, RankPipeline],
    *,
    used: UsedSteps,
    width: int,
    durations: Column,
) -> tuple[StragglerResult, ...]:
    if not used.known or not len(durations):
        return ()
    return find_stragglers(
        [reduction.waits for reduction in reductions if reduction.waits is not None],
        used=(used.first, used.last),
        width=width,
        step_ns=max(1, round(float(np.median(durations)))),
        stages={rank: own.pipeline.stages for rank, own in pipelines.items()},
        hosts={fact.rank: fact.host for fact in facts},
    )
