"""Put the ranks of several hosts on one clock, and say how far off it may be.

Two sources, used together. Launchers measured round trips to the reference host (records.host_clocks). And the records
bound the clocks themselves: no member leaves a collective that needs everybody before the last one entered, nobody has
what a root or a sender gives before it gave it. Each such pair bounds the difference of two clocks from one side, and
so does a measurement, from both. The difference is taken for a line over time, within MAX_DRIFT, from which it wanders
by WANDER_PPM; the lines that no bound forbids tell the most likely one, in their middle, and the error, to their edge
and beyond by the wander. Over a long run that is more than the error of measurements, which are then joined by lines
instead. Bounds that contradict the measured clocks replace them, and it is said.

Each rank gives at most MAX_MARKS operations a channel; they are merged by clock. Hosts are compared with one host of
each channel, so that bounds grow with hosts, not with their pairs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dtprof.columns import distinct, is_any, median
from dtprof.intervals import Column, Floats
from dtprof.job.clock_errors import ClockErrors
from dtprof.job.collective_matching import FAR, MatchedOperations, split
from dtprof.job.groups import Channel
from dtprof.job.valid_records import stride_of
from dtprof.records import codes
from dtprof.records.events import FROM_ROOT, TO_ROOT
from dtprof.records.nodes.host_clocks import MAX_DRIFT_PPM, WANDER_PPM, HostClock
from dtprof.records.tables import UNKNOWN_NS, Array, RankTables, select

MAX_MARKS = 1024
MAX_WINDOWS = 64
MAX_DRIFT = MAX_DRIFT_PPM * 1e-6
WORTH_IT_NS = 1_000
"""A correction smaller than this is left out of the clock; it stays within the error."""
_FAR_AWAY_NS = 10**15
_MARK = np.dtype([("seq", "i8"), ("start", "i8"), ("done", "i8")])
_TIMES = {
    "operations": ("issued_ns", "returned_ns", "wait_begin_ns", "done_ns"),
    "spans": ("begin_ns", "end_ns"),
    "samples": ("t_ns",),
}


@dataclass(frozen=True, kw_only=True)
class ClockResult:
    """The clock of one host against that of the reference."""

    host: str
    offset_ns: int | None  # added to its times, in the middle of the run; None where it is not aligned
    error_ns: int | None
    by: str | None  # "round trips", "records", "round trips and records"; None: it is the reference, or not aligned


@dataclass(frozen=True, kw_only=True)
class LinearCorrection:
    """A correction that changes evenly: offset at a moment, slope, and the error over the run."""

    at_ns: float = 0.0
    offset_ns: float = 0.0
    slope: float = 0.0
    error_ns: float = 0.0

    def __call__(self, times: Floats) -> Floats:
        """Return the correction at these times."""
        return self.offset_ns + (times - self.at_ns) * self.slope


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The clocks that are known against the reference, by boot id."""

    reference: str = ""  # boot id
    measured: Mapping[str, HostClock] = field(default_factory=dict)
    corrections: Mapping[str, LinearCorrection] = field(default_factory=dict)  # on top, by time of the reference
    errors_ns: Mapping[str, float] = field(default_factory=dict)  # of each clock that is aligned
    contradicted: Mapping[str, float] = field(default_factory=dict)  # ns beyond the error of its measurements

    def align(self, tables: RankTables) -> RankTables:
        """Return the tables with the times and the boot id of the reference; unchanged where the clock is not known."""
        own = tables.boot_id
        if own == self.reference or not (own in self.measured or own in self.corrections):
            return tables
        moved = {}
        for name, columns in _TIMES.items():
            rows: Array = getattr(tables, name).copy()
            for column in columns:
                known = rows[column] != UNKNOWN_NS
                rows[column] = np.where(known, rows[column] + self.offset(own, rows[column]), UNKNOWN_NS)
            moved[name] = rows
        edges = np.array([tables.first_ns, tables.last_ns, tables.ended_ns], np.int64)
        first, last, ended = (edges + self.offset(own, edges)).tolist()
        return replace(
            tables,
            boot_id=self.reference,
            first_ns=first,
            last_ns=last,
            ended_ns=ended if tables.ended_ns != UNKNOWN_NS else UNKNOWN_NS,
            monotonic_to_realtime_ns=tables.monotonic_to_realtime_ns - (first - tables.first_ns),
            operations=moved["operations"],
            spans=moved["spans"],
            samples=moved["samples"],
        )

    def offset(self, boot_id: str, times: Column) -> Column:
        """Return the offset for times of a clock."""
        exact = times.astype(np.float64)
        offset = np.zeros(len(times))
        clock = self.measured.get(boot_id)
        if clock is not None and clock.points:
            known = [point.t_ns for point in clock.points]
            at = [known[0] - _FAR_AWAY_NS, *known, known[-1] + _FAR_AWAY_NS]
            offset = np.interp(exact, at, [clock.offset_at(t) for t in at])
        line = self.corrections.get(boot_id)
        if line is not None:
            offset = offset + line(exact + offset + line.offset_ns)
        return np.round(offset).astype(np.int64)


def collect_marks(tables: RankTables, operations: Array, matched: MatchedOperations) -> dict[Channel, Array]:
    """Return of some operations of one rank when it gave what others need, and when it had what it needs of others.

    Rows are by position; `start` is -1 where nobody needs it, `done` FAR where it needs nobody, or is not known.
    """
    placed = zip(matched.channels, matched.rows, matched.seqs, strict=True)
    several = [one for one in placed if one[0].num_members > 1]
    if not several:
        return {}
    channels = [channel for channel, _, _ in several]
    seqs = [_thinned(seqs, seqs) for _, _, seqs in several]
    lengths = [len(own) for own in seqs]
    own = select(operations, np.concatenate([_thinned(rows, seqs) for _, rows, seqs in several]))
    names = [*tables.ops, ""]
    op = np.minimum(own["op"], len(tables.ops))
    from_root, to_root = (
        is_any(op, [i for i, name in enumerate(names) if name in ops]) for ops in (FROM_ROOT, TO_ROOT)
    )
    is_root = own["peer"] == np.repeat([channel.group.ranks.place_of(tables.rank) for channel in channels], lengths)
    is_p2p = np.repeat([channel.is_p2p for channel in channels], lengths)
    sends = [channel.is_p2p and channel.sending_rank == tables.rank for channel in channels]
    is_send = np.repeat(sends, lengths)
    gives = np.where(is_p2p, is_send, ~(from_root & ~is_root) & ~(to_root & is_root))
    needs = np.where(is_p2p, ~is_send, ~(from_root & is_root) & ~(to_root & ~is_root))
    known = (own["done_ns"] != UNKNOWN_NS) & (own["state"] == codes.DONE)
    marked = np.zeros(len(own), _MARK)
    marked["seq"] = np.concatenate(seqs)
    marked["start"] = np.where(gives, own["issued_ns"], -1)
    marked["done"] = np.where(needs & known, own["done_ns"], FAR)
    return split(marked, channels, seqs)


def _thinned(column: Column, seqs: Column) -> Column:
    """Return the rows that are kept of so many positions."""
    stride = stride_of(len(seqs), MAX_MARKS)
    return column if stride == 1 else column[seqs % stride == 0]


def join_marks(parts: Sequence[Array], *, num: int) -> Array:
    """Return the marks of one rank in a channel, given those of several stretches of its log with `num` operations."""
    rows = np.concatenate(parts)
    rows = rows[np.argsort(rows["seq"], kind="stable")]
    kept: Array = rows[rows["seq"] % stride_of(num, MAX_MARKS) == 0]
    return kept


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The same of all ranks, the latest start and the earliest end by channel and clock."""

    tables: dict[Channel, dict[str, Array]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, boot_id: str, marks: Mapping[Channel, Array]) -> None:
        """Take in the marks of one more rank."""
        for channel, own in marks.items():
            known = self.tables[channel].get(boot_id)
            self.tables[channel][boot_id] = own if known is None else _merge(known, own)

    def join(self, others: "Marks") -> None:
        """Take in the marks of other ranks."""
        for channel, clocks in others.tables.items():
            for boot_id, own in clocks.items():
                self.add(boot_id, {channel: own})


def _merge(a: Array, b: Array) -> Array:
    if len(a) == len(b) and np.array_equal(a["seq"], b["seq"]):
        seqs, in_a, in_b = a["seq"], np.arange(len(a)), np.arange(len(b))
    else:
        seqs, in_a, in_b = np.intersect1d(a["seq"], b["seq"], assume_unique=True, return_indices=True)
    out = np.zeros(len(seqs), _MARK)
    out["seq"] = seqs
    out["start"] = np.maximum(a["start"][in_a], b["start"][in_b])
    out["done"] = np.minimum(a["done"][in_a], b["done"][in_b])
    return out


@dataclass(frozen=True, kw_only=True)
class _Bounds:
    """Bounds of the difference of two clocks: at least, or at most, this much at these times."""

    at: Floats
    least: Floats  # -inf where not bounded
    most: Floats

    def join(self, others: Iterable["_Bounds"]) -> "_Bounds":
        """Return all bounds together."""
        every = [self, *others]
        return _Bounds(
            at=np.concatenate([one.at for one in every]),
            least=np.concatenate([one.least for one in every]),
            most=np.concatenate([one.most for one in every]),
        )

    def widen(self, by_ns: float) -> "_Bounds":
        """Return bounds that leave so much more room to both sides."""
        return replace(self, least=self.least - by_ns, most=self.most + by_ns)

    def move(self, by_ns: Floats) -> "_Bounds":
        """Return bounds of the difference and so much more, at each of their times."""
        return replace(self, least=self.least + by_ns, most=self.most + by_ns)

    def thin(self) -> "_Bounds":
        """Return the closest bounds of each stretch of time."""
        if len(self.at) <= 2 * MAX_WINDOWS:
            return self
        edges = np.linspace(self.at.min(), self.at.max(), MAX_WINDOWS + 1)
        window = np.clip(np.searchsorted(edges, self.at, "right") - 1, 0, MAX_WINDOWS - 1)
        chosen = []
        for number in distinct(window).tolist():
            inside = np.flatnonzero(window == number)
            chosen += [inside[np.argmax(self.least[inside])], inside[np.argmin(self.most[inside])]]
        kept = distinct(np.asarray(chosen, np.int64))
        return _Bounds(at=self.at[kept], least=self.least[kept], most=self.most[kept])


def bound_clocks(marks: Marks, reference: str) -> dict[tuple[str, str], _Bounds]:
    """Return the bounds of the offset of the first clock of a pair relative to the second."""
    found: dict[tuple[str, str], list[_Bounds]] = defaultdict(list)
    for by_clock in marks.tables.values():
        if len(by_clock) < 2:
            continue
        base = reference if reference in by_clock else min(by_clock)
        for clock, own in by_clock.items():
            if clock == base:
                continue
            _, mine, theirs = np.intersect1d(own["seq"], by_clock[base]["seq"], assume_unique=True, return_indices=True)
            ours, base_rows = own[mine], by_clock[base][theirs]
            least = np.where(
                (base_rows["start"] >= 0) & (ours["done"] != FAR),
                base_rows["start"] - ours["done"].astype(float),
                -np.inf,
            )
            most = np.where(
                (ours["start"] >= 0) & (base_rows["done"] != FAR),
                base_rows["done"] - ours["start"].astype(float),
                np.inf,
            )
            # By time of the other clock: those of this one are not yet known against it.
            at = np.where(base_rows["start"] >= 0, base_rows["start"], base_rows["done"]).astype(np.float64)
            bounded = (np.isfinite(least) | np.isfinite(most)) & (at < float(FAR))
            found[clock, base].append(_Bounds(at=at[bounded], least=least[bounded], most=most[bounded]).thin())
    return {
        pair: several[0].join(several[1:]).thin() for pair, several in found.items() if sum(len(b.at) for b in several)
    }


def fit_line(bounds: _Bounds, span: tuple[float, float], *, drift: float = 0.0) -> tuple[LinearCorrection, float]:
    """Return the line farthest from all bounds and the room it has to both sides; below 0 where bounds contradict.

    The clocks may wander from a line, by `_wander_ns` within the span of time. The error is how far any line that keeps
    to the bounds so widened is from it within the span, and the wander.

    Parameters:
        bounds: of what to add beyond a drift.
        span: first and last time.
        drift: so much is corrected already; both together are within MAX_DRIFT.
    """
    wander_ns = _wander_ns(span)
    bounds = bounds.widen(wander_ns)
    middle = (span[0] + span[1]) / 2
    finite = np.concatenate((bounds.least[np.isfinite(bounds.least)], bounds.most[np.isfinite(bounds.most)]))
    if not np.isfinite(bounds.least).any() or not np.isfinite(bounds.most).any():
        return LinearCorrection(at_ns=middle, error_ns=np.inf), 0.0
    center = median(finite)
    at, least, most = bounds.at - middle, bounds.least - center, bounds.most - center

    def room(slope: float) -> tuple[float, float]:
        return float((least - slope * at).max()), float((most - slope * at).min())

    def gap(slope: float) -> float:
        low, high = room(slope)
        return high - low

    least_slope, most_slope = -MAX_DRIFT - drift, MAX_DRIFT - drift
    best = _climb(gap, least_slope, most_slope)
    low, high = room(best)
    line = LinearCorrection(at_ns=middle, offset_ns=center + (low + high) / 2, slope=best)
    if high < low:
        return replace(line, error_ns=(low - high) / 2 + wander_ns), (high - low) / 2
    slopes = np.linspace(_edge(gap, best, least_slope), _edge(gap, best, most_slope), 129)
    rooms = np.array([room(slope) for slope in slopes.tolist()])
    ends = np.array(span) - middle
    farthest = rooms[:, :, None] + slopes[:, None, None] * ends - ((low + high) / 2 + best * ends)
    return replace(line, error_ns=float(np.abs(farthest).max()) + wander_ns), (high - low) / 2


def _wander_ns(span: tuple[float, float]) -> float:
    """Return how far a clock whose rate changes slowly is from a line within a span of time."""
    return (span[1] - span[0]) / 2 * WANDER_PPM * 1e-6


def _climb(gap: Callable[[float], float], low: float, high: float) -> float:
    """Return where a concave function is largest."""
    for _ in range(80):
        third = (high - low) / 3
        if gap(low + third) < gap(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def _edge(gap: Callable[[float], float], inside: float, outside: float) -> float:
    """Return how far from `inside` towards `outside` a concave function stays at 0 or above."""
    if gap(outside) >= 0:
        return outside
    for _ in range(60):
        between = (inside + outside) / 2
        if gap(between) >= 0:
            inside = between
        else:
            outside = between
    return inside


def find_measured(clocks: Mapping[str, HostClock]) -> Clocks:
    """Return the clocks as launchers measured them."""
    by_boot = {clock.boot_id: clock for clock in clocks.values()}
    reference = next((boot for boot, clock in by_boot.items() if not clock.points), "")
    return Clocks(reference=reference, measured=by_boot) if reference else Clocks()


def tighten(clocks: Clocks, marks: Marks, spans: Mapping[str, tuple[int, int]]) -> Clocks:
    """Return the clocks corrected by bounds from the records, with their errors.

    Parameters:
        marks: by boot id, on clocks as `clocks` aligns them.
        spans: first and last time of each boot id, likewise.
    """
    reference = clocks.reference or min(spans, default="")
    pairs = bound_clocks(marks, reference)
    lines = {reference: LinearCorrection()}
    contradicted: dict[str, float] = {}
    straight: dict[str, HostClock] = {}
    for boot in spans:
        if boot != reference and boot in clocks.measured:
            lines[boot], corrected = _check(clocks, boot, pairs.get((boot, reference)), spans[boot], contradicted)
            if corrected is not clocks.measured[boot]:
                straight[boot] = corrected
    # From the reference on: hosts that share no operation with it are aligned over hosts that are.
    waiting = dict(pairs)
    reached = True
    while reached:
        reached = False
        for (clock, base), bounds in list(waiting.items()):
            if (clock in lines) != (base in lines):
                line, room = fit_line(bounds, spans.get(base, (bounds.at.min(), bounds.at.max())))
                known, new = (base, clock) if base in lines else (clock, base)
                reached |= np.isfinite(line.error_ns)
                if np.isfinite(line.error_ns):
                    lines[new] = _chain(lines[known], line, reverse=new == base)
                    if room < 0:
                        contradicted[new] = -room
                del waiting[clock, base]
    return replace(
        clocks,
        reference=reference,
        measured={**clocks.measured, **straight},
        corrections={
            boot: line
            for boot, line in lines.items()
            # A smaller correction changes no order worth having: it counts as an error instead.
            if boot in straight or _size(line, spans.get(boot)) >= WORTH_IT_NS
        },
        errors_ns={
            boot: line.error_ns
            + (size if boot not in straight and (size := _size(line, spans.get(boot))) < WORTH_IT_NS else 0)
            for boot, line in lines.items()
        },
        contradicted=contradicted,
    )


def _chain(known: LinearCorrection, step: LinearCorrection, *, reverse: bool) -> LinearCorrection:
    """Return the correction of a clock that is compared with a known one; `reverse`: the known one with it."""
    sign = -1 if reverse else 1
    offset_ns = known.offset_ns + sign * step.offset_ns
    at_ns = step.at_ns + (offset_ns if reverse else known.offset_ns)
    return LinearCorrection(
        at_ns=at_ns,
        offset_ns=offset_ns + known.slope * (at_ns - known.at_ns),
        slope=known.slope + sign * step.slope,
        error_ns=known.error_ns + step.error_ns,
    )


def _check(
    clocks: Clocks, boot: str, bounds: _Bounds | None, span: tuple[float, float], contradicted: dict[str, float]
) -> tuple[LinearCorrection, HostClock]:
    """Return how a measured clock is to be corrected, and on top of which one: of itself, or of itself straightened.

    Between measurements that are off by their errors the clock is a line and what joins them is not: a line can correct
    only what is straight. It is not corrected where the records say no more than the measurements.
    """
    clock = clocks.measured[boot]
    if not clock.points:
        return LinearCorrection(), clock
    times = np.linspace(span[0], span[1], MAX_WINDOWS + 1)
    errors = _errors_at(clock, times)
    as_measured = LinearCorrection(at_ns=(span[0] + span[1]) / 2, error_ns=float(errors.max()))
    if bounds is None:
        return as_measured, clock
    allowed = _errors_at(clock, bounds.at)
    beyond = max(float((bounds.least - allowed).max()), float((-allowed - bounds.most).max()))
    straight = clock.straighten()
    moved = bounds.move(_bend(clock, straight, bounds.at))
    drift = straight.drift_ppm * 1e-6
    if beyond <= 0:
        by_points = _Bounds(at=times, least=-errors, most=errors).move(_bend(clock, straight, times))
        line, room = fit_line(moved.join([by_points]), span, drift=drift)
        return (line, straight) if room >= 0 and line.error_ns < as_measured.error_ns else (as_measured, clock)
    contradicted[boot] = beyond
    alone, room_alone = fit_line(moved, span, drift=drift)
    if room_alone >= 0 and np.isfinite(alone.error_ns):
        return alone, straight
    return replace(as_measured, error_ns=as_measured.error_ns + 2 * beyond), clock


def _errors_at(clock: HostClock, moments: Floats) -> Floats:
    """Return the errors of a clock's measurements at moments of the reference."""
    return np.array([clock.error_at(_own_time(clock, int(t))) for t in moments.tolist()])


def _bend(clock: HostClock, straight: HostClock, moments: Floats) -> Floats:
    """Return how much more a clock corrects than one that was straightened, at moments of the reference."""
    own = [_own_time(clock, int(t)) for t in moments.tolist()]
    return np.array([clock.offset_at(t) - straight.offset_at(t) for t in own])


def _own_time(clock: HostClock, moment: int) -> int:
    """Return the reading of a clock at a moment of the reference."""
    own = moment
    for _ in range(3):
        own = moment - round(clock.offset_at(own))
    return own


def _size(line: LinearCorrection, span: tuple[float, float] | None) -> float:
    """Return how much a correction changes at most."""
    if span is None:
        return abs(line.offset_ns)
    return max(abs(line.offset_ns + slope * (span[1] - span[0])) for slope in (line.slope, -line.slope))


def state_errors(clocks: Clocks, boots: Mapping[int, str]) -> ClockErrors:
    """Return the errors between ranks, given the boot id of each as recorded."""
    known = {boot: i for i, boot in enumerate(sorted(set(boots.values())))}
    clock = np.full(max(boots, default=-1) + 1, -1, np.int64)
    for rank, boot in boots.items():
        clock[rank] = known[boot]
    error_ns = [int(np.ceil(clocks.errors_ns.get(boot, 0.0))) for boot in known]
    return ClockErrors(clock=clock, error_ns=np.array(error_ns, np.int64))


def worst_error_ns(clocks: Clocks, boots: Iterable[str]) -> int | None:
    """Return how far two clocks of the run may be apart; None where one is not aligned."""
    several = set(boots)
    if len(several) == 1:
        return 0
    if not several or not all(boot in clocks.errors_ns for boot in several):
        return None
    return int(np.ceil(sum(sorted(clocks.errors_ns[boot] for boot in several)[-2:])))


def list_clocks(clocks: Clocks, hosts: Mapping[str, str], moment: int) -> tuple[ClockResult, ...]:
    """Return the known facts of the clock of each host, by boot id, at a moment of the reference."""
    found = []
    for boot, host in sorted(hosts.items(), key=lambda item: item[1]):
        measured, line = clocks.measured.get(boot), clocks.corrections.get(boot)
        sources = [
            *(["round trips"] if measured is not None and measured.points else []),
            *(["records"] if line else []),
        ]
        own = np.array([moment], np.int64)
        for _ in range(3):
            own = moment - clocks.offset(boot, own)
        aligned = boot in clocks.errors_ns
        found.append(
            ClockResult(
                host=host,
                offset_ns=moment - int(own[0]) if aligned else None,
                error_ns=int(np.ceil(clocks.errors_ns[boot])) if aligned else None,
                by=" and ".join(sources) if aligned and boot != clocks.reference else None,
            )
        )
    return tuple(found)
