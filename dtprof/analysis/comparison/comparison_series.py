"""Figures step by step, reduced to means with their noise: the input of comparisons and thresholds.

Each rank is read as often as for the summary, one at a time; what is kept are sums over ranks, step by step, and a few
numbers a rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dtprof.analysis.communication.operation_timing import split_blocked
from dtprof.analysis.comparison.comparison_statistics import Estimate, Series, estimate_mean, estimate_ratio
from dtprof.analysis.map_reduce.placed_ranks import RankTiming, time_batch
from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.map_reduce.reduction_tasks import RankTask, part_ranks
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys, survey_run
from dtprof.analysis.metric_registry import unit_of
from dtprof.analysis.pipeline.bubbles import PipelineWindows, RankPipeline, find_bubbles
from dtprof.analysis.results import PARTS
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, RankSteps, agree_on_rule, choose_steps
from dtprof.analysis.steps.step_partition import partition_steps
from dtprof.analysis.steps.throughput import sum_consumption
from dtprof.columns import number_alike
from dtprof.formatting import list_ranks
from dtprof.intervals import Column, Intervals, locate
from dtprof.job.api_names import find_apis
from dtprof.job.axes import purpose_of_operation
from dtprof.job.rank_executor import THIS_PROCESS, Executor, map_tasks
from dtprof.job.valid_records import UNNAMED
from dtprof.job.world_size import newest_ranks
from dtprof.records import codes
from dtprof.records.events import CUDA_ALLOCATED_BYTES, CUDA_RESERVED_BYTES, RSS_BYTES
from dtprof.records.tables import UNKNOWN_NS, Array, Group, RankTables

JOB, COLLECTIVES, RANKS = "job", "collectives", "ranks"
TABLES = (JOB, COLLECTIVES, RANKS)
STEP, EXPOSED, BUBBLE_FRACTION = "step_ns", "exposed_ns", "bubble_fraction"
BUBBLE = "bubble_ns"
SAMPLES = (RSS_BYTES, CUDA_ALLOCATED_BYTES, CUDA_RESERVED_BYTES)
"""Memory that is sampled at each step; peaks are one number a rank."""


class Figure(NamedTuple):
    """Measured quantities. Times, bytes and counts are per step and rank: the mean over ranks."""

    table: str
    name: str  # ends with its unit: _ns, _bytes, _fraction, _per_s; `bytes` and `count` of a collective
    rank: int = -1
    group: str = ""
    members: int = 0
    op: str = ""
    api: str = ""

    @property
    def unit(self) -> str:
        """Return ns, bytes, fraction, count, tokens/s or samples/s."""
        return unit_of(self.name)


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The figures of one run."""

    run: str
    world_size: int
    missing_ranks: tuple[int, ...]
    layout: frozenset[tuple[str, tuple[int, ...]]]  # axis and members of each group of several ranks
    num_steps: int  # ended on every rank
    used: tuple[int, int] | None
    timed_on_device: frozenset[int]  # ranks whose times are those of their device; of the others the host's
    estimates: dict[Figure, Estimate]
    unknown: dict[Figure, str]  # figures of the run that are not known, and why
    exposed_fraction: Estimate | None  # of the step, mean over ranks
    wait_fraction: Estimate | None
    peak_bytes: dict[int, int]  # by rank


@dataclass
class _Sums:
    """Sums over ranks, step by step; unknown for the job where one rank does not know it."""

    series: dict[Figure, Series] = field(default_factory=dict)
    num_ranks: dict[Figure, int] = field(default_factory=dict)
    unknown: dict[Figure, str] = field(default_factory=dict)

    def add(self, figure: Figure, series: Series) -> None:
        known = self.series.get(figure)
        self.series[figure] = series.astype(np.float64) if known is None else known + series
        self.num_ranks[figure] = self.num_ranks.get(figure, 0) + 1

    def join(self, others: "_Sums") -> None:
        for figure, series in others.series.items():
            known = self.series.get(figure)
            self.series[figure] = series if known is None else known + series
            self.num_ranks[figure] = self.num_ranks.get(figure, 0) + others.num_ranks[figure]
        for figure, why in others.unknown.items():
            self.unknown.setdefault(figure, why)


@dataclass(frozen=True, kw_only=True)
class MeasureTask(RankTask):
    """Some ranks to be measured."""

    numbers: Column
    unknown_bubbles: Mapping[int, str]  # ranks whose bubbles are not known, and why


def measure_ranks(task: MeasureTask) -> tuple[_Sums, dict[Figure, Estimate]]:
    """Return the sums over some ranks, and the figures of each."""
    sums = _Sums()
    estimates: dict[Figure, Estimate] = {}
    for batch in task.read_placed():
        for timed in batch.timed(time_batch(batch, task.instances, task.errors)):
            for figure, series in _measure_rank(timed, task, sums).items():
                estimates[figure._replace(table=RANKS, rank=timed.tables.rank)] = estimate_mean(series)
                sums.add(figure, series)
    return sums, estimates


def measure_run(run: SurveyedRun, executor: Executor = THIS_PROCESS) -> RunFigures:
    """Measure a run step by step."""
    chosen = newest_ranks(run.folders)
    surveys = survey_run(run, chosen, executor)
    facts, pipelines = surveys.facts, surveys.pipelines
    steps = agree_on_rule(surveys.steps)
    measured = choose_steps(list(steps.values()))
    numbers = _common_steps(list(steps.values()), measured)
    windows = surveys.pipeline_windows(measured)
    sums = _Sums()
    estimates: dict[Figure, Estimate] = {}
    stepping = {rank: steps[rank] for rank in chosen if len(numbers) and steps[rank].count}
    tasks = (
        MeasureTask(
            **vars(part.task),
            numbers=numbers,
            unknown_bubbles={rank: windows.unknown[rank] for rank in part.ranks if rank in windows.unknown},
        )
        for part in part_ranks(run, surveys, measured=measured, steps=stepping, windows=windows)
    )
    for own_sums, own_estimates in map_tasks(executor, measure_ranks, tasks):
        sums.join(own_sums)
        estimates.update(own_estimates)
    _add_bubble(sums, pipelines, windows, numbers)
    num_stepping = len(stepping)
    for figure, series in sums.series.items():
        if figure.table == JOB and figure.name != BUBBLE_FRACTION and sums.num_ranks[figure] < num_stepping:
            sums.unknown.setdefault(figure, "not every rank measured it")
        if figure not in sums.unknown:
            over = sums.num_ranks[figure] if figure.name == BUBBLE_FRACTION else num_stepping
            estimates[figure] = estimate_mean(series / over)
    if num_stepping:
        _estimate_rates(surveys, steps, numbers, sums.series[Figure(JOB, STEP)] / num_stepping, estimates, sums.unknown)
    return RunFigures(
        run=run.name,
        world_size=surveys.world_size,
        missing_ranks=surveys.missing,
        layout=_layout(facts),
        num_steps=measured.count,
        used=(int(numbers[0]), int(numbers[-1])) if len(numbers) else None,
        timed_on_device=frozenset(fact.rank for fact in facts if fact.device_error_ns is not None),
        estimates=estimates,
        unknown=sums.unknown,
        exposed_fraction=_fraction(sums, ("exposed_transfer_ns", "exposed_wait_ns")),
        wait_fraction=_fraction(sums, ("exposed_wait_ns",)),
        peak_bytes={fact.rank: fact.peak_bytes for fact in facts if fact.peak_bytes is not None},
    )


def _common_steps(ranks: Sequence[RankSteps], measured: MeasuredSteps) -> Column:
    """Return the measured steps whose begin and end every stepping rank knows."""
    numbers: Column | None = None
    for steps in ranks:
        if measured.known and steps.count:
            own = steps.between(measured.first, measured.last)[0]
            numbers = own if numbers is None else np.intersect1d(numbers, own)
    return np.zeros(0, np.int64) if numbers is None else numbers


def _measure_rank(timed: RankTiming, task: MeasureTask, sums: _Sums) -> dict[Figure, Series]:
    """Return the figures of one rank by step, and add its collectives to the sums."""
    tables, own, numbers = timed.tables, timed.steps, task.numbers
    windows = own.windows[np.searchsorted(own.numbers, numbers)]
    operations, blocked, timing = timed.operations, timed.blocked, timed.timing
    step = locate(operations["issued_ns"], windows)
    figures: dict[str, Column | Series] = {STEP: windows[:, 1] - windows[:, 0]}
    if ((step >= 0) & ~blocked.known & blocked.counts).any():
        why = f"{list_ranks([tables.rank])} did not see when operations were done"
        for name in (EXPOSED, *(f"{part}_ns" for part in PARTS)):
            sums.unknown.setdefault(Figure(JOB, name), why)
    else:
        bubbles = find_bubbles(tables, timed.spans, operations, task.pipeline_windows[tables.rank])
        parts = partition_steps(windows, timed.phases, *split_blocked(blocked, timing, blocked.counts), bubbles)
        figures |= {f"{part}_ns": column for part, column in parts.items()}
        figures[EXPOSED] = parts["exposed_transfer"] + parts["exposed_wait"]
        if tables.rank in task.unknown_bubbles:
            del figures[BUBBLE]
            why = _no_bubble(task.unknown_bubbles[tables.rank])
            sums.unknown[Figure(RANKS, BUBBLE, rank=tables.rank)] = why
            sums.unknown.setdefault(Figure(JOB, BUBBLE), why)
    figures |= _memory(tables, windows)
    exposed = np.where(blocked.exposure_known, timing.exposed_wait + timing.exposed_transfer, UNKNOWN_NS)
    seen = (timing.wait != UNKNOWN_NS) & (timing.duration != UNKNOWN_NS)
    columns = {
        "exposed_ns": exposed,
        "wait_ns": np.where(seen, timing.wait, UNKNOWN_NS),
        "transfer_ns": np.where(seen, timing.duration - timing.wait, UNKNOWN_NS),
        "bytes": operations["nbytes"],
        "count": np.ones(len(operations), np.int64),
    }
    _add_collectives(tables, operations, step, len(numbers), columns, sums)
    return {Figure(JOB, name): np.asarray(column, np.float64) for name, column in figures.items()}


def _memory(tables: RankTables, windows: Intervals) -> dict[str, Series]:
    """Return the most of each kind of memory that was sampled in each step; nothing where a step has no sample."""
    series_of: dict[str, Series] = {}
    for name in SAMPLES:
        ids = [i for i, known in enumerate(tables.ops) if known == name]
        rows = tables.samples[np.isin(tables.samples["op"], ids)]
        at = locate(rows["t_ns"], windows)
        most = np.full(len(windows), -1.0)
        np.maximum.at(most, at[at >= 0], rows["value"][at >= 0].astype(np.float64))
        if len(rows) and _fill_last(most):
            series_of[name] = most
    return series_of


def _fill_last(most: Series) -> bool:
    """Say whether all steps have a sample; the last may lack its own, which is taken as the step ends."""
    if len(most) > 1 and most[-1] < 0:
        most[-1] = most[-2]
    return bool((most >= 0).all())


def _add_collectives(
    tables: RankTables,
    operations: Array,
    step: Column,
    num_steps: int,
    columns: Mapping[str, Column],
    sums: _Sums,
) -> None:
    """Add the operations of one rank per step, by group, operation and api."""
    rows = np.flatnonzero(step >= 0)
    apis = find_apis(tables, operations)
    chosen, api = operations[rows], apis.of_operation[rows]
    is_p2p = chosen["kind"] == codes.POINT_TO_POINT
    place, first = number_alike(chosen["group"], chosen["op"], api)
    at = place * num_steps + step[rows]
    tables_of = {
        name: (
            np.bincount(at, column[rows], len(first) * num_steps).reshape(len(first), num_steps),
            column[rows] == UNKNOWN_NS,
        )
        for name, column in columns.items()
    }
    for i, row in enumerate(first.tolist()):
        group = tables.groups.get(int(chosen["group"][row]))
        op = int(chosen["op"][row])
        key = Figure(
            COLLECTIVES,
            "",
            group=describe_group(group, apis.names[int(api[row])]),
            members=2 if is_p2p[row] else _members(group),
            op=tables.ops[op] if op < len(tables.ops) else UNNAMED,
            api=apis.names[int(api[row])],
        )
        for name, (table, unknown) in tables_of.items():
            figure = key._replace(name=name)
            if unknown.any() and unknown[place == i].any():
                sums.unknown.setdefault(figure, "completion was not observed, or not by all members on one clock")
            sums.add(figure, table[i])


def describe_group(group: Group | None, api: str) -> str:
    """Return the key of operations that is the same in every run: their purpose, or the name of the group without."""
    return purpose_of_operation(group, api) or (UNNAMED if group is None else group.name)


def _members(group: Group | None) -> int:
    return 0 if group is None else len(group.ranks) or group.size


def _add_bubble(
    sums: _Sums,
    pipelines: Mapping[int, RankPipeline],
    windows: PipelineWindows,
    numbers: Column,
) -> None:
    """Add the bubble fraction of each pipeline, step by step."""
    if windows.unknown and not windows.by_pipeline:
        why = _no_bubble(next(iter(windows.unknown.values())))
        sums.unknown.setdefault(Figure(JOB, BUBBLE_FRACTION), why)
    for key, (steps, intervals) in windows.by_pipeline.items():
        members = [pipeline for pipeline in pipelines.values() if pipeline.key == key]
        common = np.isin(numbers, steps)
        if not common.any():
            continue
        shown = numbers[common]
        length = (intervals[:, 1] - intervals[:, 0])[np.searchsorted(steps, shown)]
        busy = sum(member.busy[np.searchsorted(member.steps, shown)] for member in members)
        figure = Figure(JOB, BUBBLE_FRACTION)
        if common.all():
            sums.add(figure, 1 - busy / (len(members) * np.maximum(length, 1)))
        else:
            sums.unknown.setdefault(figure, "the pipeline did not run in every step")


def _no_bubble(why: str) -> str:
    return f"{why}: its bubble is not known"


def _estimate_rates(
    surveys: Surveys,
    steps: Mapping[int, RankSteps],
    numbers: Column,
    step_ns: Series,
    estimates: dict[Figure, Estimate],
    unknown: dict[Figure, str],
) -> None:
    """Add the throughput of the job: tokens and samples of these steps over their time."""
    consumption = sum_consumption(
        steps, surveys.consumed, surveys.distinct_groups(), numbers, incomplete=surveys.incomplete
    )
    for name, consumed in consumption.of_steps.items():
        rate = estimate_ratio(consumed, step_ns / 1e9)
        if rate is not None:
            estimates[Figure(JOB, name)] = rate
    unknown.update((Figure(JOB, name), why) for name, why in consumption.unknown.items())


def _fraction(sums: _Sums, names: Sequence[str]) -> Estimate | None:
    figures = [Figure(JOB, name) for name in names]
    step = sums.series.get(Figure(JOB, STEP))
    if step is None or any(figure in sums.unknown or figure not in sums.series for figure in figures):
        return None
    return estimate_ratio(sum((sums.series[figure] for figure in figures), np.zeros(len(step))), step)


def _layout(facts: Sequence[RankFacts]) -> frozenset[tuple[str, tuple[int, ...]]]:
    return frozenset(
        (group.axis or "", group.ranks) for fact in facts for group in fact.groups.values() if len(group.ranks) > 1
    )
