"""What the pages of a report show beyond the summary: the bars of the whole run, the schedule of a step, the course of
memory, traffic by pair of ranks and by size.

Each rank is read once more, one at a time. What is kept is bounded, whatever the run holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtprof.analysis.execution import THIS_PROCESS, Executor
from dtprof.analysis.memory_course import MemoryCourse, find_worst, follow_memory
from dtprof.analysis.pipeline_chart import PipelineChart, chart_pipeline
from dtprof.analysis.results import Summary
from dtprof.analysis.step_phases import follow_phases
from dtprof.analysis.summary import summarise
from dtprof.analysis.surveys import Run, Surveys, newest_ranks, survey_run
from dtprof.analysis.tracks import Names, Track, bars_each, draw_track
from dtprof.analysis.traffic import Traffic, TrafficCount

MAX_BARS = 160_000


@dataclass(frozen=True, kw_only=True)
class Tracks:
    """What every rank did over the whole run, on one clock."""

    origin_ns: int
    end_ns: int  # since the origin
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    tracks: tuple[Track, ...]
    left_out: int  # bars shorter than those that are kept


@dataclass(frozen=True, kw_only=True)
class Closeup:
    """Details of a run for its pages; what is empty or None could not be told."""

    coordinates: Mapping[int, Mapping[str, int]]  # by rank: its place along each axis of parallelism
    tracks: Tracks | None
    pipeline: PipelineChart | None
    memory: MemoryCourse
    traffic: Traffic


def examine(run: Run, executor: Executor = THIS_PROCESS, *, max_bars: int = MAX_BARS) -> tuple[Summary, Closeup]:
    """Summarise a run and look at its details.

    Parameters:
        max_bars: of all ranks together that the timeline of the whole run may hold.
    """
    surveys = survey_run(run, newest_ranks(run), executor)
    summary = summarise(run, executor, surveys=surveys)
    return summary, look_closer(run, summary, surveys, max_bars=max_bars)


def look_closer(run: Run, summary: Summary, surveys: Surveys, *, max_bars: int) -> Closeup:
    """Look at the details of a run that is summarised."""
    coordinates: dict[int, Mapping[str, int]] = {}
    tracks: list[Track] = []
    courses, phases = {}, None
    worst = find_worst(summary)
    names = Names()
    traffic = TrafficCount(surveys.meetings)
    limit = bars_each(max_bars, len(surveys.boots))
    one_clock = surveys.one_clock
    for rank in sorted(surveys.boots):
        tables = surveys.clocks.align(run.part([rank]).load(rank))
        coordinates[rank] = tables.coordinates
        courses[rank] = follow_memory(tables)
        traffic.add(tables)
        if rank == worst:
            phases = follow_phases(tables, surveys.steps[rank])
        if one_clock:
            tracks.append(draw_track(tables, surveys.steps[rank], names, limit=limit))
    chart = chart_pipeline(tuple(surveys.pipelines.values()), summary)
    return Closeup(
        coordinates=coordinates,
        tracks=_join(tracks, names),
        pipeline=chart,
        memory=MemoryCourse(ranks=courses, worst=worst, phases=phases),
        traffic=traffic.result(),
    )


def _join(tracks: list[Track], names: Names) -> Tracks | None:
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
