"""Predicted gains of changes: each replayed beside the run as it was, with the replay error.

A gain is the share of the replayed step that goes. Its interval is what resampled steps of the run and of the changed
run show (95 %), drawn apart because a changed run has steps of its own, wider by the replay error on both sides. Above
MAX_ERROR nothing is predicted.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.analysis.whatif.bucket_sizes import largest_bucket, replay_buckets
from dtprof.analysis.whatif.fixes import (
    SLOWED,
    Unpredictable,
    bound_durations,
    drop_waits,
    find_dropped,
    find_wide_gradients,
    fix_durations,
    measure_beside,
    overlap_fully,
)
from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.analysis.whatif.random_draws import RandomDraws
from dtprof.analysis.whatif.replayed_steps import ReplayedStep, draw_graph_step, draw_plan_step
from dtprof.analysis.whatif.schedule_fixes import FIXED, PipelineTimes
from dtprof.analysis.whatif.slowdowns import Slowdowns, measure_slowdowns
from dtprof.analysis.whatif.whatif_changes import (
    BARRIER,
    BUCKETS,
    COMPUTE,
    EVEN,
    FULL,
    HALF_WIDTH,
    HOST,
    LAST,
    MICROBATCHES,
    NETWORK,
    OFF_THE_PATH,
    OP,
    OVERLAP,
    PHASE,
    RANK,
    RANKS,
    REDUCE_DTYPE,
    SCHEDULE,
    SPLIT,
    STAGE,
    SYNC,
    WITHOUT,
    Fix,
    describe,
    is_at_hand,
)
from dtprof.columns import distinct, percentiles
from dtprof.errors import UsageError
from dtprof.intervals import Column, Floats

MAX_ERROR = 0.05
"""Of the measured step: by more a replay must not miss it."""
MAX_TABLE_RANKS = 8
"""Ranks in the table of single fixes: those that spend most time beyond the ideal."""
MAX_TABLE_OTHERS = 8
"""Hosts, and stages, in it."""
FULL_OVERLAP = f"{OVERLAP}={FULL}"
NOW = "as it was"
WORTH = 0.005
"""Of the step: a smaller gain is none to act on."""
LEAST_GAIN = 0.0005
"""Of the step: what gains less would be a row of 0.0 %."""
NO_GAIN = "no change that you can make shortens steps beyond noise"
"""The sentence of a run in which no change is worth its work, wherever it is printed."""
RESAMPLED = 400
"""How often steps are drawn for an interval."""
CONFIDENCE = (2.5, 97.5)
_SEED = 7


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One or several changes together, and the step that they would make."""

    fix: tuple[str, ...]
    step_ns: float | None  # None: not predicted
    gain: float | None  # share of the replayed step that goes; negative: it gets longer
    interval: tuple[float, float] | None
    assumes: str = ""
    reason: str = ""  # why nothing is predicted


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The replay of a run and of changes; None, or empty, with the reason where it abstains."""

    run: str
    steps: tuple[int, int] | None = None
    measured_step_ns: float | None = None
    replayed_step_ns: float | None = None
    replay_error: float | None = None
    slowdowns: Slowdowns | None = None
    scenarios: tuple[Scenario, ...] = ()
    timelines: tuple[ReplayedStep, ...] = ()  # of one step, as it was and after `best`, where they were asked for
    cannot_tell: tuple[str, ...] = ()

    @property
    def telling(self) -> tuple[Scenario, ...]:
        """The predicted changes that gain or lose 0.1 % or more; the first one where none does."""
        known = tuple(scenario for scenario in self.scenarios if scenario.gain is not None)
        return tuple(scenario for scenario in known if abs(scenario.gain or 0.0) >= LEAST_GAIN) or known[:1]

    @property
    def best(self) -> Scenario | None:
        """The single change with the largest gain that the user of the job can make without other hardware.

        Full overlap is a bound rather than a change: it counts where no other change gains anything.
        """
        gaining = _gaining(self.scenarios)
        made = [scenario for scenario in gaining if is_at_hand(scenario.fix)]
        bounds = [scenario for scenario in gaining if scenario.fix == (FULL_OVERLAP,)]
        return max(made or bounds, key=lambda scenario: scenario.gain or 0.0, default=None)


def _gaining(scenarios: Iterable[Scenario]) -> list[Scenario]:
    return [
        scenario
        for scenario in scenarios
        if scenario.gain is not None
        and scenario.gain > WORTH
        and scenario.interval is not None
        and scenario.interval[0] > 0
    ]


def _is_made(fixes: Sequence[Fix]) -> bool:
    return is_at_hand([*map(str, fixes)])


def _is_bound(fixes: Sequence[Fix]) -> bool:
    return [*map(str, fixes)] == [FULL_OVERLAP]


@dataclass(frozen=True, kw_only=True)
class Replayable:
    """A run that can be replayed: its graph, and the actions of its pipelines."""

    graph: OperationGraph
    pipeline: PipelineTimes | None = None
    no_pipeline: str = "the run has no pipeline schedule"  # why there is none
    caveats: tuple[str, ...] = field(default=())


def predict(name: str, source: Replayable, fixes: Sequence[Fix], *, in_short: bool = False) -> Prediction:
    """Replay a run as it was and changed; without changes each single one that there is.

    Parameters:
        in_short: only changes that the user of the job can make, and no slowdowns.

    Raises:
        UsageError: a change names what the run does not have.
    """
    graph = source.graph
    steps = graph.replay_steps((graph.durations, *graph.modelled))
    replayed, modelled = steps[:, 0], steps[:, 1:].mean(axis=1)
    measured = float(graph.measured_ns.mean())
    error = abs(float(modelled.mean()) - measured) / measured
    known = Prediction(
        run=name,
        steps=graph.steps,
        measured_step_ns=measured,
        replayed_step_ns=float(modelled.mean()),
        replay_error=error,
        cannot_tell=(*source.caveats, *graph.caveats),
    )
    if error > MAX_ERROR:
        check_fixes(source, fixes)
        reason = (
            f"whatif: the replayed step is {100 * error:.1f} % off the measured one, more than {100 * MAX_ERROR:g} %: "
            f"{_name_part(graph, float(modelled.mean()) - measured)}; nothing is predicted"
        )
        return _with(known, cannot_tell=(*known.cannot_tell, reason))
    slowdowns = None if in_short else measure_slowdowns(graph)
    chosen = [tuple(fixes)] if fixes else [(fix,) for fix in list_single_fixes(source)]
    if in_short:
        chosen, bounds = ([some for some in chosen if wanted(some)] for wanted in (_is_made, _is_bound))
    scenarios = _replay_scenarios(source, chosen, replayed, error)
    if not fixes:
        scenarios.sort(key=lambda scenario: -(scenario.gain if scenario.gain is not None else -np.inf))
        scenarios = [scenario for scenario in scenarios if scenario.gain is not None]
    if in_short and not _gaining(scenarios):
        scenarios += _replay_scenarios(source, bounds, replayed, error)
    reasons = tuple(f"scenarios: {scenario.reason}" for scenario in scenarios if scenario.reason)
    return _with(known, slowdowns=slowdowns, scenarios=tuple(scenarios), cannot_tell=(*known.cannot_tell, *reasons))


def draw_best(source: Replayable, found: Prediction) -> tuple[ReplayedStep, ...]:
    """Return one step as it is replayed, before and after the best change; nothing where there is none to draw.

    A change of the pipeline is drawn as its actions, with mean times; any other as the step of median length.
    """
    best = found.best
    if best is None or len(best.fix) != 1:
        return ()
    what, value = best.fix[0].split("=", 1)
    graph, changed = source.graph, describe(best.fix)
    if what in (MICROBATCHES, SCHEDULE, SPLIT):
        times = source.pipeline
        assert times is not None  # or it would not have been predicted
        plans = (times.replay_present(), times.replay_means(**{what: value}))
        if None in plans:
            return ()
        titled = zip(plans, (NOW, changed), strict=True)
        return tuple(draw_plan_step(plan, times.members, title=title) for plan, title in titled if plan is not None)
    if what == BUCKETS:
        return ()  # only the end of the step is predicted
    after = _apply(source, [Fix(what=what, value=value)])
    other = _relax(graph, after.relaxed)
    steps = graph.replay_steps([graph.durations])[:, 0]
    place = int(np.argsort(steps)[len(steps) // 2])
    present = draw_graph_step(graph, graph.durations, place=place, title=NOW)
    predicted = draw_graph_step(other, after.durations, place=place, title=changed)
    return (present, predicted) if present is not None and predicted is not None else ()


def _with(known: Prediction, **more: object) -> Prediction:
    return Prediction(**{**vars(known), **more})


def _name_part(graph: OperationGraph, missed_ns: float) -> str:
    """Return which part of the run is not as the replay has it, in words."""
    modelled = graph.modelled[0]
    differs = graph.durations != modelled
    if not differs.any():
        return f"{abs(missed_ns) / 1e6:.3g} ms a step of the host, between operations, are not in the records"
    kinds: list[int] = distinct(graph.kind[differs]).tolist()
    columns = (np.where(graph.kind == number, modelled, graph.durations) for number in kinds)
    means = graph.replay_means(itertools.chain((graph.durations,), columns))
    worst = int(np.argmax(np.abs(means[1:] - means[0])))
    part = graph.kinds[kinds[worst]].name if kinds[worst] >= 0 else ""
    moved = f"{abs(means[1 + worst] - means[0]) / 1e6:.3g} ms a step"
    if not part:
        return f"ranks take unequally long to go on after a wait: {moved}"
    return f"which rank is done first with transfers of {part} is not alike from one to the next: {moved}"


def check_fixes(source: Replayable, fixes: Iterable[Fix]) -> None:
    """Refuse changes that name a rank, stage or operation that the run does not have.

    Raises:
        UsageError: one does.
    """
    for fix in fixes:
        try:
            _apply(source, [fix])
        except Unpredictable:
            continue


def list_single_fixes(source: Replayable) -> list[Fix]:
    """Return each change that the run has something for."""
    graph = source.graph
    ranks = distinct(graph.rank[graph.rank >= 0])
    fixes: list[Fix] = []
    if len(ranks) > 1:
        own = (graph.rank >= 0) & graph.is_of(lambda kind: not kind.is_communication)
        late = np.bincount(graph.rank[own], (graph.durations - graph.ideal)[own], int(ranks.max()) + 1)
        slowest = ranks[np.argsort(-late[ranks], kind="stable")[:MAX_TABLE_RANKS]]
        fixes += [Fix(what=RANK, value=str(rank)) for rank in slowest.tolist()]
    hosts = sorted(set(graph.hosts.values()))
    if len(hosts) > 1:
        fixes += [Fix(what=HOST, value=host) for host in hosts[:MAX_TABLE_OTHERS]]
    stages = distinct(graph.stage[graph.stage >= 0]).tolist()
    if len(stages) > 1:
        fixes += [Fix(what=STAGE, value=str(stage)) for stage in stages[:MAX_TABLE_OTHERS]]
    ops = dict.fromkeys(kind.name for kind in graph.kinds if kind.is_communication)
    fixes += [Fix(what=OP, value=op) for op in ops]
    fixes += [Fix(what=PHASE, value=kind.name) for kind in graph.kinds if not kind.is_communication]
    fixes.append(Fix(what=COMPUTE, value="1.5x"))
    if ops:
        fixes += [Fix(what=NETWORK, value="2x"), Fix(what=OVERLAP, value=FULL)]
    if any(kind.op == BARRIER for kind in graph.kinds):
        fixes.append(Fix(what=WITHOUT, value=BARRIER))
    if graph.is_superseded.any():
        fixes.append(Fix(what=SYNC, value=LAST))
    bucket = largest_bucket(graph)
    if bucket:
        fixes += [Fix(what=BUCKETS, value=str(round(bucket * factor))) for factor in (0.5, 2, 4)]
    if find_wide_gradients(graph).any():
        fixes.append(Fix(what=REDUCE_DTYPE, value=HALF_WIDTH[0]))
    if source.pipeline is not None:
        fixes += [Fix(what=MICROBATCHES, value=str(source.pipeline.microbatches * more)) for more in (2, 4)]
        fixes += [Fix(what=SCHEDULE, value=name) for name in source.pipeline.other_schedules]
        fixes.append(Fix(what=SPLIT, value=EVEN))
    return fixes


@dataclass(frozen=True, kw_only=True)
class _Changed:
    """A graph after changes: durations, how its dependencies change, and the time added to each step."""

    durations: Floats
    relaxed: frozenset[Fix]  # of these changes those of what is waited for
    added_ns: Floats  # to each step
    error_ns: float  # of what is added
    fixed_ns: float  # that may be added besides, or less than nothing
    assumes: str


def _apply(source: Replayable, fixes: Sequence[Fix]) -> _Changed:
    graph, durations = source.graph, source.graph.durations
    added: list[Floats] = [np.zeros(graph.num_steps)]
    error_ns = fixed_ns = 0.0
    assumes: list[str] = []
    pipeline: dict[str, str] = {}
    for fix in fixes:
        if fix.what in (MICROBATCHES, SCHEDULE, SPLIT):
            pipeline[fix.what] = fix.value
        elif fix.what == BUCKETS:
            more, missed = replay_buckets(graph, int(fix.value))
            added.append(more)
            error_ns += missed
            assumes.append("buckets fill as fast as they did")
        elif fix.what == OVERLAP:
            assumes.append("collectives are waited for at the end of the step only")
        else:
            before, durations = durations, fix_durations(graph, fix, durations)
            longest = bound_durations(graph, fix, before)
            if longest is not None and not np.array_equal(longest, durations):
                expected, most = graph.replay_means((durations, longest))
                fixed_ns += float(most - expected)
                assumes.append(
                    "transfers whose latency is not known have none, and bounds allow for those that are nothing else"
                )
            if fix.what == PHASE and fix.value in OFF_THE_PATH:
                assumes.append(OFF_THE_PATH[fix.value][1])
            if fix.what in (SYNC, WITHOUT) and (beside_ns := measure_beside(graph, find_dropped(graph, fix))):
                fixed_ns -= SLOWED * beside_ns
                assumes.append(
                    "bounds allow for computation beside those operations that they slow down to half its speed"
                )
            if fix.what == WITHOUT:
                assumes.append(f"the program is right without {fix.value}")
            elif fix.what == REDUCE_DTYPE:
                assumes.append(f"the model trains as well with gradients reduced in {fix.value}, and casts are hidden")
            elif fix.what == RANKS:
                assumes.append("each rank has as much work as now, and the network of the new ones is as fast")
    if pipeline:
        times = source.pipeline
        if times is None:
            raise Unpredictable(
                f"{', '.join(f'{what}={value}' for what, value in pipeline.items())}: {source.no_pipeline}"
            )
        window = times.predict_change(**pipeline)
        added.append(np.full(graph.num_steps, window.change_ns))
        error_ns += window.error_ns
        fixed_ns += window.fixed_ns
        if MICROBATCHES in pipeline:
            assumes.append(
                "the batch of a step stays, its microbatches take time by their size; bounds allow for "
                f"{100 * FIXED:.0f} % of the smaller ones that does not depend on their size"
            )
        if SPLIT in pipeline:
            assumes.append("layers can be divided so finely")
        if times.halves_backward(pipeline.get(SCHEDULE)):
            assumes.append("gradients of inputs and of weights take half of the backward pass each")
    return _Changed(
        durations=durations,
        relaxed=frozenset(fix for fix in fixes if fix.what in (OVERLAP, SYNC, WITHOUT)),
        added_ns=np.sum(added, axis=0),
        error_ns=error_ns,
        fixed_ns=fixed_ns,
        assumes="; ".join(dict.fromkeys(assumes)),
    )


def _relax(graph: OperationGraph, relaxed: Collection[Fix]) -> OperationGraph:
    """Return the graph with the dependencies that changes leave."""
    for fix in relaxed:
        if fix.what != OVERLAP:
            graph = graph.depending_on(drop_waits(graph, find_dropped(graph, fix)))
    return graph.depending_on(overlap_fully(graph)) if any(fix.what == OVERLAP for fix in relaxed) else graph


def _replay_scenarios(
    source: Replayable, chosen: Sequence[tuple[Fix, ...]], before: Floats, error: float
) -> list[Scenario]:
    graph = source.graph
    changed: list[_Changed | str] = []
    for fixes in chosen:
        try:
            changed.append(_apply(source, fixes))
        except Unpredictable as refused:
            changed.append(str(refused))
    steps: dict[int, Floats] = {}
    made = {i: one for i, one in enumerate(changed) if isinstance(one, _Changed)}
    for relaxed in {one.relaxed: None for one in made.values()}:
        some = {i: one.durations for i, one in made.items() if one.relaxed == relaxed}
        steps |= dict(zip(some, _relax(graph, relaxed).replay_steps(some.values()).T, strict=True))
    draws = RandomDraws(_SEED).draw((2, RESAMPLED, len(before)), below=len(before))
    scenarios = []
    for i, (fixes, one) in enumerate(zip(chosen, changed, strict=True)):
        names = tuple(map(str, fixes))
        if isinstance(one, str):
            scenarios.append(Scenario(fix=names, step_ns=None, gain=None, interval=None, reason=one))
            continue
        after = steps[i] + one.added_ns
        gain = 1 - float(after.mean() / before.mean())
        scenarios.append(
            Scenario(
                fix=names,
                step_ns=float(after.mean()),
                gain=gain,
                interval=_interval(
                    before,
                    after,
                    draws,
                    error + one.error_ns / float(before.mean()),
                    fixed=one.fixed_ns / float(before.mean()),
                ),
                assumes=one.assumes,
            )
        )
    return scenarios


def _interval(before: Floats, after: Floats, draws: Column, error: float, *, fixed: float) -> tuple[float, float]:
    """Return bounds of the gain.

    Parameters:
        error: on both sides. fixed: by which the changed step may be longer, or, below 0, shorter; as shares.
    """
    gains = 1 - after[draws[0]].mean(axis=1) / before[draws[1]].mean(axis=1)
    low, high = percentiles(gains, CONFIDENCE)
    return low - error - max(fixed, 0.0), high + error - min(fixed, 0.0)


def refuse_impossible(fixes: Sequence[Fix]) -> None:
    """Refuse changes that contradict each other.

    Raises:
        UsageError: one is asked for twice with different values.
    """
    given: dict[str, str] = {}
    for fix in fixes:
        if fix.what in (RANK, HOST, STAGE, OP, PHASE):
            continue
        if given.setdefault(fix.what, fix.value) != fix.value:
            raise UsageError(f"{fix.what} is given as {given[fix.what]} and as {fix.value}; expected one value")
