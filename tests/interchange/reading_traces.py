"""What both formats of traces are read back as, so that the same is asserted of both."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtprof.analysis.results import PARTS, PHASES, Summary


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One slice as a viewer shows it."""

    rank: int
    track: str
    name: str
    begin_ns: int
    end_ns: int
    arguments: dict[str, object] = field(default_factory=dict)


def assert_figures_equal(slices: Sequence[Slice], summary: Summary, used: range) -> None:
    """The steps, their parts and phases, and the operations are those of the summary."""
    windows = {(s.rank, s.arguments["step"]): s for s in slices if s.track == "steps"}
    spent: dict[tuple[int, str, str], int] = defaultdict(int)
    for one in slices:
        if one.track in ("parts of the step", "phases"):
            inside = [step for step in used if _lies_in(one, windows[one.rank, step])]
            spent[one.rank, one.track, one.name] += (one.end_ns - one.begin_ns) * len(inside)
    for rank in summary.ranks:
        mean = sum(windows[rank.rank, step].end_ns - windows[rank.rank, step].begin_ns for step in used) // len(used)
        assert mean == rank.step_ns
        for track, names, figures in (
            ("parts of the step", PARTS, rank.partition_ns),
            ("phases", PHASES, rank.phases_ns),
        ):
            assert figures is not None
            for name in names:
                assert abs(spent[rank.rank, track, name] / len(used) - figures[name]) <= 1, (rank.rank, name)
    for row in summary.collectives:
        own = [
            s
            for s in slices
            if s.name == row.op
            and str(s.arguments.get("group", "")).split(" ")[0] == row.group
            and any(_begins_in(s, windows[s.rank, step]) for step in used)
        ]
        members = 1 if row.op in ("send", "recv") else len(next(g.ranks for g in summary.groups if g.name == row.group))
        assert len(own) == row.count * members
        assert sum(s.end_ns - s.begin_ns for s in own) // len(own) == row.duration_ns
        for argument, figure in (
            ("bytes", row.bytes),
            ("wait_ns", row.wait_ns),
            ("transfer_ns", row.transfer_ns),
            ("exposed_ns", row.exposed_ns),
        ):
            values = [s.arguments[argument] for s in own]
            assert all(isinstance(value, int) for value in values)
            assert sum(value for value in values if isinstance(value, int)) // len(own) == figure, argument


def assert_no_overlap(slices: Sequence[Slice], lanes: Sequence[object]) -> None:
    """Slices of one lane follow one another."""
    ends: dict[object, int] = {}
    for one, lane in sorted(zip(slices, lanes, strict=True), key=lambda pair: (pair[0].begin_ns, pair[0].end_ns)):
        assert one.begin_ns >= ends.get(lane, 0)
        ends[lane] = one.end_ns


def _lies_in(one: Slice, window: Slice) -> bool:
    return window.begin_ns <= one.begin_ns and one.end_ns <= window.end_ns


def _begins_in(one: Slice, window: Slice) -> bool:
    return window.begin_ns <= one.begin_ns < window.end_ns
