"""A few steps of all ranks as bars: at most MAX_INTERVALS, the longest where there are more."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dtprof.analysis.communication.operation_timing import NOT_KNOWN, Timing
from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch, SteppedRank
from dtprof.analysis.results import Timeline, TimelineBar
from dtprof.analysis.steps.phase_intervals import ORDER
from dtprof.columns import is_among
from dtprof.formatting import format_bytes, format_ns
from dtprof.intervals import Column, Intervals, locate, near, paint
from dtprof.job.device_timeline import start_of
from dtprof.records import codes
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS, Array, Group, join, select

MAX_INTERVALS = 4_000
MAX_STEPS = 3
FEW_BARS = 64
"""Where a rank may bring no more, there are so many ranks that bars of two steps never fit."""
BAR = np.dtype(
    [
        ("begin", "i8"),
        ("end", "i8"),
        ("step", "i8"),
        ("phase", "i2"),  # position in phases.ORDER; -1 for an operation
        ("op", "i4"),
        ("exposed", "?"),
        ("p2p", "?"),
        ("group", "i4"),
        ("seq", "i8"),
        ("site", "i8"),
        ("nbytes", "i8"),
        ("wait", "i8"),
        ("exposed_ns", "i8"),  # UNKNOWN_NS where not known
    ]
)


class _Bar(NamedTuple):
    """A row of BAR."""

    begin: int
    end: int
    step: int
    phase: int
    op: int
    exposed: bool
    p2p: bool
    group: int
    seq: int
    site: int
    nbytes: int
    wait: int
    exposed_ns: int


@dataclass(frozen=True, kw_only=True)
class RankBars:
    """The longest bars of one rank in the last steps, and how many there were in each."""

    rank: int
    bars: Array
    num_bars: dict[int, int]  # by step
    windows: dict[int, tuple[int, int]]
    ops: tuple[str, ...]
    groups: dict[int, Group]
    sites: dict[int, Site]


def collect_bars(batch: PlacedBatch, timing: Timing, *, limit: int) -> list[RankBars]:
    """Return the bars of each rank in the last few steps, the `limit` longest of each."""
    num_steps = MAX_STEPS if limit > FEW_BARS else 1
    windows = batch.on_axis([rank.windows[-num_steps:] for rank in batch.ranks])
    lengths = [len(rank.windows[-num_steps:]) for rank in batch.ranks]
    numbers = np.concatenate([rank.numbers[-num_steps:] for rank in batch.ranks])
    place = np.repeat(np.arange(len(batch.ranks)), lengths)
    phase_at, of_phases = _phase_bars(batch.phases, windows)
    operation_at, of_operations = _operation_bars(batch, timing, windows)
    of_phases["begin"] -= batch.shifts[place[phase_at]]
    of_phases["end"] -= batch.shifts[place[phase_at]]
    order, at = _merge(phase_at, operation_at)
    bars = select(join((of_phases, of_operations)), order)
    bars["step"] = numbers[at]
    counts = np.bincount(at, minlength=len(windows)).tolist()
    ends = list(itertools.accumulate(counts))
    steps = [_longest(bars[end - count : end], limit) for count, end in zip(counts, ends, strict=True)]
    bounds = itertools.pairwise([0, *itertools.accumulate(lengths)])
    return [
        _bars_of(rank, steps[begin:end], counts[begin:end])
        for rank, (begin, end) in zip(batch.ranks, bounds, strict=True)
    ]


def _merge(phase_at: Column, operation_at: Column) -> tuple[Column, Column]:
    """Return the order in which the bars of each window follow one another, phases first, and the window of each."""
    at = np.concatenate((phase_at, operation_at))
    order = at.argsort(kind="stable")
    return order, at[order]


def _longest(bars: Array, limit: int) -> Array:
    if len(bars) <= limit:
        return bars
    return select(bars, np.sort(np.argsort(bars["begin"] - bars["end"], kind="stable")[:limit]))


def _bars_of(rank: SteppedRank, steps: Sequence[Array], counts: Sequence[int]) -> RankBars:
    tables = rank.placed.tables
    bars = join([np.zeros(0, BAR), *steps])
    last = slice(len(rank.windows) - len(steps), None)
    numbers = rank.numbers[last].tolist()
    return RankBars(
        rank=tables.rank,
        bars=bars,
        num_bars=dict(zip(numbers, counts, strict=True)),
        windows={
            number: (begin, end) for number, (begin, end) in zip(numbers, rank.windows[last].tolist(), strict=True)
        },
        ops=tables.ops,
        groups=tables.groups,
        sites={site: tables.sites[site] for site in sorted(set(bars["site"].tolist())) if site in tables.sites},
    )


def _phase_bars(phases: dict[str, Intervals], windows: Intervals) -> tuple[Column, Array]:
    """Return the window of each bar, and the bars, by time."""
    cuts, owner = paint([near(phases[phase], windows) for phase in ORDER], windows)
    changes = np.flatnonzero((owner != np.concatenate(([-1], owner[:-1]))) | is_among(cuts, windows[:, 0]))
    begin, end = cuts[changes], np.concatenate((cuts[changes[1:]], cuts[-1:]))[: len(changes)]
    shown = (owner[changes] >= 0) & (owner[changes] < len(ORDER)) & (end > begin)
    bars = np.zeros(int(shown.sum()), BAR)
    bars["begin"], bars["end"], bars["phase"] = begin[shown], end[shown], owner[changes][shown]
    return locate(begin[shown], windows), bars


def _operation_bars(batch: PlacedBatch, timing: Timing, windows: Intervals) -> tuple[Column, Array]:
    """Return the window of each bar, and the bars, by time."""
    at = locate(batch.place_times(batch.operations["issued_ns"]), windows)
    rows = np.flatnonzero(at >= 0)
    chosen = select(batch.operations, rows)
    bars = np.zeros(len(chosen), BAR)
    known = batch.blocked.exposure_known[rows]
    exposed = np.where(known, timing.exposed_wait[rows] + timing.exposed_transfer[rows], UNKNOWN_NS)
    returned = np.maximum(chosen["returned_ns"], chosen["issued_ns"])
    bars["begin"] = start_of(chosen)
    bars["end"] = np.where(chosen["done_ns"] == UNKNOWN_NS, returned, chosen["done_ns"])
    bars["phase"] = -1
    bars["exposed"] = exposed * 2 >= bars["end"] - bars["begin"]
    bars["p2p"] = chosen["kind"] == codes.POINT_TO_POINT
    bars["exposed_ns"] = exposed
    bars["wait"] = np.where(timing.source[rows] == NOT_KNOWN, UNKNOWN_NS, timing.wait[rows])
    for name in ("op", "group", "seq", "site", "nbytes"):
        bars[name] = chosen[name]
    return at[rows], bars


def draw_timeline(ranks: Sequence[RankBars]) -> Timeline | None:
    """Return the last steps, up to MAX_STEPS, that fit; of a single step too large the longest bars."""
    steps = sorted(set().union(*(rank.windows for rank in ranks))) if ranks else []
    if not steps:
        return None
    num_bars = {step: sum(rank.num_bars.get(step, 0) for rank in ranks) for step in steps}
    shown = steps[-1:]
    for step in reversed(steps[-MAX_STEPS:-1]):
        if step != shown[0] - 1 or sum(num_bars[s] for s in (step, *shown)) > MAX_INTERVALS:
            break
        shown.insert(0, step)
    windows = [rank.windows[step] for rank in ranks for step in shown if step in rank.windows]
    origin, end = min(begin for begin, _ in windows), max(end for _, end in windows)
    bars = join([rank.bars for rank in ranks])
    owner = np.repeat(np.arange(len(ranks)), [len(rank.bars) for rank in ranks])
    rows = np.flatnonzero(np.isin(bars["step"], shown))
    if len(rows) > MAX_INTERVALS:
        rows = rows[np.argsort((bars["begin"] - bars["end"])[rows], kind="stable")[:MAX_INTERVALS]]
    chosen = map(_Bar._make, select(bars, rows).tolist())
    intervals = [_interval(ranks[at], bar, origin) for at, bar in zip(owner[rows].tolist(), chosen, strict=True)]
    intervals.sort(key=lambda bar: (bar.rank, bar.lane, bar.begin_ns))
    return Timeline(
        first_step=shown[0],
        last_step=shown[-1],
        origin_ns=origin,
        end_ns=max([end - origin, *(bar.end_ns for bar in intervals)]),
        intervals=tuple(intervals),
        left_out=sum(num_bars[step] for step in shown) - len(intervals),
    )


def _interval(rank: RankBars, bar: _Bar, origin: int) -> TimelineBar:
    length = format_ns(bar.end - bar.begin)
    if bar.phase >= 0:
        name = kind = ORDER[bar.phase]
        lines = [f"{name}, step {bar.step}", length]
    else:
        name = rank.ops[bar.op] if bar.op < len(rank.ops) else "?"
        kind = "point to point" if bar.p2p else "exposed" if bar.exposed else "overlapped"
        lines = _describe_operation(rank, bar, name, length)
    return TimelineBar(
        rank=rank.rank,
        lane="phases" if bar.phase >= 0 else "communication",
        name=name,
        kind=kind,
        begin_ns=bar.begin - origin,
        end_ns=bar.end - origin,
        label="\n".join(lines),
    )


def _describe_operation(rank: RankBars, bar: _Bar, name: str, length: str) -> list[str]:
    group = rank.groups.get(bar.group)
    known_as = f" of group {group.name}" + (f" ({group.description})" if group.description else "") if group else ""
    lines = [f"{name} #{bar.seq}{known_as}, step {bar.step}"]
    lines.append(f"{length}, {format_bytes(bar.nbytes)}")
    if bar.wait != UNKNOWN_NS:
        lines.append(f"waited {format_ns(bar.wait)} for the last rank")
    if bar.exposed_ns != UNKNOWN_NS:
        lines.append(f"kept the program for {format_ns(bar.exposed_ns)}")
    if site := rank.sites.get(bar.site):
        lines.append(f"{site.file}:{site.line} in {site.function}")
    return lines
