"""Chrome's trace events as gzipped JSON, for chrome://tracing and whatever reads that format.

Times are in us since the first event of the run, with three decimals: every ns is there.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from dtprof.analysis.timeline.operation_detail import BETWEEN, FIRST, RankDetail, RunDetail, map_ranks
from dtprof.interchange.exporters.exported_steps import StepWindow, choose_window
from dtprof.interchange.exporters.gzip_parts import Part, pack, write_parts
from dtprof.interchange.exporters.json_rows import SEPARATOR, Choice, Whole, join_rows, microseconds
from dtprof.interchange.exporters.protobuf_wire import Piece
from dtprof.interchange.exporters.trace_tracks import OPEN, Argument, Counter, RankTracks, TraceTrack, build_tracks
from dtprof.job.rank_executor import THIS_PROCESS, Executor

MAX_EVENTS = 400_000
"""More than this its viewers do not open in a tolerable time."""


def write_chrome(
    run: RunDetail, path: Path, *, steps: tuple[int, int] | None = None, executor: Executor = THIS_PROCESS
) -> list[str]:
    """Write the file; return remarks on omitted events."""
    window = choose_window(run, steps=steps, max_events=MAX_EVENTS)
    origin, left_out = run.first_ns, 0
    head = {"displayTimeUnit": "ms", "otherData": {"written by": "dtprof", "origin_ns": origin}}

    def parts() -> Iterator[Part]:
        nonlocal left_out
        before = json.dumps(head)[:-1].encode() + b', "traceEvents": [\n'
        for events, dropped in map_ranks(run, partial(_list_events, window, origin), executor):
            left_out += dropped
            yield pack([before])
            yield events
            before = SEPARATOR
        yield pack([b"\n]}\n" if before == SEPARATOR else before + b"\n]}\n"])

    write_parts(parts(), path)
    return window.describe(left_out)


def _list_events(window: StepWindow, origin: int, rank: RankDetail) -> tuple[Part, int]:
    """Return the events of one rank, and how many operations found no place."""
    since, until = window.bounds(rank)
    tracks = build_tracks(rank, since_ns=since, until_ns=until)
    return pack(_rank_events(tracks, origin)), tracks.left_out


def _rank_events(rank: RankTracks, origin: int) -> Iterator[bytes]:
    pid = rank.rank
    yield _metadata("process_name", pid, 0, name=rank.name)
    yield SEPARATOR + _metadata("process_sort_index", pid, 0, sort_index=rank.rank)
    for tid, track in enumerate(rank.tracks, 1):
        yield SEPARATOR + _metadata("thread_name", pid, tid, name=track.name)
        yield SEPARATOR + _metadata("thread_sort_index", pid, tid, sort_index=tid)
        yield from _slice_events(track, pid, tid, origin, rank.last_ns)
        yield from _flow_events(track, pid, tid, origin, rank.last_ns)
    for counter in rank.counters:
        yield from _counter_events(counter, pid, origin)
    for moment in rank.moments:
        event = {"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": moment.name, "args": {"message": moment.text}}
        yield SEPARATOR + _dump(event | {"ts": (moment.t_ns - origin) / 1000})


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> bytes:
    return _dump({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments})


def _slice_events(track: TraceTrack, pid: int, tid: int, origin: int, last_ns: int) -> Iterator[bytes]:
    """Yield the slices of a track; one that has no end lasts to the end of the records."""
    is_open = track.end == OPEN
    end = np.where(is_open, np.maximum(last_ns, track.begin), track.end)
    pieces: list[Piece | bytes] = [
        SEPARATOR + b'{"ph": "X", "pid": %d, "tid": %d, "name": ' % (pid, tid),
        Choice(position=track.label, texts=[_dump(label) for label in track.labels]),
        b', "ts": ',
        microseconds(track.begin - origin),
        b', "dur": ',
        microseconds(end - track.begin),
        b', "args": {',
    ]
    for place, argument in enumerate(track.arguments):
        pieces += [(b", " if place else b"") + _dump(argument.name) + b": ", _values(argument)]
    not_done = b', "not done": true' if track.arguments else b'"not done": true'
    pieces += [Choice(position=is_open.astype(np.int64), texts=[b"", not_done]), b"}}"]
    yield from join_rows(pieces, len(track))


def _flow_events(track: TraceTrack, pid: int, tid: int, origin: int, last_ns: int) -> Iterator[bytes]:
    """Yield the flow events between slices: begin of the first to arrive, begin of the next, end of the last."""
    if track.flow is None or track.place is None:
        return
    rows = np.flatnonzero(track.flow > 0)
    place = track.place[rows]
    end = np.where(track.end[rows] == OPEN, last_ns, track.end[rows])
    at = np.where((place == FIRST) | (place == BETWEEN), track.begin[rows], np.maximum(track.begin[rows], end - 1))
    pieces: list[Piece | bytes] = [
        SEPARATOR + b'{"ph": ',
        Choice(position=place, texts=[b'"s"', b'"t"', b'"f", "bp": "e"']),
        b', "pid": %d, "tid": %d, "cat": "met", "name": "met", "id": ' % (pid, tid),
        Whole(values=track.flow[rows]),
        b', "ts": ',
        microseconds(at - origin),
        b"}",
    ]
    yield from join_rows(pieces, len(rows))


def _counter_events(counter: Counter, pid: int, origin: int) -> Iterator[bytes]:
    pieces: list[Piece | bytes] = [
        SEPARATOR + b'{"ph": "C", "pid": %d, "tid": 0, "name": ' % pid + _dump(counter.name) + b', "ts": ',
        microseconds(counter.t_ns - origin),
        b', "args": {"bytes": ',
        Whole(values=counter.value),
        b"}}",
    ]
    yield from join_rows(pieces, len(counter.t_ns))


def _values(argument: Argument) -> Piece:
    if argument.texts is not None:
        return Choice(position=argument.values, texts=[_dump(text) for text in argument.texts])
    return Whole(values=argument.values)


def _dump(content: object) -> bytes:
    return json.dumps(content).encode()
