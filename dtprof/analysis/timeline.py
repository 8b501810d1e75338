"""A few steps of all ranks as bars: at most MAX_INTERVALS, the longest where there are more."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtprof.analysis import codes
from dtprof.analysis.blocking import Blocked
from dtprof.analysis.intervals import Column, Intervals, paint
from dtprof.analysis.operation_timing import NOT_KNOWN, Timing
from dtprof.analysis.phases import ORDER
from dtprof.analysis.results import Interval, Timeline
from dtprof.formatting import format_bytes, format_ns
from dtprof.tables import UNKNOWN_NS, Array, Group, RankTables, Site, join, select

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


def collect_bars(
    tables: RankTables,
    operations: Array,
    *,
    steps: tuple[Column, Intervals],
    phases: dict[str, Intervals],
    timing: Timing,
    blocked: Blocked,
    limit: int,
) -> RankBars:
    """Return the bars of one rank in these few steps, the `limit` longest of each."""
    num_steps = MAX_STEPS if limit > FEW_BARS else 1
    numbers, windows = steps[0][-num_steps:], steps[1][-num_steps:]
    kept, num_bars = [np.zeros(0, BAR)], {}
    for number, window in zip(numbers.tolist(), windows, strict=True):
        bars = join((_phase_bars(phases, window), _operation_bars(operations, timing, blocked, window)))
        bars["step"] = number
        num_bars[number] = len(bars)
        if len(bars) > limit:
            bars = select(bars, np.sort(np.argsort(bars["begin"] - bars["end"], kind="stable")[:limit]))
        kept.append(bars)
    bars = join(kept)
    sites = {int(site): tables.sites[site] for site in np.unique(bars["site"]).tolist() if site in tables.sites}
    return RankBars(
        rank=tables.rank,
        bars=bars,
        num_bars=num_bars,
        windows={n: (int(begin), int(end)) for n, (begin, end) in zip(numbers.tolist(), windows, strict=True)},
        ops=tables.ops,
        groups=tables.groups,
        sites=sites,
    )


def _phase_bars(phases: dict[str, Intervals], window: Intervals) -> Array:
    cuts, owner = paint([phases[phase] for phase in ORDER], window.reshape(1, 2))
    changes = np.flatnonzero(owner != np.concatenate(([-1], owner[:-1])))
    begin, end = cuts[changes], np.concatenate((cuts[changes[1:]], cuts[-1:]))
    shown = (owner[changes] >= 0) & (owner[changes] < len(ORDER)) & (end > begin)
    bars = np.zeros(int(shown.sum()), BAR)
    bars["begin"], bars["end"], bars["phase"] = begin[shown], end[shown], owner[changes][shown]
    return bars


def _operation_bars(operations: Array, timing: Timing, blocked: Blocked, window: Intervals) -> Array:
    first, last = np.searchsorted(operations["issued_ns"], window)
    rows = slice(first, last)
    chosen = operations[rows]
    bars = np.zeros(len(chosen), BAR)
    exposed = np.where(blocked.known[rows], timing.exposed_wait[rows] + timing.exposed_transfer[rows], UNKNOWN_NS)
    returned = np.maximum(chosen["returned_ns"], chosen["issued_ns"])
    bars["begin"] = chosen["issued_ns"]
    bars["end"] = np.where(chosen["done_ns"] == UNKNOWN_NS, returned, chosen["done_ns"])
    bars["phase"] = -1
    bars["exposed"] = exposed * 2 >= bars["end"] - bars["begin"]
    bars["p2p"] = chosen["kind"] == codes.POINT_TO_POINT
    bars["exposed_ns"] = exposed
    bars["wait"] = np.where(timing.source[rows] == NOT_KNOWN, UNKNOWN_NS, timing.wait[rows])
    for name in ("op", "group", "seq", "site", "nbytes"):
        bars[name] = chosen[name]
    return bars


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
    intervals = [_interval(ranks[at], bars[row], origin) for at, row in zip(owner[rows], rows, strict=True)]
    intervals.sort(key=lambda bar: (bar.rank, bar.lane, bar.begin_ns))
    return Timeline(
        first_step=shown[0],
        last_step=shown[-1],
        origin_ns=origin,
        end_ns=max([end - origin, *(bar.end_ns for bar in intervals)]),
        intervals=tuple(intervals),
        left_out=sum(num_bars[step] for step in shown) - len(intervals),
    )


def _interval(rank: RankBars, bar: Array, origin: int) -> Interval:
    begin, end = int(bar["begin"]), int(bar["end"])
    length = format_ns(end - begin)
    if bar["phase"] >= 0:
        name = kind = ORDER[bar["phase"]]
        lines = [f"{name}, step {int(bar['step'])}", length]
    else:
        name = rank.ops[bar["op"]] if bar["op"] < len(rank.ops) else "?"
        kind = "point to point" if bar["p2p"] else "exposed" if bar["exposed"] else "overlapped"
        lines = _describe_operation(rank, bar, name, length)
    return Interval(
        rank=rank.rank,
        lane="phases" if bar["phase"] >= 0 else "communication",
        name=name,
        kind=kind,
        begin_ns=begin - origin,
        end_ns=end - origin,
        label="\n".join(lines),
    )


def _describe_operation(rank: RankBars, bar: Array, name: str, length: str) -> list[str]:
    group = rank.groups.get(int(bar["group"]))
    known_as = f" of group {group.name}" + (f" ({group.description})" if group.description else "") if group else ""
    lines = [f"{name} #{int(bar['seq'])}{known_as}, step {int(bar['step'])}"]
    lines.append(f"{length}, {format_bytes(int(bar['nbytes']))}")
    if bar["wait"] != UNKNOWN_NS:
        lines.append(f"waited {format_ns(int(bar['wait']))} for the last rank")
    if bar["exposed_ns"] != UNKNOWN_NS:
        lines.append(f"kept the program for {format_ns(int(bar['exposed_ns']))}")
    if site := rank.sites.get(int(bar["site"])):
        lines.append(f"{site.file}:{site.line} in {site.function}")
    return lines
