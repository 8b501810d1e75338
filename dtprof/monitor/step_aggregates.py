"""Figures of the newest steps, updated as steps end: no step is summed twice.

Steps that every rank has ended since the last time are one fold: the records of these steps alone are surveyed and
reduced, by the functions that do it for a finished run. A summary is stated from the sums of all folds. It equals that
of `dtprof summary` over the same steps where all ranks are on one clock. It has no timeline, critical path or
lateness: these are made of single operations. Steps that only data loaders or repeating operations
tell count from the oldest record that is kept, and so do jobs without steps: these are summarised as a whole each time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dtprof.analysis.communication.collective_table import add_rows
from dtprof.analysis.communication.communication_sites import add_sites
from dtprof.analysis.map_reduce.rank_facts import RankFacts
from dtprof.analysis.map_reduce.rank_sums import RankReduction, Reductions
from dtprof.analysis.map_reduce.reduction import SUMS_ALONE, reduce_run
from dtprof.analysis.map_reduce.reduction_tasks import DetailedReductions
from dtprof.analysis.map_reduce.step_range_joins import (
    Found,
    OfRange,
    join_consumption,
    join_largest,
    join_pipelines,
    join_reductions,
    join_steps,
)
from dtprof.analysis.map_reduce.survey import Surveys, survey_run
from dtprof.analysis.memory.memory_formulas import ModelShare
from dtprof.analysis.memory.memory_growth import find_growth
from dtprof.analysis.memory.rank_memory import find_categories, find_peak
from dtprof.analysis.results import BUBBLE, Summary
from dtprof.analysis.run_summary import state_summary, summarise
from dtprof.analysis.steps.part_bands import add_parts
from dtprof.analysis.steps.step_boundaries import NUMBERED, MeasuredSteps, RankSteps, agree_on_rule, choose_steps
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.job.world_size import newest_attempt, newest_ranks
from dtprof.monitor.live_run import MAX_STEPS, LiveWindow

STEPS_BEFORE = 2
"""Of which records are needed beside those of a step: where the one before it ended takes the end of its own burst."""


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
            largest = join_largest(known.memory_bytes, newest.memory_bytes)
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
        measured = choose_steps(list(surveys.steps.values()))
        cut = [
            _cut(fold, max(fold.first, measured.first), min(fold.last, measured.last), window) for fold in self._folds
        ]
        pieces = [piece for piece in cut if piece is not None]
        if not pieces:
            return LiveFigures(summary=summarise(window), newest=None)
        measured = replace(measured, first=pieces[0].first, last=pieces[-1].last)
        reduced = Reductions(dropped=pieces[-1].reduced.dropped)
        for piece in pieces:
            add_rows(reduced.rows, piece.reduced.rows)
            add_sites(reduced.sites, piece.reduced.sites)
            reduced.step_parts = add_parts(reduced.step_parts, piece.reduced.step_parts)
        of_rank: dict[int, list[tuple[int, RankReduction]]] = {}
        for piece in pieces:
            for own in piece.reduced.ranks:
                of_rank.setdefault(own.rank, []).append((piece.first - measured.first, own))
        for rank, parts in of_rank.items():
            growth = find_growth(window.load_samples(rank), measured.first, measured.last)
            reduced.ranks.append(replace(join_reductions(parts), memory_growth=growth))
        summary = state_summary(window, surveys, reduced, measured=measured)
        return LiveFigures(summary=summary, newest=_newest_step(self._folds[-1], surveys, measured))


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
    measured = MeasuredSteps(count=last, first=first, last=last, warm_up=0, caveats=())
    reduced: DetailedReductions[None] = reduce_run(
        records, THIS_PROCESS, surveys=surveys, measured=measured, detail=SUMS_ALONE
    )
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


def _newest_step(fold: _Fold, surveys: Surveys, measured: MeasuredSteps) -> NewestStep:
    unknown = surveys.pipeline_windows(measured).unknown
    durations = {}
    for own in fold.surveys.steps.values():
        _, windows = own.between(fold.last, fold.last)
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
    return share.is_known, share.crossing_values is not None, share.layers or 0


def _join_surveys(folds: Sequence[_Fold], newest: Surveys) -> Surveys:
    stages = dict.fromkeys(rank for fold in folds for rank in fold.surveys.possible_stages)
    world_size = {fact.rank: fact.world_size for fact in newest.facts}
    steps = {rank: _list_found(folds, rank, lambda surveys: surveys.steps) for rank in newest.steps}
    pipelines = {rank: _list_found(folds, rank, lambda surveys: surveys.pipelines) for rank in newest.steps}
    consumed = {rank: _list_found(folds, rank, lambda surveys: surveys.consumed) for rank in newest.steps}
    return replace(
        newest,
        steps=agree_on_rule({rank: join_steps(steps[rank], own) for rank, own in newest.steps.items()}),
        pipelines={
            rank: join_pipelines(parts, world_size=world_size[rank])
            for rank, parts in sorted(pipelines.items())
            if parts
        },
        possible_stages=sorted(stages),
        consumed={rank: join_consumption(parts) for rank, parts in sorted(consumed.items()) if parts},
    )


def _list_found(
    folds: Sequence[_Fold], rank: int, of: Callable[[Surveys], Mapping[int, Found]]
) -> list[OfRange[Found]]:
    """Return what each fold holds of a rank."""
    return [
        OfRange(first=fold.first, last=fold.last, found=of(fold.surveys)[rank])
        for fold in folds
        if rank in of(fold.surveys)
    ]
