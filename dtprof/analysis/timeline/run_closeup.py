"""What the pages of a report show beyond the summary: the bars of the whole run, the schedule of a step, the course of
memory, traffic by pair of ranks and by size.

They are found while each rank is read for the summary. What is kept is bounded, whatever the run holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtprof.analysis.communication.traffic import Traffic, find_traffic
from dtprof.analysis.map_reduce.long_log_reduction import newest_range
from dtprof.analysis.map_reduce.long_log_survey import LONG_LOG, survey_to_sum
from dtprof.analysis.map_reduce.survey import SurveyedRun
from dtprof.analysis.memory.memory_series import MemorySeries, find_worst
from dtprof.analysis.pipeline.schedule_chart import PipelineChart, chart_pipeline
from dtprof.analysis.results import Caveat, Summary
from dtprof.analysis.steps.step_boundaries import agree_on_rule, choose_steps
from dtprof.analysis.timeline.rank_closeup import CloseupCollector, RankCloseup
from dtprof.analysis.timeline.run_tracks import BarNames, Track, bars_each
from dtprof.analysis.whatif.advice import summarise_closely
from dtprof.analysis.whatif.prediction import Prediction
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.job.world_size import newest_ranks

MAX_BARS = 160_000


@dataclass(frozen=True, kw_only=True)
class Tracks:
    """The activity of every rank over the whole run, on one clock."""

    origin_ns: int
    end_ns: int  # since the origin
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    tracks: tuple[Track, ...]
    left_out: int  # bars shorter than those that are kept


@dataclass(frozen=True, kw_only=True)
class Closeup:
    """Details of a run for its pages; unknowns are empty or None."""

    coordinates: Mapping[int, Mapping[str, int]]  # by rank: its place along each axis of parallelism
    tracks: Tracks | None
    pipeline: PipelineChart | None
    memory: MemorySeries
    traffic: Traffic
    prediction: Prediction | None = None  # of single changes, from a few steps


def examine(
    run: SurveyedRun, executor: Executor = THIS_PROCESS, *, max_bars: int = MAX_BARS
) -> tuple[Summary, Closeup]:
    """Summarise a run and extract its details.

    Parameters:
        max_bars: of all ranks together that the timeline of the whole run may hold.
    """
    surveys = survey_to_sum(run, newest_ranks(run.folders), executor)
    worst = find_worst(surveys.facts)
    collector = CloseupCollector(max_bars=bars_each(max_bars, len(surveys.facts)), phases_of=worst)
    summary, closeups, prediction, lateness = summarise_closely(
        run, executor, surveys=surveys, make_collector=lambda *_: collector.at
    )
    if surveys.ranges is not None:
        measured = choose_steps(list(agree_on_rule(surveys.steps).values()))
        first, last = newest_range(surveys.ranges, measured)
        summary = replace(
            summary,
            cannot_tell=(
                *summary.cannot_tell,
                Caveat(
                    "timeline",
                    f"bars, the course of memory and bytes between ranks are those of the steps {first} to "
                    f"{last}; of a run with more than {LONG_LOG:,} records a rank the rest is summed, and not drawn",
                ),
            ),
        )
    ranks = {fact.rank: details for fact, details in zip(surveys.facts, closeups, strict=True)}
    coordinates = {rank: details.coordinates for rank, details in ranks.items()}
    sent_bytes = {rank: details.sent_bytes for rank, details in ranks.items()}
    return summary, Closeup(
        coordinates=coordinates,
        tracks=_join(closeups) if surveys.one_clock else None,
        pipeline=chart_pipeline(tuple(surveys.pipelines.values()), summary),
        memory=MemorySeries(
            ranks={rank: details.memory for rank, details in ranks.items()},
            worst=worst,
            phases=ranks[worst].phases if worst is not None else None,
        ),
        traffic=find_traffic(sent_bytes, lateness, coordinates),
        prediction=prediction,
    )


def _join(ranks: Sequence[RankCloseup]) -> Tracks | None:
    names = BarNames()
    tracks = [names.renumber(details.track, details.names) for details in ranks]
    known = [track for track in tracks if len(track.begin_ns)]
    if not known:
        return None
    origin = min(int(track.begin_ns[0]) for track in known)
    end = max(int((track.begin_ns + track.length_ns).max()) for track in known)
    return Tracks(
        origin_ns=origin,
        end_ns=end - origin,
        kinds=tuple(names.kinds),
        names=tuple(names.names),
        tracks=tuple(tracks),
        left_out=sum(track.left_out for track in tracks),
    )
