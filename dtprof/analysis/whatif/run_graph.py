"""The graph of a run, from whatever its records hold; a sentence where there is none."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dtprof.analysis.map_reduce.long_log_survey import survey_to_sum
from dtprof.analysis.map_reduce.reduction import SUMS_ALONE, reduce_run
from dtprof.analysis.map_reduce.survey import SurveyedRun, Surveys
from dtprof.analysis.steps.step_boundaries import MeasuredSteps, agree_on_rule, choose_steps
from dtprof.analysis.whatif import job_graph, pipeline_graph
from dtprof.analysis.whatif.operation_graph import OperationGraph
from dtprof.analysis.whatif.prediction import Replayable
from dtprof.analysis.whatif.rank_line import LineCollector, RankLine
from dtprof.analysis.whatif.schedule_fixes import measure_times
from dtprof.formatting import list_ranks, plural
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.job.world_size import newest_attempt, newest_ranks, resolve_world_size

MAX_RECORDS = 1 << 18
"""Records of the steps that are replayed; of longer runs fewer steps."""
MIN_STEPS = 2
MAX_UNKNOWN = 0.02
"""As a share of operations: with more unobserved completions, the waits of ranks are unknown."""
IMPORTED_PIPELINE = "StragglerAnalysis"


def read_graph(run: SurveyedRun, executor: Executor = THIS_PROCESS) -> Replayable | str:
    """Return a run as a graph, or a sentence that names the missing records."""
    surveys = survey_to_sum(run, newest_ranks(run.folders), executor)
    measured = choose_steps(list(agree_on_rule(surveys.steps).values()))
    obstacle = find_obstacle(run, surveys, measured)
    if obstacle:
        return obstacle
    if run.manifest.imported == IMPORTED_PIPELINE:
        return _read_pipelines(run, surveys)
    first, last = choose_middle(measured, surveys, most_records=MAX_RECORDS, fewest=MIN_STEPS)
    collector = LineCollector(first=first, last=last)
    some = replace(measured, first=first, last=last)
    reduced = reduce_run(
        run, executor, surveys=surveys, measured=some, make_collector=lambda *_: collector.at, detail=SUMS_ALONE
    )
    return join_lines(run, surveys, reduced.details, measured=measured)


def find_obstacle(run: SurveyedRun, surveys: Surveys, measured: MeasuredSteps) -> str:
    """Return why a run cannot be replayed, as far as its survey tells; empty where it can."""
    if not measured.known:
        return (
            "whatif: the run has no measured steps, which a change could make shorter; record three steps or more that "
            "end with an optimizer step or dtprof.step()"
        )
    if run.manifest.imported == IMPORTED_PIPELINE:
        return ""
    if run.manifest.replicas > 1:
        return (
            f"whatif: the run has {run.manifest.replicas} replicas, which may be several programs, and restart one by "
            "one: a step of one is not the same step of another. Record one of them to have it replayed"
        )
    chosen, facts = newest_ranks(run.folders), surveys.facts
    world_size = resolve_world_size((fact.world_size for fact in facts), (fact.rank for fact in facts))
    missing = sorted(set(range(world_size)) - set(chosen))
    if missing:
        return (
            f"whatif: {list_ranks(missing)} of {world_size} left no records; expected those of all ranks, whose waits "
            "for each other are replayed. Record all nodes, and join them with dtprof gather"
        )
    boots = set(surveys.boots.values())
    if len(boots) > 1 and not surveys.one_clock:
        return (
            f"whatif: the clocks of {len(boots)} hosts could not be aligned; expected one clock, to see who waits for "
            "whom. dtprof run on each node measures them"
        )
    return ""


def join_lines(
    run: SurveyedRun, surveys: Surveys, found: Sequence[RankLine], *, measured: MeasuredSteps
) -> Replayable | str:
    """Return the lines of all ranks, of the same steps, as a graph; a sentence where they cannot be replayed."""
    lines = [_with_stage(line, surveys) for line in found]
    stepless = [line.rank for line in lines if len(line.bounds) < 2]
    if stepless:
        return (
            f"whatif: {list_ranks(stepless)} ended no step; expected the same steps on every rank, which are replayed "
            "together. Call dtprof.step() on all of them"
        )
    unknown = sum(line.unknown for line in lines)
    count = unknown + sum(len(line.seq) for line in lines)
    if unknown > MAX_UNKNOWN * max(1, count):
        return (
            f"whatif: of {unknown:,} of {count:,} operations it is not known when they were done, so that waits cannot "
            "be told from computation; record with the native hook, and devices with their events"
        )
    graph = job_graph.build_graph(lines)
    if isinstance(graph, str):
        return f"whatif: the run cannot be replayed: {graph}"
    times = measure_times(list(surveys.pipelines.values()), (measured.first, measured.last))
    caveats = []
    first, last = graph.steps
    if (first, last) != (measured.first, measured.last):
        num_steps = measured.last - measured.first + 1
        caveats.append(f"whatif: of {num_steps:,} measured steps {first} to {last} are replayed")
    attempt = newest_attempt(run.folders)
    if attempt:
        caveats.append(f"whatif: the job was restarted {plural(attempt, 'time')}; only its last attempt is replayed")
    return Replayable(
        graph=graph,
        pipeline=None if isinstance(times, str) else times,
        no_pipeline=times if isinstance(times, str) else "",
        caveats=tuple(caveats),
    )


def choose_middle(
    measured: MeasuredSteps, surveys: Surveys, *, most_records: float, fewest: int = 0
) -> tuple[int, int]:
    """Return the first and the last step to replay: all measured ones, or as many from the middle as a bound allows.

    The summary and `dtprof whatif` both choose by this: of a run within both bounds they give the same figures.

    Parameters:
        most_records: of the steps together.
        fewest: steps that are replayed whatever they hold, where there are as many.
    """
    count = measured.last - measured.first + 1
    a_step = sum(fact.events for fact in surveys.facts) / max(1, measured.count)
    chosen = min(count, max(fewest, int(most_records / max(1.0, a_step))))
    first = measured.first + (count - chosen) // 2
    return first, first + chosen - 1


def _with_stage(line: RankLine, surveys: Surveys) -> RankLine:
    pipeline = surveys.pipelines.get(line.rank)
    return line if pipeline is None else replace(line, stage=pipeline.pipeline.group_rank)


def _read_pipelines(run: SurveyedRun, surveys: Surveys) -> Replayable | str:
    rows = []
    steps = agree_on_rule(surveys.steps)
    numbers = next(iter(steps.values())).numbers
    for tables in run.load_each(newest_ranks(run.folders)):
        windows = steps[tables.rank].windows
        own = pipeline_graph.read_rows(tables, np.r_[windows[:, 0], windows[-1:, 1]])
        if isinstance(own, str):
            return f"whatif: the run cannot be replayed: {own}"
        rows.append(own)
    graph: OperationGraph | str = pipeline_graph.build_graph(rows, (int(numbers[0]), int(numbers[-1])))
    if isinstance(graph, str):
        return f"whatif: the run cannot be replayed: {graph}"
    times = measure_times(list(surveys.pipelines.values()), (int(numbers[0]), int(numbers[-1])))
    return Replayable(
        graph=graph,
        pipeline=None if isinstance(times, str) else times,
        no_pipeline=times if isinstance(times, str) else "",
        caveats=("whatif: sizes are not known; a faster network shortens latencies, too",),
    )
