"""Details of one rank on the pages of a report beyond the summary, extracted while the rank is read for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from dtprof.analysis.map_reduce.placed_ranks import PlacedRank
from dtprof.analysis.map_reduce.reduction_tasks import RankTask
from dtprof.analysis.memory.memory_series import RankMemory, follow_memory
from dtprof.analysis.steps.phase_series import StepPhases, follow_phases
from dtprof.analysis.timeline.run_tracks import BarNames, Track, draw_track
from dtprof.columns import distinct, is_any
from dtprof.records.events import POINT_TO_POINT
from dtprof.records.tables import RankTables, is_own, select


@dataclass(frozen=True, kw_only=True)
class RankCloseup:
    """Details of one rank; picklable, and bounded whatever the rank did."""

    coordinates: Mapping[str, int]
    memory: RankMemory
    phases: StepPhases | None  # None where they were not asked for
    sent_bytes: Mapping[int, int]  # by rank that messages go to
    track: Track
    names: BarNames  # of the track


@dataclass(frozen=True, kw_only=True)
class CloseupCollector:
    """Collects the details of each rank."""

    max_bars: int  # of the timeline of the whole run, each rank; of more the longest
    phases_of: int | None  # the rank whose steps are followed by phase

    def at(self, rank: PlacedRank, _: RankTask) -> RankCloseup:
        """Return the details of one rank."""
        tables = rank.tables
        track, names = draw_track(rank, limit=self.max_bars)
        return RankCloseup(
            coordinates=tables.coordinates,
            memory=follow_memory(tables),
            phases=follow_phases(rank) if tables.rank == self.phases_of else None,
            sent_bytes=_count_sent(tables),
            track=track,
            names=names,
        )


def _count_sent(tables: RankTables) -> dict[int, int]:
    """Return how many bytes of messages a rank sends, by rank that they go to."""
    sent: dict[int, int] = {}
    operations = select(tables.operations, is_own(tables, tables.operations))
    ids = [number for number, name in enumerate(tables.ops) if name == POINT_TO_POINT[0]]
    sends = select(operations, is_any(operations["op"], ids))
    for number in distinct(sends["group"]).tolist():
        group_sends, group = sends[sends["group"] == number], tables.groups.get(number)
        for peer in distinct(group_sends["peer"]).tolist():
            if group is not None and 0 <= peer < len(group.ranks):
                target = group.ranks[peer]
                sent[target] = sent.get(target, 0) + int(group_sends["nbytes"][group_sends["peer"] == peer].sum())
    return sent
