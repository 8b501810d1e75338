"""The change that would gain most, predicted from a few steps while a run is summarised.

The lines of all ranks over these steps are collected as each rank is read for the summary. Their number of records is
bounded by the size of the run, so that advice costs a few percent of the summary; where not even MIN_STEPS are within
that bound, it says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from dtprof.analysis.communication.traffic import Tallies
from dtprof.analysis.map_reduce.long_log_reduction import newest_range
from dtprof.analysis.map_reduce.long_log_survey import survey_to_sum
from dtprof.analysis.map_reduce.placed_ranks import RankTiming
from dtprof.analysis.map_reduce.rank_sums import Reductions
from dtprof.analysis.map_reduce.reduction import SUMS_ALONE, reduce_run
from dtprof.analysis.map_reduce.reduction_tasks import CollectDetails, Found, MakeCollector, RankTask
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys, survey_run
from dtprof.analysis.results import MOST_GAIN, Advice, StragglerResult, Summary
from dtprof.analysis.run_summary import state_summary
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, agree_on_rule, choose_steps
from dtprof.analysis.whatif.prediction import FULL_OVERLAP, MAX_ERROR, NO_GAIN, Prediction, draw_best, predict
from dtprof.analysis.whatif.rank_line import LineCollector, RankLine
from dtprof.analysis.whatif.run_graph import IMPORTED_PIPELINE, choose_middle, find_obstacle, join_lines
from dtprof.analysis.whatif.whatif_changes import RANK, Fix, describe
from dtprof.job.groups import Channel
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.job.world_size import newest_ranks

MIN_STEPS = 4
"""Of fewer there is no interval worth its name."""
MAX_RECORDS = 3_072
"""Of the steps that are replayed."""
RECORDS_OF_LAG, MAX_RECORDS_OF_LAG = 1 << 16, 1 << 17
"""Of the steps that are replayed without a straggler: a second of processor time; two where MIN_STEPS have as many."""
MAX_READ_ONCE_MORE = 1_500_000
"""Records up to which a run is read a second time as a whole, in two or three seconds; else its newest are read."""
MAX_SHARE = 1 / 384
"""Of the records of a run that may be replayed where that is more: one costs some ten times what it costs to sum up.

No more than RECORDS_OF_LAG, which bounds memory: lines are kept whole.
"""


_Both = tuple[RankLine | None, Found | None]


@dataclass(frozen=True, kw_only=True)
class _Collector(Generic[Found]):
    """Collects lines beside other details of a rank; picklable."""

    lines: LineCollector | None
    details: CollectDetails[Found] | None

    def at(self, rank: RankTiming, task: RankTask) -> _Both[Found]:
        line = self.lines.at(rank, task) if self.lines is not None else None
        return line, self.details(rank, task) if self.details is not None else None


def summarise_advised(
    run: SurveyedRun, executor: Executor = THIS_PROCESS, *, surveys: Surveys | None = None
) -> Summary:
    """Summarise a run, with advice; `surveys` of the ranks of the newest attempt, where they are known already."""
    summary, *_ = summarise_closely(run, executor, surveys=surveys, in_short=True)
    return summary


def summarise_closely(
    run: SurveyedRun,
    executor: Executor,
    *,
    surveys: Surveys | None = None,
    make_collector: MakeCollector[Found] | None = None,
    in_short: bool = False,
) -> tuple[Summary, list[Found], Prediction, Tallies]:
    """Summarise a run, with advice; return with it the collected details of each rank, the prediction, and lateness.

    Parameters:
        make_collector: of the extractor of details; of a run that is read by ranges of steps (`surveys.ranges`), of
            the newest range alone.
        in_short: predict only what advice needs.
    """
    surveys = surveys or survey_to_sum(run, newest_ranks(run.folders), executor)
    measured = choose_steps(list(agree_on_rule(surveys.steps).values()))
    chosen = _choose_steps(run, surveys, measured)
    lines = LineCollector(first=chosen[0], last=chosen[1]) if not isinstance(chosen, str) else None
    reduced, collected = _reduce(run, executor, surveys, measured, lines=lines, make_collector=make_collector)
    summary = state_summary(run, surveys, reduced, measured=measured)
    found = [line for line, _ in collected if line is not None]
    prediction = _predict(run, surveys, found, measured, in_short=in_short) if found else None
    if prediction is None:
        prediction = Prediction(run=run.name, cannot_tell=(str(chosen),))
    details = [detail for _, detail in collected if detail is not None]
    known = prediction
    stragglers = summary.stragglers
    if prediction.replay_error is None and stragglers and len(stragglers) == 1:
        known = _replay_without(run, executor, surveys, measured, stragglers[0].rank) or prediction
    if stragglers:
        stragglers = add_replayed_lag(stragglers, known)
    summary = replace(summary, advice=state_advice(prediction), stragglers=stragglers)
    return summary, details, prediction, reduced.lateness


def _reduce(
    run: SurveyedRun,
    executor: Executor,
    surveys: Surveys,
    measured: MeasuredSteps,
    *,
    lines: LineCollector | None,
    make_collector: MakeCollector[Found] | None,
) -> tuple[Reductions, list[_Both[Found]]]:
    """Sum up the measured steps; return with it the line and the details of each rank, as far as they are asked for.

    Where a run is read by ranges of steps, their steps are read a second time: lines need those that are replayed,
    details the newest.
    """
    if surveys.ranges is None:

        def collect_both(ranks: Sequence[int], channels: Sequence[Channel]) -> CollectDetails[_Both[Found]] | None:
            details = make_collector(ranks, channels) if make_collector is not None else None
            return _Collector(lines=lines, details=details).at if lines is not None or details is not None else None

        reduced = reduce_run(run, executor, surveys=surveys, measured=measured, make_collector=collect_both)
        return reduced, reduced.details
    summed: Reductions = reduce_run(run, executor, surveys=surveys, measured=measured)
    found: list[_Both[Found]] = []
    wanted: list[tuple[tuple[int, int], _Collector[Found]]] = []
    if lines is not None:
        wanted.append(((lines.first, lines.last), _Collector(lines=lines, details=None)))
    if make_collector is not None:
        details = make_collector(list(surveys.ranges.indexes), ())
        wanted.append((newest_range(surveys.ranges, measured), _Collector(lines=None, details=details)))
    for (first, last), collector in wanted:
        some = replace(measured, first=first, last=last)
        found += reduce_run(
            run,
            executor,
            surveys=surveys,
            measured=some,
            make_collector=lambda *_, at=collector.at: at,
            detail=SUMS_ALONE,
        ).details
    return summed, found


def _replay_without(
    run: SurveyedRun, executor: Executor, surveys: Surveys, measured: MeasuredSteps, rank: int
) -> Prediction | None:
    """Predict steps without a straggler where too many records kept them from being replayed beside the summary.

    Only runs with a straggler pay for this: their ranks are read a second time, of a large run only the newest records,
    and more records are replayed.
    """
    events = sum(fact.events for fact in surveys.facts)
    few = MIN_STEPS * events / max(1, measured.count)
    if few > MAX_RECORDS_OF_LAG or find_obstacle(run, surveys, measured) or run.manifest.imported == IMPORTED_PIPELINE:
        return None
    whole = surveys
    if events > MAX_READ_ONCE_MORE:
        whole_run = run.on_disk()
        if whole_run is None:
            return None
        # Twice as many: steps that are not complete are left out, and so is what follows them while caches fill.
        run = whole_run.only_newest(int(2 * max(RECORDS_OF_LAG, few)))
        surveys = survey_run(run, newest_ranks(run.folders), executor)
        measured = choose_steps(list(agree_on_rule(surveys.steps).values()))
    first, last = choose_middle(measured, whole, most_records=RECORDS_OF_LAG, fewest=MIN_STEPS)
    if last - first + 1 < MIN_STEPS:
        return None
    collector: _Collector[None] = _Collector(lines=LineCollector(first=first, last=last), details=None)
    reduced = reduce_run(
        run, executor, surveys=surveys, measured=measured, make_collector=lambda *_: collector.at, detail=SUMS_ALONE
    )
    source = join_lines(run, surveys, [line for line, _ in reduced.details if line is not None], measured=measured)
    if isinstance(source, str):
        return None
    return predict(run.name, source, [Fix(what=RANK, value=str(rank))], in_short=True)


def add_replayed_lag(listed: Sequence[StragglerResult], found: Prediction) -> tuple[StragglerResult, ...]:
    """Return the only straggler with the lag that the replay of steps without it shows, and its bounds.

    What its work exceeds that of the others by over a step is more than a step would gain: at each of many collectives
    of a step another rank would have come last, and the more members there are, the later. Of several stragglers, of
    one that became slow after the replayed steps began, and where nothing is replayed, nothing is known of that.
    The lag itself stays as it is: it is the same in live views, exports and verdicts, which replay nothing.
    """
    if len(listed) != 1 or found.steps is None or found.measured_step_ns is None:
        return tuple(listed)
    (own,) = listed
    fix = (str(Fix(what=RANK, value=str(own.rank))),)
    scenario = next((scenario for scenario in found.scenarios if scenario.fix == fix), None)
    is_slow_throughout = own.since_step is not None and own.since_step <= found.steps[0]
    if scenario is None or scenario.gain is None or scenario.interval is None or not is_slow_throughout:
        return (own,)
    lag, low, high = (
        int(min(max(share, 0.0), MOST_GAIN) * found.measured_step_ns) for share in (scenario.gain, *scenario.interval)
    )
    return (replace(own, replayed_lag_ns_per_step=lag, replayed_lag_interval_ns_per_step=(low, high)),)


def _choose_steps(run: SurveyedRun, surveys: Surveys, measured: MeasuredSteps) -> tuple[int, int] | str:
    """Return the first and the last step to replay, from the middle of the run; a sentence where none can be."""
    obstacle = find_obstacle(run, surveys, measured)
    if obstacle:
        return obstacle
    if run.manifest.imported == IMPORTED_PIPELINE:
        return "whatif: imported operations of pipelines are replayed by `dtprof whatif` alone"
    count = measured.last - measured.first + 1
    if count < MIN_STEPS:
        return f"whatif: a prediction takes {MIN_STEPS} measured steps, the run has {count}"
    events = sum(fact.events for fact in surveys.facts)
    first, last = choose_middle(
        measured, surveys, most_records=min(max(MAX_RECORDS, MAX_SHARE * events), RECORDS_OF_LAG)
    )
    if last - first + 1 < MIN_STEPS:
        return (
            f"whatif: a step of {len(surveys.facts):,} ranks has {events / max(1, measured.count):,.0f} records, too "
            "many to be replayed beside the summary; `dtprof whatif` does"
        )
    return first, last


def _predict(
    run: SurveyedRun, surveys: Surveys, lines: Sequence[RankLine], measured: MeasuredSteps, *, in_short: bool
) -> Prediction:
    source = join_lines(run, surveys, lines, measured=measured)
    if isinstance(source, str):
        return Prediction(run=run.name, cannot_tell=(source,))
    found = predict(run.name, source, (), in_short=in_short)
    return found if in_short else replace(found, timelines=draw_best(source, found))


def state_advice(found: Prediction) -> Advice:
    """State the best change of a prediction; else why none is named."""
    best = found.best
    if best is not None:
        return Advice(
            fix=best.fix,
            change=describe(best.fix),
            step_ns=best.step_ns,
            gain=best.gain,
            interval=best.interval,
            is_bound=best.fix == (FULL_OVERLAP,),
            assumes=best.assumes,
            replay_error=found.replay_error,
            replayed_steps=found.steps,
        )
    if found.replay_error is not None and found.replay_error > MAX_ERROR:
        reason = f"the replay is {100 * found.replay_error:.1f} % off the measured steps"
    elif found.replay_error is None or not found.scenarios:
        reason = found.cannot_tell[-1] if found.cannot_tell else "the run has nothing that could be changed"
    else:
        reason = NO_GAIN
    return Advice(reason=reason.removeprefix("whatif: "), replay_error=found.replay_error, replayed_steps=found.steps)
