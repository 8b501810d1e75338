"""Figures of the newest steps, updated as steps end: no step is summed twice.

Steps that every rank has ended since the last time are one fold: the records of these steps alone are surveyed and
reduced, by the functions that do it for a finished run. A summary is stated from the sums of all folds. It equals that
of `dtprof summary` over the same steps where all ranks are on one clock. It has no timeline, critical path or
lateness: these are made of single operations. Steps that only data loaders or repeating operations
tell count from the oldest record that is kept, and so do jobs without steps: these are summarised as a whole each time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dtprof.analysis.communication.collective_table import add_rows
from dtprof.analysis.communication.communication_sites import add_sites
from dtprof.analysis.communication.exchange_balance import join_exchanges
from dtprof.analysis.communication.serialised_collectives import SerialKey, SerialSums
from dtprof.analysis.memory.memory_formulas import ModelShare
from dtprof.analysis.memory.memory_growth import find_growth
from dtprof.analysis.memory.rank_memory import find_categories, find_peak
from dtprof.analysis.pipeline.bubbles import RankPipeline
from dtprof.analysis.rank_reductions import RankFacts, RankReduction, Reductions
from dtprof.analysis.rank_surveys import Surveys, survey_run
from dtprof.analysis.results import BUBBLE, Summary
from dtprof.analysis.run_summary import DetailedReductions, reduce_run, state_summary, summarise
from dtprof.analysis.steps.part_bands import add_parts
from dtprof.analysis.steps.step_boundaries import (
    MARKS,
    OPTIMIZER,
    MeasuredSteps,
    RankSteps,
    agree_on_rule,
    choose_steps,
)
from dtprof.analysis.steps.throughput import RankConsumption, Sharing
from dtprof.analysis.stragglers.rank_waits import RankWaits
from dtprof.intervals import Column
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.job.world_size import newest_attempt, newest_ranks
from dtprof.monitor.live_run import MAX_STEPS, LiveWindow

STEPS_BEFORE = 2
"""Of which records are needed beside those of a step: where the one before it ended takes the end of its own burst."""
NUMBERED = (MARKS, OPTIMIZER)
"""Rules that number steps alike whichever records are left."""


@dataclass(frozen=True, kw_only=True)
class NewestStep:
    """The newest step that every rank has ended."""

    number: int
    duration_ns: Mapping[int, int]  # by rank
    parts_ns: Mapping[int, Mapping[str, int]]  # by rank, those of results.PARTS that are known


@dataclass(frozen=True, kw_only=True)
class LiveFigures:
    """The figures of a job as of its newest steps."""

    summary: Summary
    newest: NewestStep | None


@dataclass(frozen=True, kw_only=True)
class _Fold:
    """Some steps, summed up."""

    first: int
    last: int
    surveys: Surveys
    reduced: Reductions
    cuts: dict[tuple[int, int], "_Fold"] = field(default_factory=dict)  # of some of these steps

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1


class StepAggregates:
    """Sums up the newest steps of a run, each once."""

    def __init__(self, *, max_steps: int = MAX_STEPS) -> None:
        """Keep at least so many steps, and the sums made together with the oldest of them."""
        self._max_steps = max_steps
        self._attempt = -1
        self._folds: list[_Fold] = []
        self._facts: dict[int, RankFacts] = {}

    def take(self, window: LiveWindow) -> LiveFigures:
        """Take in the steps that have ended since; return the figures.

        Parameters:
            window: the newest records, which do not change meanwhile.
        """
        attempt = newest_attempt(window.folders)
        if attempt != self._attempt:
            self._attempt, self._folds, self._facts = attempt, [], {}
        last = self._folds[-1].last if self._folds else 0
        records = window.frozen(first=last + 1 - STEPS_BEFORE) if last else window
        surveys = survey_run(records, newest_ranks(records.folders), THIS_PROCESS)
        stepping = [own for own in agree_on_rule(surveys.steps).values() if own.count]
        if not stepping or stepping[0].rule not in NUMBERED or not surveys.one_clock:
            self._folds = []
            return LiveFigures(summary=summarise(window), newest=None)
        self._join_facts(window, surveys.facts)
        numbers = _list_new(stepping, window, after=last)[-self._max_steps :]
        if numbers:
            self._folds.append(_fold(records, surveys, numbers[0], numbers[-1]))
            while sum(fold.num_steps for fold in self._folds[1:]) >= self._max_steps:
                del self._folds[0]
        return self._state(window, surveys) if self._folds else LiveFigures(summary=summarise(window), newest=None)

    def _join_facts(self, window: LiveWindow, facts: Sequence[RankFacts]) -> None:
        for newest in facts:
            known = self._facts.get(newest.rank, newest)
            largest = dict(known.memory_bytes)
            for name, value in newest.memory_bytes.items():
                largest[name] = max(value, largest.get(name, 0))
            self._facts[newest.rank] = replace(
                newest,
                first_ns=min(known.first_ns, newest.first_ns),
                events=window.count_events(newest.rank),
                memory_bytes=largest,
                peak_bytes=find_peak(largest),
                memory_categories=find_categories(largest),
                model_share=max(newest.model_share, known.model_share, key=_known_of),
            )

    def _state(self, window: LiveWindow, newest: Surveys) -> LiveFigures:
        facts = [self._facts[fact.rank] for fact in newest.facts]
        surveys = replace(_join_surveys(self._folds, newest), facts=facts)
        used = choose_steps(list(surveys.steps.values()))
        cut = [_cut(fold, max(fold.first, used.first), min(fold.last, used.last), window) for fold in self._folds]
        pieces = [piece for piece in cut if piece is not None]
        if not pieces:
            return LiveFigures(summary=summarise(window), newest=None)
        used = replace(used, first=pieces[0].first, last=pieces[-1].last)
        reduced = Reductions(dropped=pieces[-1].reduced.dropped)
        for piece in pieces:
            add_rows(reduced.rows, piece.reduced.rows)
            add_sites(reduced.sites, piece.reduced.sites)
            reduced.step_parts = add_parts(reduced.step_parts, piece.reduced.step_parts)
        of_rank: dict[int, list[tuple[int, RankReduction]]] = {}
        for piece in pieces:
            for own in piece.reduced.ranks:
                of_rank.setdefault(own.rank, []).append((piece.first - used.first, own))
        for rank, parts in of_rank.items():
            growth = find_growth(window.load_samples(rank), used)
            reduced.ranks.append(replace(_join_reductions(parts), memory_growth=growth))
        summary = state_summary(window, surveys, reduced, used=used)
        summary = replace(summary, lateness=())  # the instances at hand are those of the newest steps
        return LiveFigures(summary=summary, newest=_newest_step(self._folds[-1], surveys, used))


def _list_new(stepping: Sequence[RankSteps], window: LiveWindow, *, after: int) -> list[int]:
    """Return the newest row of steps without a gap that every rank has ended, and whose operations have completed."""
    ended = []
    for own in stepping:
        pending_ns = window.pending_since_ns(own.rank)
        is_over = own.windows[:, 1] <= pending_ns if pending_ns is not None else np.ones(len(own.numbers), np.bool_)
        ended.append(set(own.numbers[is_over].tolist()))
    numbers = sorted(number for number in set.intersection(*ended) if number > after)
    begin = max((i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), default=0)
    return numbers[begin:]


def _fold(records: LiveWindow, surveys: Surveys, first: int, last: int) -> _Fold:
    used = MeasuredSteps(count=last, first=first, last=last, warm_up=0, caveats=())
    reduced: DetailedReductions[None] = reduce_run(records, THIS_PROCESS, surveys=surveys, used=used, draws=False)
    return _Fold(first=first, last=last, surveys=surveys, reduced=reduced)


def _cut(fold: _Fold, first: int, last: int, window: LiveWindow) -> _Fold | None:
    """Return these steps of a fold; None where it has none of them, or their records are no longer kept."""
    if (first, last) == (fold.first, fold.last):
        return fold
    if first > last:
        return None
    if (first, last) not in fold.cuts and window.oldest_step <= max(0, first - STEPS_BEFORE):
        records = window.frozen(first=first - STEPS_BEFORE)
        surveys = survey_run(records, newest_ranks(records.folders), THIS_PROCESS)
        fold.cuts.clear()
        fold.cuts[first, last] = _fold(records, surveys, first, last)
    return fold.cuts.get((first, last))


def _newest_step(fold: _Fold, surveys: Surveys, used: MeasuredSteps) -> NewestStep:
    unknown = surveys.pipeline_windows(used).unknown
    durations = {}
    for own in fold.surveys.steps.values():
        _, windows = own.used(fold.last, fold.last)
        if len(windows):
            durations[own.rank] = int(windows[0, 1] - windows[0, 0])
    parts = {
        own.rank: {part: ns for part, ns in own.newest_parts_ns.items() if part != BUBBLE or own.rank not in unknown}
        for own in fold.reduced.ranks
        if own.newest_parts_ns is not None
    }
    return NewestStep(number=fold.last, duration_ns=durations, parts_ns=parts)


def _known_of(share: ModelShare) -> tuple[bool, bool, int]:
    """Return how much operations tell of a share: those of single steps may tell less than earlier ones."""
    return share.is_told, share.crossing_values is not None, share.layers or 0


# ---- what several folds hold of a rank --------------------------------------------------------------------------


def _join_surveys(folds: Sequence[_Fold], newest: Surveys) -> Surveys:
    stages = dict.fromkeys(rank for fold in folds for rank in fold.surveys.possible_stages)
    pipelines: dict[int, list[tuple[_Fold, RankPipeline]]] = {}
    consumed: dict[int, list[tuple[_Fold, RankConsumption]]] = {}
    for fold in folds:
        for rank, pipeline in fold.surveys.pipelines.items():
            pipelines.setdefault(rank, []).append((fold, pipeline))
        for rank, consumption in fold.surveys.consumed.items():
            consumed.setdefault(rank, []).append((fold, consumption))
    return replace(
        newest,
        steps=agree_on_rule({rank: _join_steps(folds, own) for rank, own in newest.steps.items()}),
        pipelines={rank: _join_pipelines(parts) for rank, parts in sorted(pipelines.items())},
        possible_stages=sorted(stages),
        consumed={rank: _join_consumption(parts) for rank, parts in sorted(consumed.items())},
    )


def _join_steps(folds: Sequence[_Fold], newest: RankSteps) -> RankSteps:
    known = [(fold, fold.surveys.steps[newest.rank]) for fold in folds if newest.rank in fold.surveys.steps]
    parts = [own.used(fold.first, fold.last) for fold, own in known]
    return replace(
        newest,
        numbers=np.concatenate([newest.numbers[:0], *(numbers for numbers, _ in parts)]),
        windows=np.concatenate([newest.windows[:0], *(windows for _, windows in parts)]),
        threads=tuple(sorted({thread for _, own in known for thread in own.threads})),
        traced=tuple(sorted({span for _, own in known for span in own.traced})),
    )


def _join_pipelines(parts: Sequence[tuple[_Fold, RankPipeline]]) -> RankPipeline:
    newest = parts[-1][1]
    alike = [(fold, own) for fold, own in parts if own.key == newest.key]
    chosen = [(own, (own.steps >= fold.first) & (own.steps <= fold.last)) for fold, own in alike]
    actions = [
        own.actions[(own.actions["step"] >= fold.first) & (own.actions["step"] <= fold.last)] for fold, own in alike
    ]

    def column(name: str) -> Any:
        return np.concatenate([getattr(own, name)[inside] for own, inside in chosen])

    return replace(
        newest,
        steps=column("steps"),
        first=column("first"),
        last=column("last"),
        busy=column("busy"),
        fill=column("fill"),
        actions=np.concatenate(actions),
    )


def _join_consumption(parts: Sequence[tuple[_Fold, RankConsumption]]) -> RankConsumption:
    steps = [np.arange(fold.first, fold.last + 1) for fold, _ in parts]
    values = [
        np.stack([own.at(numbers, column) for column in range(own.values.shape[1])], axis=1)
        for numbers, (_, own) in zip(steps, parts, strict=True)
    ]
    unclear = frozenset[Sharing]().union(*(own.unclear for _, own in parts))
    return RankConsumption(steps=np.concatenate(steps), values=np.concatenate(values), unclear=unclear)


def _join_reductions(parts: Sequence[tuple[int, RankReduction]]) -> RankReduction:
    """Return one reduction of a rank, given those of several pieces and the bins before each."""
    reductions = [own for _, own in parts]
    newest = reductions[-1]
    totals = [own.parts_ns for own in reductions if own.parts_ns is not None]
    waits = [(before, own.waits) for before, own in parts if own.waits is not None]
    is_seen = len(totals) == len(reductions)
    serialised: dict[SerialKey, SerialSums] = {}
    for own in reductions:
        for key, sums in own.serialised.items():
            known = serialised.get(key, SerialSums(0, 0, 0, 0, 0))
            serialised[key] = SerialSums(*(a + b for a, b in zip(known, sums, strict=True)))
    return replace(
        newest,
        num_steps=sum(own.num_steps for own in reductions),
        steps_ns=sum(own.steps_ns for own in reductions),
        parts_ns=_sum_named(totals) if is_seen else None,
        all_phases_ns=_sum_named([own.all_phases_ns for own in reductions]),
        all_user_phases_ns=_sum_named([own.all_user_phases_ns for own in reductions]),
        num_events=sum(own.num_events for own in reductions),
        waits=_join_waits(waits) if is_seen and len(waits) == len(reductions) else None,
        unobserved=sum(own.unobserved for own in reductions),
        estimated=sum(own.estimated for own in reductions),
        not_known=sum(own.not_known for own in reductions),
        mixed=sum(own.mixed for own in reductions),
        uncertain=sum(own.uncertain for own in reductions),
        impossible=sum(own.impossible for own in reductions),
        most_impossible_ns=max(own.most_impossible_ns for own in reductions),
        serialised=serialised,
        exchanges=join_exchanges(own.exchanges for own in reductions),
    )


def _join_waits(parts: Sequence[tuple[int, RankWaits]]) -> RankWaits:
    waits = [own for _, own in parts]

    def column(name: str) -> Column:
        return np.concatenate([getattr(own, name) for own in waits])

    return RankWaits(
        rank=waits[0].rank,
        steps=column("steps"),
        work=column("work"),
        blocked=column("blocked"),
        unclear=column("unclear"),
        phases=sum((own.phases for own in waits), np.zeros_like(waits[0].phases)),
        bins=np.concatenate([own.bins + before for before, own in parts]),
        culprits=column("culprits"),
        waited=column("waited"),
    )


def _sum_named(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for own in parts:
        total.update(own)
    return dict(total)
