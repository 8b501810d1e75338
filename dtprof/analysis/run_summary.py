"""The summary of a run: rank by rank, or of long logs range by range of steps, then across ranks.

Of a long log what is held grows with its steps, not with its records.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dtprof.analysis.caveats import list_caveats
from dtprof.analysis.communication.bucket_reductions import find_repeated
from dtprof.analysis.communication.collective_table import MAX_LISTED, RowKey, add_rows, list_collectives, name_axes
from dtprof.analysis.communication.communication_sites import list_sites, list_sizes, sum_by_phase
from dtprof.analysis.communication.exchange_balance import measure_balance
from dtprof.analysis.communication.rank_pairs import MAX_PAIRED
from dtprof.analysis.communication.serialised_collectives import find_serialised
from dtprof.analysis.communication.small_messages import find_small_messages
from dtprof.analysis.communication.traffic import list_lateness
from dtprof.analysis.critical_path.longest_path import find_critical_path
from dtprof.analysis.map_reduce.long_log_survey import survey_to_sum
from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.map_reduce.rank_sums import RankReduction, Reductions
from dtprof.analysis.map_reduce.reduction import reduce_run
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys
from dtprof.analysis.memory.device_use import measure_use
from dtprof.analysis.memory.memory_formulas import compare_with_formula, find_headroom, list_assumptions
from dtprof.analysis.memory.rank_memory import find_fragmentation
from dtprof.analysis.pipeline.bubbles import PipelineWindows, measure_pipelines
from dtprof.analysis.rank_exits import find_end
from dtprof.analysis.recoveries import find_recoveries
from dtprof.analysis.results import (
    BUBBLE,
    DEVICE,
    HOST,
    CollectiveResult,
    CriticalPathResult,
    DeviceTimes,
    GroupResult,
    Overhead,
    RankResult,
    Spread,
    Steps,
    StepSeries,
    Summary,
)
from dtprof.analysis.steps.part_bands import list_bands
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps, agree_on_rule, choose_steps
from dtprof.analysis.steps.throughput import measure_throughput
from dtprof.analysis.stragglers.device_clocks import list_losses
from dtprof.analysis.stragglers.run_stragglers import list_durations, name_stragglers, read_device_nodes
from dtprof.analysis.stragglers.straggler_ranks import bin_width
from dtprof.analysis.stragglers.uneven_input import find_uneven_input
from dtprof.analysis.timeline.step_timeline import draw_timeline
from dtprof.columns import median, percentiles
from dtprof.intervals import Column
from dtprof.job.clock_alignment import ClockResult, list_clocks, worst_error_ns
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.job.world_size import newest_ranks
from dtprof.records.nodes.node_reader import NodeSamples
from dtprof.records.nodes.sampled_lines import read_hot_lines
from dtprof.records.tables import Array, Group


def summarise(run: SurveyedRun, executor: Executor = THIS_PROCESS) -> Summary:
    """Summarise a run, without advice.

    Each rank is loaded twice, one at a time; three times where clocks of hosts are to be aligned.
    """
    surveys = survey_to_sum(run, newest_ranks(run.folders), executor)
    measured = choose_steps(list(agree_on_rule(surveys.steps).values()))
    reduced: Reductions = reduce_run(run, executor, surveys=surveys, measured=measured)
    return state_summary(run, surveys, reduced, measured=measured)


@dataclass(frozen=True, kw_only=True)
class ReducedRun:
    """A run after both passes, and what several parts of its summary need."""

    run: SurveyedRun
    surveys: Surveys
    reduced: Reductions
    measured: MeasuredSteps

    @cached_property
    def steps(self) -> Mapping[int, RankSteps]:
        """The steps of each rank, by one rule."""
        return agree_on_rule(self.surveys.steps)

    @cached_property
    def windows(self) -> PipelineWindows:
        """When each pipeline ran."""
        return self.surveys.pipeline_windows(self.measured)

    @cached_property
    def durations(self) -> Column:
        """The durations of the measured steps of all ranks."""
        return list_durations(self.steps.values(), self.measured)

    @property
    def step_ns(self) -> int | None:
        """The median of these."""
        return int(median(self.durations)) if len(self.durations) else None

    @property
    def num_steps(self) -> int:
        """The number of measured steps."""
        return self.measured.last - self.measured.first + 1 if self.measured.known else 0

    @cached_property
    def rows(self) -> dict[RowKey, Array]:
        """The sums of operations, those included of which only sums are left."""
        rows = dict(self.reduced.rows)
        add_rows(rows, self.reduced.dropped)
        return rows

    @cached_property
    def groups(self) -> tuple[GroupResult, ...]:
        """The process groups; of very many some, those of the listed collectives first."""
        rows = self._unnamed_collectives
        return _list_groups(self.surveys.facts, first={row.group for row in rows} if len(rows) == MAX_LISTED else ())

    @cached_property
    def collectives(self) -> tuple[CollectiveResult, ...]:
        """The costliest collectives, with the axes of their groups."""
        return name_axes(self._unnamed_collectives, self.groups)

    @cached_property
    def _unnamed_collectives(self) -> tuple[CollectiveResult, ...]:
        return list_collectives(self.rows)

    @cached_property
    def nodes(self) -> Sequence[NodeSamples]:
        """The samples of the nodes whose devices ranks compute on."""
        return read_device_nodes(self.run, self.surveys.facts)


def state_summary(run: SurveyedRun, surveys: Surveys, reduced: Reductions, *, measured: MeasuredSteps) -> Summary:
    """Return the summary of a run from its reduced ranks over these steps; reads no record."""
    case = ReducedRun(run=run, surveys=surveys, reduced=reduced, measured=measured)
    waits = [reduction.waits for reduction in reduced.ranks]
    pipeline, pipeline_caveats = measure_pipelines(list(surveys.pipelines.values()), case.windows, measured)
    throughput, throughput_caveats = measure_throughput(
        case.steps, surveys.consumed, surveys.distinct_groups(), measured, incomplete=surveys.incomplete
    )
    stragglers, straggler_caveats = name_stragglers(run, surveys, waits, measured=measured, nodes=case.nodes)
    summary = _state_job(case)
    for state in (_state_steps, _state_communication, _state_hardware):
        summary = state(case, summary)
    return replace(
        summary,
        pipeline=pipeline,
        throughput=throughput,
        stragglers=stragglers if summary.collectives or surveys.world_size < 2 else None,
        uneven_input=find_uneven_input(
            case.steps,
            surveys.consumed,
            waits,
            measured,
            width=bin_width(case.num_steps, len(surveys.facts)),
            step_ns=case.step_ns,
        ),
        cannot_tell=list_caveats(
            run,
            surveys,
            reduced,
            summary,
            measured=measured,
            devices=list_losses(case.nodes),
            unlisted=max(0, len(case.rows) - MAX_LISTED),
            of_figures=(*pipeline_caveats, *throughput_caveats, *straggler_caveats),
        ),
    )


def _state_job(case: ReducedRun) -> Summary:
    """State the job, how much of it was recorded and on which clocks, its groups and its operations."""
    run, surveys, facts = case.run, case.surveys, case.surveys.facts
    missing = surveys.missing
    return Summary(
        run=run.name,
        command=run.manifest.command,
        world_size=surveys.world_size,
        hosts=tuple(sorted({fact.host for fact in facts if fact.host})) or run.manifest.hosts,
        backend=_backend(facts),
        torch=_most_common(fact.torch_version for fact in facts),
        hook=_hook(facts),
        complete=not missing and not run.problems and bool(facts) and all(map(_is_complete, facts)),
        missing_ranks=missing,
        left_out_ranks=tuple(sorted(set(run.folders) - set(newest_ranks(run.folders)))),
        dropped_events=sum(fact.dropped_events for fact in facts),
        events=sum(fact.events for fact in facts),
        clock_error_ns=worst_error_ns(surveys.clocks, surveys.boots.values()) if surveys.one_clock else None,
        wall_ns=_wall_ns(facts),
        overhead=_overhead(facts, case.reduced.ranks),
        clocks=_list_clocks(surveys),
        device=_device_times(facts),
        groups=case.groups,
        collectives=case.collectives,
        replicas=run.manifest.replicas,
        recoveries=find_recoveries(run),
        steps=Steps(
            count=case.measured.count,
            used=(case.measured.first, case.measured.last) if case.measured.known else None,
            duration_ns=_spread(case.durations),
        ),
        step_series=(),
        ranks=(),
        stragglers=None,
        timeline=None,
        cannot_tell=(),
    )


def _state_steps(case: ReducedRun, summary: Summary) -> Summary:
    """State where the time of steps goes, rank by rank."""
    reductions = case.reduced.ranks
    waited_for = [own.waits.by_culprit() if own.waits is not None else None for own in reductions]
    # A rank waits for members of its groups: few pairs of many ranks. Where they are too many, none is listed.
    if sum(map(len, filter(None, waited_for))) > MAX_PAIRED**2:
        waited_for = [None] * len(waited_for)
    ranks = tuple(
        _rank_result(
            fact, reduction, case.run, waited_for_ns=waited, knows_bubble=fact.rank not in case.windows.unknown
        )
        for fact, reduction, waited in zip(case.surveys.facts, reductions, waited_for, strict=True)
    )
    return replace(
        summary,
        step_series=tuple(_series(own) for own in case.steps.values() if len(own.numbers)),
        ranks=ranks,
        part_bands=list_bands(ranks, case.reduced.step_parts),
        hot_lines=read_hot_lines(case.run.path),
        timeline=draw_timeline([reduction.bars for reduction in reductions if reduction.bars is not None]),
        # Replicas wait for each other outside the records, if at all.
        critical_path=_critical_path(reductions) if case.run.manifest.replicas == 1 else None,
    )


def _state_communication(case: ReducedRun, summary: Summary) -> Summary:
    """State which lines, phases and sizes communicate, who comes late, and what communication could be spared."""
    reductions, groups = case.reduced.ranks, case.groups
    num_steps, step_ns, num_ranks = case.num_steps, case.step_ns, len(case.surveys.facts)
    sites = list_sites(case.reduced.sites, num_steps=num_steps, num_ranks=num_ranks)
    return replace(
        summary,
        lateness=list_lateness(case.reduced.lateness),
        call_sites=sites,
        communication_phases=sum_by_phase(case.reduced.sites, num_steps=num_steps, num_ranks=num_ranks),
        message_sizes=list_sizes(case.reduced.sites, num_steps=num_steps, num_ranks=num_ranks),
        small_messages=find_small_messages(case.collectives, sites, num_steps=num_steps, step_ns=step_ns),
        repeated_reductions=find_repeated(
            [reduction.buckets for reduction in reductions], groups, sites, num_steps=num_steps, step_ns=step_ns
        ),
        serialised=find_serialised(
            [reduction.serialised for reduction in reductions], groups, num_steps=num_steps, step_ns=step_ns
        ),
        exchanges=measure_balance({reduction.rank: reduction.exchanges for reduction in reductions}, groups),
    )


def _state_hardware(case: ReducedRun, summary: Summary) -> Summary:
    """State how memory and devices are used."""
    facts = case.surveys.facts
    return replace(
        summary,
        headroom=find_headroom(case.run.node_memory()),
        gpus=measure_use(case.nodes, _ranks_by_device(case.surveys)),
        memory_assumptions=list_assumptions([(fact.memory_categories, fact.model_share) for fact in facts]),
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
    return list_clocks(surveys.clocks, hosts, int(median(middle)) if middle else 0)


def _device_times(facts: Sequence[RankFacts]) -> DeviceTimes:
    errors = {fact.rank: fact.device_error_ns for fact in facts if fact.device_error_ns is not None}
    leads = [fact.host_lead_ns for fact in facts if fact.host_lead_ns is not None]
    return DeviceTimes(
        ranks=tuple(errors),
        error_ns=max(errors.values(), default=None),
        host_lead_ns=int(median(leads)) if leads else None,
    )


def _backend(facts: Sequence[RankFacts]) -> str | None:
    by_group = (group.backend for fact in facts for group in fact.groups.values() if group.backend)
    by_feature = (name.split(":", 1)[1] for fact in facts for name in fact.features if name.startswith("backend:"))
    return _most_common(by_group) or _most_common(by_feature)


def _most_common(names: Iterable[str]) -> str | None:
    counts = Counter(name for name in names if name)
    return counts.most_common(1)[0][0] if counts else None


def _hook(facts: Sequence[RankFacts]) -> str | None:
    hooks = {fact.hook for fact in facts if fact.hook}
    return "mixed" if len(hooks) > 1 else next(iter(hooks), None)


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
    if not any(fact.hook for fact in facts):
        return Overhead(capture_ns_per_event=None, capture_ns_total=None, share_of_step=None)
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


def _list_groups(facts: Sequence[RankFacts], first: Container[str] = ()) -> tuple[GroupResult, ...]:
    """Return the groups; of very many those named first, then others, MAX_LISTED in all."""
    found: dict[tuple[str, tuple[int, ...]], Group] = {}
    for fact in facts:
        for group in fact.groups.values():
            found.setdefault((group.name, group.ranks), group)
    groups = list(found.values())
    if len(groups) > MAX_LISTED:
        groups = sorted(groups, key=lambda group: group.name not in first)[:MAX_LISTED]
    return tuple(
        GroupResult(name=group.name, description=group.description, ranks=group.ranks, axis=group.axis)
        for group in groups
    )


def _spread(durations: Column) -> Spread | None:
    if not len(durations):
        return None
    p10, p50, p90 = percentiles(durations, (10, 50, 90))
    return Spread(median=round(p50), p10=round(p10), p90=round(p90))


def _series(own: RankSteps) -> StepSeries:
    durations, first = (own.windows[:, 1] - own.windows[:, 0]).tolist(), int(own.numbers[0])
    numbers = () if (np.diff(own.numbers) == 1).all() else tuple(own.numbers.tolist())
    return StepSeries(rank=own.rank, duration_ns=tuple(durations), first_step=first, numbers=numbers)


def _rank_result(
    fact: RankFacts,
    reduction: RankReduction,
    run: SurveyedRun,
    *,
    waited_for_ns: dict[int, int] | None,
    knows_bubble: bool,
) -> RankResult:
    manifest = run.manifest
    partition: Mapping[str, int | None] | None = reduction.partition_ns
    if partition is not None and not knows_bubble:
        partition = {**partition, BUBBLE: None}
    return RankResult(
        rank=fact.rank,
        step_ns=reduction.step_ns,
        partition_ns=partition,
        partition_error_ns=reduction.partition_error_ns,
        phases_ns=reduction.phases_ns,
        peak_bytes=fact.peak_bytes,
        memory_categories=fact.memory_categories,
        memory_bytes=fact.memory_bytes,
        fragmentation=find_fragmentation(fact.memory_bytes),
        memory_growth=reduction.memory_growth,
        memory_formula=compare_with_formula(fact.memory_categories, fact.model_share),
        out_of_memory=fact.out_of_memory,
        user_phases_ns=reduction.user_phases_ns,
        waited_for_ns=waited_for_ns,
        clock=DEVICE if fact.device_error_ns is not None else HOST if fact.hook else None,
        host_lead_ns=fact.host_lead_ns,
        events=fact.events,
        ended=find_end(
            exit_seen=run.exit_of(fact.host, fact.pid),
            ended_ns=fact.ended_ns,
            has_exception=fact.has_exception,
            job_has_ended=manifest.ended_realtime_ns != 0 if manifest.started_realtime_ns else None,
        ),
    )


def _ranks_by_device(surveys: Surveys) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the ranks that compute on each device, by boot of the host and UUID."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for fact in surveys.facts:
        ranks.setdefault((surveys.boots[fact.rank], fact.device_uuid), []).append(fact.rank)
    return {place: tuple(some) for place, some in ranks.items()}
