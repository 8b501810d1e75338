"""Perfetto's own format: track events, all ranks on one clock, in one .pftrace file.

A rank is a process; tracks lie under it. Operations that met are joined by flows. Packets of one track follow one
another in time, the end of a slice before the next begin, so that nothing depends on how readers sort equal times.
Field numbers are those of protos/perfetto/trace/perfetto_trace.proto; a test reads the file back with Perfetto's own.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from dtprof.analysis.timeline.operation_detail import RankDetail, RunDetail, map_ranks
from dtprof.formatting import UNKNOWN
from dtprof.interchange.exporters.exported_steps import StepWindow, choose_window
from dtprof.interchange.exporters.protobuf_wire import (
    KnownOr,
    Pieces,
    fill_all,
    fixed64,
    message,
    number,
    one_message,
    one_number,
    one_text,
    size_of,
    width_of,
)
from dtprof.interchange.exporters.trace_tracks import (
    OPEN,
    Argument,
    Counter,
    Moment,
    RankTracks,
    TraceTrack,
    build_tracks,
)
from dtprof.job.rank_executor import THIS_PROCESS, Executor

MAX_BYTES = 500_000_000
BYTES_AN_EVENT = 250
"""Upper bound of the bytes of an event: an operation with all known facts takes 150 to 230."""
MAX_EVENTS = MAX_BYTES // BYTES_AN_EVENT
PACKET = 1
TIMESTAMP, SEQUENCE, TRACK_EVENT, INTERNED, SEQUENCE_FLAGS, DESCRIPTOR, CLOCKS = 8, 10, 11, 12, 13, 60, 6
TYPE, TRACK, NAME, FLOW, ANNOTATION, COUNTER_VALUE = 9, 11, 10, 47, 4, 30
BEGIN, END, INSTANT, COUNT = 1, 2, 3, 4
CLEARED, NEEDED = 1, 2
BOOTTIME, REALTIME = 6, 1
EXPLICIT_ORDER = 3
SIZE_BYTES = 3
UUIDS_A_RANK = 1 << 16
NOBODY = 1 << 62
"""Numbers of flows from here on join an operation to nothing."""


@dataclass(kw_only=True)
class _Texts:
    """Texts of one sequence of packets by number, from 1."""

    events: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)

    def packet(self, sequence: int) -> bytes:
        """Return the packet that interns all texts."""
        entries = [
            one_message(kind, one_number(1, iid), one_text(2, text))
            for kind, texts in ((2, self.events), (3, self.names), (29, self.values))
            for text, iid in texts.items()
        ]
        return one_message(
            PACKET,
            one_number(SEQUENCE, sequence),
            one_number(SEQUENCE_FLAGS, CLEARED | NEEDED),
            one_message(INTERNED, *entries),
        )


def write_perfetto(
    run: RunDetail, path: Path, *, steps: tuple[int, int] | None = None, executor: Executor = THIS_PROCESS
) -> list[str]:
    """Write the file; return remarks on omitted events."""
    window = choose_window(run, steps=steps, max_events=MAX_EVENTS)
    left_out = 0
    with path.open("wb") as file:
        for packets, dropped in map_ranks(run, partial(_encode, window), executor):
            file.write(packets)
            left_out += dropped
    return window.describe(left_out)


def _encode(window: StepWindow, rank: RankDetail) -> tuple[bytearray, int]:
    """Return the packets of one rank, and the number of operations that found no track."""
    since, until = window.bounds(rank)
    tracks = build_tracks(rank, since_ns=since, until_ns=until)
    return rank_packets(tracks), tracks.left_out


def rank_packets(rank: RankTracks, *, has_clocks: bool = True) -> bytearray:
    """Return the packets of one rank.

    Parameters:
        has_clocks: say in it what the wall clock showed; else a manifest says how its clock relates to others.
    """
    sequence, uuid = rank.rank + 1, (rank.rank + 1) * UUIDS_A_RANK
    texts = _Texts()
    shapes: list[tuple[Pieces, int]] = []
    descriptors = [_describe_process(rank, uuid)]
    following = uuid + 1
    for order, track in enumerate(rank.tracks):
        descriptors.append(_describe(following, uuid, track.name, order))
        shapes += _slices(track, following, sequence, texts)
        following += 1
    for order, counter in enumerate(rank.counters, len(rank.tracks)):
        descriptors.append(_describe(following, uuid, counter.name, order, one_message(8, one_number(3, SIZE_BYTES))))
        shapes.append((_values(counter, following, sequence), len(counter.t_ns)))
        following += 1
    parts = [_clocks(rank, sequence)] if has_clocks else []
    parts += [one_message(PACKET, one_number(SEQUENCE, sequence), descriptor) for descriptor in descriptors]
    head = b"".join((*parts, texts.packet(sequence)))
    tail = b"".join(_moment(moment, uuid, sequence) for moment in rank.moments)
    packets = bytearray(len(head) + sum(size_of(pieces) * count for pieces, count in shapes) + len(tail))
    packets[: len(head)] = head
    rows, begin = np.frombuffer(packets, np.uint8), len(head)
    for pieces, count in shapes:
        end = begin + size_of(pieces) * count
        fill_all(rows[begin:end].reshape(count, -1), pieces)
        begin = end
    packets[begin:] = tail
    return packets


def _describe_process(rank: RankTracks, uuid: int) -> bytes:
    # Process ids of several hosts may be the same, and Perfetto joins what has one: the rank stands for it.
    process = one_message(3, one_number(1, rank.rank + 1), one_text(6, rank.name), one_number(3, rank.rank))
    name = one_text(2, f"{rank.name}, process {rank.pid}")
    return one_message(DESCRIPTOR, one_number(1, uuid), name, process, one_number(11, EXPLICIT_ORDER))


def _describe(uuid: int, parent: int, name: str, order: int, *more: bytes) -> bytes:
    return one_message(
        DESCRIPTOR, one_number(1, uuid), one_number(5, parent), one_text(2, name), one_number(12, order), *more
    )


def _clocks(rank: RankTracks, sequence: int) -> bytes:
    wall = rank.first_ns + rank.monotonic_to_realtime_ns
    clocks = [
        one_message(1, one_number(1, BOOTTIME), one_number(2, rank.first_ns)),
        one_message(1, one_number(1, REALTIME), one_number(2, wall)),
    ]
    return one_message(
        PACKET, one_number(TIMESTAMP, rank.first_ns), one_number(SEQUENCE, sequence), one_message(CLOCKS, *clocks)
    )


def _slices(track: TraceTrack, uuid: int, sequence: int, texts: _Texts) -> list[tuple[Pieces, int]]:
    """Return the shapes of a track: begin and end of each slice together, then begins that have no end."""
    closed = np.flatnonzero(track.end != OPEN)
    shapes = []
    for rows, has_end in ((closed, True), (np.flatnonzero(track.end == OPEN), False)):
        if not len(rows):
            continue
        part = track.rows(rows)
        iids = np.array([texts.events.setdefault(label, len(texts.events) + 1) for label in part.labels])
        event = [one_number(TYPE, BEGIN) + one_number(TRACK, uuid), *number(NAME, iids[part.label])]
        ending: Pieces = [one_number(TYPE, END) + one_number(TRACK, uuid)]
        if part.flow is not None:
            alone = NOBODY + uuid * (1 << 32) + np.arange(len(rows))
            flow = fixed64(FLOW, np.where(part.flow > 0, part.flow, alone))
            if part.flow_at_end and has_end:
                ending += flow
            else:
                event += flow
        for argument in part.arguments:
            event += message(ANNOTATION, _annotation(argument, texts))
        pieces = _packet(part.begin, event, sequence)
        if has_end:
            pieces += _packet(part.end, ending, sequence)
        shapes.append((pieces, len(rows)))
    return shapes


def _annotation(argument: Argument, texts: _Texts) -> Pieces:
    name = one_number(1, texts.names.setdefault(argument.name, len(texts.names) + 1))
    if argument.texts is not None:
        iids = np.array([texts.values.setdefault(text, len(texts.values) + 1) for text in argument.texts])
        return [name, *number(17, iids[argument.values])]
    if not len(argument.values) or int(argument.values.min()) >= 0:
        return [name, *number(4, argument.values)]
    unknown = one_number(17, texts.values.setdefault(UNKNOWN, len(texts.values) + 1))
    size = 1 + width_of(argument.values, least=len(unknown) - 1)
    return [name, KnownOr(known=4, values=argument.values, otherwise=unknown, size=size)]


def _values(counter: Counter, uuid: int, sequence: int) -> Pieces:
    event: Pieces = [one_number(TYPE, COUNT) + one_number(TRACK, uuid), *number(COUNTER_VALUE, counter.value)]
    return _packet(counter.t_ns, event, sequence)


def _packet(times: np.ndarray[tuple[int], np.dtype[np.int64]], event: Pieces, sequence: int) -> Pieces:
    head = one_number(SEQUENCE, sequence) + one_number(SEQUENCE_FLAGS, NEEDED)
    return message(PACKET, [head, *number(TIMESTAMP, times), *message(TRACK_EVENT, event)])


def _moment(moment: Moment, uuid: int, sequence: int) -> bytes:
    event = one_message(
        TRACK_EVENT,
        one_number(TYPE, INSTANT),
        one_number(TRACK, uuid),
        one_text(23, moment.name),
        one_message(ANNOTATION, one_text(10, "message"), one_text(6, moment.text)),
    )
    return one_message(PACKET, one_number(TIMESTAMP, moment.t_ns), one_number(SEQUENCE, sequence), event)
