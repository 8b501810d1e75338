"""One rank as tracks of slices and counters, which Perfetto and Chrome show as they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.analysis.results import PARTS, PHASES
from dtprof.analysis.timeline.operation_detail import RankDetail
from dtprof.columns import distinct
from dtprof.formatting import UNKNOWN
from dtprof.intervals import Column, Intervals, Mask
from dtprof.job.axes import purpose_of
from dtprof.records import codes, events
from dtprof.records.tables import UNKNOWN_NS, Array, Group, RankTables, select

OPEN = UNKNOWN_NS
"""The end of a slice that has none: an operation that was not done when the records ended."""
MAX_LANES = 64
STEPS, PARTS_OF_STEPS, PHASES_OF_STEPS = "steps", "parts of the step", "phases"
WINDOWS = "profiler windows"
WRITING = "writing the trace"


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One value of each slice: a number, -1 where it is not known, or the position of a text."""

    name: str
    values: Column
    texts: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class TraceTrack:
    """Slices in order of their begin; those of one track do not overlap once `split_lanes` has seen it."""

    name: str
    begin: Column
    end: Column  # OPEN where there is none
    label: Column  # position in labels
    labels: tuple[str, ...]
    arguments: tuple[Argument, ...] = ()
    flow: Column | None = None  # a number that slices that belong together share; 0: none
    place: Column | None = None  # where in its flow a slice is: detail.FIRST, BETWEEN, LAST
    flow_at_end: bool = False  # what a receive waits for reaches it at its end

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self.begin)

    def rows(self, chosen: npt.NDArray[Any]) -> "TraceTrack":
        """Return some of the slices."""
        return replace(
            self,
            begin=self.begin[chosen],
            end=self.end[chosen],
            label=self.label[chosen],
            arguments=tuple(replace(argument, values=argument.values[chosen]) for argument in self.arguments),
            flow=None if self.flow is None else self.flow[chosen],
            place=None if self.place is None else self.place[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A quantity over time."""

    name: str
    t_ns: Column
    value: Column


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that happened once."""

    t_ns: int
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RankTracks:
    """Everything that is drawn of one rank."""

    rank: int
    pid: int
    name: str
    tracks: tuple[TraceTrack, ...]
    counters: tuple[Counter, ...]
    moments: tuple[Moment, ...]
    first_ns: int
    last_ns: int
    monotonic_to_realtime_ns: int
    left_out: int  # operations that overlapped with MAX_LANES others

    def moved(self, by_ns: int) -> "RankTracks":
        """Return the same on a clock that shows so much more."""
        if not by_ns:
            return self
        tracks = (
            replace(track, begin=track.begin + by_ns, end=np.where(track.end == OPEN, OPEN, track.end + by_ns))
            for track in self.tracks
        )
        return replace(
            self,
            tracks=tuple(tracks),
            counters=tuple(replace(counter, t_ns=counter.t_ns + by_ns) for counter in self.counters),
            moments=tuple(replace(moment, t_ns=moment.t_ns + by_ns) for moment in self.moments),
            first_ns=self.first_ns + by_ns,
            last_ns=self.last_ns + by_ns,
            monotonic_to_realtime_ns=self.monotonic_to_realtime_ns - by_ns,
        )


def build_tracks(rank: RankDetail, *, since_ns: int = 0, until_ns: int | None = None) -> RankTracks:
    """Return the tracks of one rank between two moments, with all of its steps and windows."""
    tables = rank.tables
    drawn = [
        _stretches(PARTS_OF_STEPS, rank.part_stretches, PARTS),
        _stretches(PHASES_OF_STEPS, rank.phase_stretches, PHASES),
        *(_intervals(name, intervals) for name, intervals in rank.user_phases.items()),
        *_actions(tables, rank.spans),
        *_communication(rank),
    ]
    lanes, left_out = [_steps(rank), *split_lanes(_windows(rank))[0]], 0
    for track in drawn:
        inside = track.begin >= since_ns
        if until_ns is not None:
            inside &= track.begin < until_ns
        split, dropped = split_lanes(track if inside.all() else track.rows(inside))
        lanes += split
        left_out += dropped
    return RankTracks(
        rank=tables.rank,
        pid=tables.pid,
        name=name_rank(tables),
        tracks=tuple(lane for lane in lanes if len(lane)),
        counters=tuple(_counters(tables, since_ns, until_ns)),
        moments=tuple(moment for moment in _exceptions(rank) if moment.t_ns >= since_ns),
        first_ns=tables.first_ns,
        last_ns=tables.last_ns,
        monotonic_to_realtime_ns=tables.monotonic_to_realtime_ns,
        left_out=left_out,
    )


def name_rank(tables: RankTables) -> str:
    """Return the rank with its place on each axis, its stages and its host."""
    parts = [f"rank {tables.rank}"]
    parts += [f"{axis} {place}" for axis, place in tables.coordinates.items()]
    stages = sorted({stage for pipeline in tables.pipelines.values() for stage in pipeline.stages})
    if stages:
        parts.append(f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}")
    return " ".join(parts) + (f" ({tables.host})" if tables.host else "")


def name_group(group: Group | None) -> str:
    """Return the best name of a group: its axis, its description in the program, its name."""
    if group is None:
        return "unknown group"
    return purpose_of(group) or f"group {group.name}"


def split_lanes(track: TraceTrack) -> tuple[list[TraceTrack], int]:
    """Return tracks without overlap, and how many slices found no place in MAX_LANES of them."""
    if not len(track):
        return [], 0
    order = np.argsort(track.begin, kind="stable")
    if (np.diff(order) < 0).any():
        track = track.rows(order)
    lane = assign_lanes(track.begin, np.where(track.end == OPEN, np.iinfo(np.int64).max, track.end))
    if not lane.any():
        return [track], 0
    lanes = [track.rows(np.flatnonzero(lane == number)) for number in range(min(MAX_LANES, int(lane.max()) + 1))]
    return lanes, int((lane == MAX_LANES).sum())


def assign_lanes(begin: Column, end: Column) -> Column:
    """Return for each slice, given in order of begin, the first lane that is free; MAX_LANES where none is."""
    lane = np.zeros(len(begin), np.int64)
    reach = np.maximum.accumulate(end)
    alone = np.r_[True, begin[1:] >= reach[:-1]]  # nothing before it reaches here: every lane is free
    starts = np.flatnonzero(alone)
    sizes = np.diff(np.r_[starts, len(begin)])
    for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        free_at: list[int] = []
        begins, ends = begin[start : start + size].tolist(), end[start : start + size].tolist()
        for i, (own_begin, own_end) in enumerate(zip(begins, ends, strict=True)):
            for number, free in enumerate(free_at):
                if free <= own_begin:
                    free_at[number] = own_end
                    lane[start + i] = number
                    break
            else:
                lane[start + i] = min(len(free_at), MAX_LANES)
                if len(free_at) < MAX_LANES:
                    free_at.append(own_end)
    return lane


def _steps(rank: RankDetail) -> TraceTrack:
    numbers, windows = rank.steps.numbers, rank.steps.windows
    used = ((numbers >= rank.measured.first) & (numbers <= rank.measured.last)).astype(np.int64)
    names = tuple(f"step {number}" for number in numbers.tolist())
    return TraceTrack(
        name=STEPS,
        begin=windows[:, 0],
        end=windows[:, 1],
        label=np.arange(len(numbers)),
        labels=names,
        arguments=(
            Argument(name="step", values=numbers),
            Argument(name="used for figures", values=used, texts=("no", "yes")),
        ),
    )


def _windows(rank: RankDetail) -> TraceTrack:
    """Return the windows of torch.profiler, and after each the time in which the rank wrote its trace."""
    known = [window for window in rank.tables.windows if window.begin_ns != UNKNOWN_NS]
    times = np.array([(window.begin_ns, window.end_ns, window.ready_ns) for window in known], np.int64).reshape(-1, 3)
    began, ended, ready = rank.on_clock_of_run(times).T
    written = np.flatnonzero((ended != UNKNOWN_NS) & (ready != UNKNOWN_NS))
    of = np.concatenate((np.arange(len(known)), written))
    return TraceTrack(
        name=WINDOWS,
        begin=np.concatenate((began, ended[written])),
        end=np.concatenate((ended, ready[written])),
        label=np.concatenate((np.arange(len(known)), np.full(len(written), len(known)))),
        labels=(*(f"steps {window.first} to {window.last}" for window in known), WRITING),
        arguments=(
            Argument(name="state", values=of, texts=tuple(": ".join(filter(None, (w.state, w.reason))) for w in known)),
            Argument(name="file", values=of, texts=tuple(window.file or UNKNOWN for window in known)),
        ),
    )


def _exceptions(rank: RankDetail) -> Iterator[Moment]:
    errors = rank.tables.exceptions
    times = np.array([error.t_ns for error in errors], np.int64)
    for t_ns, error in zip(rank.on_clock_of_run(times).tolist(), errors, strict=True):
        yield Moment(t_ns=t_ns, name=error.type, text=error.message)


def _stretches(name: str, stretches: tuple[Intervals, Column], labels: Sequence[str]) -> TraceTrack:
    times, label = stretches
    return TraceTrack(name=name, begin=times[:, 0], end=times[:, 1], label=label, labels=tuple(labels))


def _intervals(name: str, times: Intervals) -> TraceTrack:
    return TraceTrack(
        name=name, begin=times[:, 0], end=times[:, 1], label=np.zeros(len(times), np.int64), labels=(name,)
    )


def _actions(tables: RankTables, spans: Array) -> list[TraceTrack]:
    """Return the actions of each stage of a pipeline."""
    names = {number: name for number, name in enumerate(tables.ops) if name in set(events.PIPELINE_KINDS.values())}
    names |= {number: name for number, name in enumerate(tables.ops) if name == events.PP_LOSS}
    chosen = select(spans, np.isin(spans["op"], list(names)) & (spans["stage"] >= 0))
    tracks = []
    for stage in distinct(chosen["stage"]).tolist():
        acts = select(chosen, chosen["stage"] == stage)
        known = sorted(names)
        tracks.append(
            TraceTrack(
                name=f"stage {stage}",
                begin=acts["begin_ns"].astype(np.int64),
                end=acts["end_ns"].astype(np.int64),
                label=np.searchsorted(known, acts["op"]),
                labels=tuple(names[number].removeprefix("pp_").replace("_", " ") for number in known),
                arguments=(
                    Argument(name="microbatch", values=acts["microbatch"].astype(np.int64)),
                    Argument(name="step", values=acts["step"].astype(np.int64)),
                ),
            )
        )
    return tracks


def _communication(rank: RankDetail) -> list[TraceTrack]:
    """Return the operations of each group: collectives, sends and receives apart."""
    rows = rank.operations
    names = (*rank.tables.ops, "?")
    op = np.minimum(rows["op"], len(rank.tables.ops)).astype(np.int64)
    tracks = []
    for number in distinct(rows["group"]).tolist():
        group = rank.tables.groups.get(number)
        of_group = rows["group"] == number
        is_p2p = rows["kind"] == codes.POINT_TO_POINT
        for is_message in (False, True):
            for own_op in distinct(op[of_group & is_p2p]).tolist() if is_message else (None,):
                chosen = of_group & is_p2p & (op == own_op) if is_message else of_group & ~is_p2p
                if not chosen.any():
                    continue
                what = f" {names[own_op]}" if own_op is not None else ""
                tracks.append(_operations(rank, chosen, f"{name_group(group)}{what}", op, names, what == " recv"))
    return tracks


def _operations(
    rank: RankDetail, chosen: Mask, name: str, op: Column, names: tuple[str, ...], is_receive: bool
) -> TraceTrack:
    at = np.flatnonzero(chosen)
    rows = select(rank.operations, at)
    timing, tables = rank.timing, rank.tables
    duration, wait = timing.duration[at], timing.wait[at]
    transfer = np.where((duration != UNKNOWN_NS) & (wait != UNKNOWN_NS), duration - wait, -1)
    exposed = np.where(rank.blocked.known[at], timing.exposed_wait[at] + timing.exposed_transfer[at], -1)
    group = tables.groups.get(int(rows["group"][0]))
    members = group.ranks if group is not None else ()
    peer = rows["peer"].astype(np.int64)
    if members:
        peer = np.where((peer >= 0) & (peer < len(members)), np.array(members)[np.clip(peer, 0, len(members) - 1)], -1)
    site, where = np.unique(rows["site"], return_inverse=True)
    known = [tables.sites.get(number) for number in site.tolist()]
    lines = tuple(f"{site.file}:{site.line} in {site.function}" if site is not None else "not known" for site in known)
    labels = tuple(site.label.text if site is not None and site.label is not None else "-" for site in known)
    text = f"{group.name} ({group.description})" if group is not None and group.description else name
    arguments = [
        Argument(name="group", values=np.zeros(len(at), np.int64), texts=(text,)),
        Argument(name="position", values=rows["seq"].astype(np.int64)),
        Argument(name="step", values=rows["step"].astype(np.int64) + 1),
        Argument(name="bytes", values=rows["nbytes"].astype(np.int64)),
        Argument(name="wait_ns", values=wait),
        Argument(name="transfer_ns", values=transfer),
        Argument(name="exposed_ns", values=exposed),
        Argument(name="line", values=where.reshape(-1), texts=lines),
    ]
    if (peer >= 0).any():
        arguments.append(Argument(name="peer", values=peer))
    if any(label != "-" for label in labels):
        arguments.append(Argument(name="on behalf of", values=where.reshape(-1), texts=labels))
    ended = np.where(duration != UNKNOWN_NS, rows["done_ns"], OPEN)
    given_up = (rows["state"] == codes.FAILED) | ((rows["flags"] & codes.COMPLETION_SEEN) == 0)
    returned = np.where(rows["returned_ns"] == UNKNOWN_NS, rows["issued_ns"], rows["returned_ns"])
    return TraceTrack(
        name=name,
        begin=rows["issued_ns"].astype(np.int64),
        end=np.where((ended == OPEN) & given_up, returned, ended).astype(np.int64),
        label=op[at],
        labels=names,
        arguments=tuple(arguments),
        flow=rank.instance[at],
        place=rank.arrived[at],
        flow_at_end=is_receive,
    )


def _counters(tables: RankTables, since_ns: int, until_ns: int | None) -> list[Counter]:
    samples = tables.samples
    inside = samples["t_ns"] >= since_ns
    if until_ns is not None:
        inside &= samples["t_ns"] < until_ns
    counters = []
    for op in distinct(samples["op"][inside]).tolist():
        if op < len(tables.ops) and tables.ops[op].endswith("_bytes"):
            of_quantity = inside & (samples["op"] == op)
            counters.append(
                Counter(
                    name=events.memory_label(tables.ops[op]),
                    t_ns=samples["t_ns"][of_quantity].astype(np.int64),
                    value=samples["value"][of_quantity].astype(np.int64),
                )
            )
    return counters
