"""Chrome's trace events as gzipped JSON, for chrome://tracing and whatever reads that format.

Times are in us since the first event of the run, with three decimals: every ns is there.
"""

import gzip
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.analysis.detail import BETWEEN, FIRST, RankDetail, RunDetail, map_ranks
from dtprof.analysis.execution import THIS_PROCESS, Executor
from dtprof.analysis.intervals import Column
from dtprof.export.tracks import OPEN, Argument, Counter, RankTracks, Track, build_tracks
from dtprof.export.windows import Window, choose_window

MAX_EVENTS = 400_000
"""More than this its viewers do not open in a tolerable time."""
COMPRESSION = 1


def write_chrome(
    run: RunDetail, path: Path, *, steps: tuple[int, int] | None = None, executor: Executor = THIS_PROCESS
) -> list[str]:
    """Write the file; return what the reader should know: what was left out."""
    window = choose_window(run, steps=steps, max_events=MAX_EVENTS)
    left_out = 0
    origin = run.first_ns
    head = {"displayTimeUnit": "ms", "otherData": {"written by": "dtprof", "origin_ns": origin}}
    with gzip.open(path, "wb", compresslevel=COMPRESSION) as file:
        file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
        separator = b""
        for events, dropped in map_ranks(run, partial(_list_events, window, origin), executor):
            left_out += dropped
            file.write(separator)
            file.write(events)
            separator = b",\n"
        file.write(b"\n]}\n")
    return window.describe(left_out)


def _list_events(window: Window, origin: int, rank: RankDetail) -> tuple[bytes, int]:
    """Return the events of one rank as text, and how many operations found no place."""
    since, until = window.bounds(rank)
    tracks = build_tracks(rank, since_ns=since, until_ns=until)
    return ",\n".join(line for lines in _rank_events(tracks, origin) for line in lines).encode(), tracks.left_out


def _rank_events(rank: RankTracks, origin: int) -> Iterator[list[str]]:
    pid = rank.rank
    yield [
        _metadata("process_name", pid, 0, name=rank.name),
        _metadata("process_sort_index", pid, 0, sort_index=rank.rank),
    ]
    for tid, track in enumerate(rank.tracks, 1):
        yield [
            _metadata("thread_name", pid, tid, name=track.name),
            _metadata("thread_sort_index", pid, tid, sort_index=tid),
        ]
        yield slice_events(track, pid, tid, origin, rank.last_ns)
        if track.flow is not None and (track.flow > 0).any():
            yield _flow_events(track, pid, tid, origin, rank.last_ns)
    for counter in rank.counters:
        yield _counter_events(counter, pid, origin)
    for moment in rank.moments:
        event = {"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": moment.name, "args": {"message": moment.text}}
        yield [json.dumps(event | {"ts": (moment.t_ns - origin) / 1000})]


def _metadata(kind: str, pid: int, tid: int, **arguments: object) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments})


def slice_events(track: Track, pid: int, tid: int, origin: int, last_ns: int) -> list[str]:
    """Return the slices of a track, one JSON object each; one that has no end lasts to the end of the records."""
    arguments = ", ".join(f"{_in_template(json.dumps(one.name))}: %s" for one in track.arguments)
    open_ended = ', "not done": true' if arguments else '"not done": true'
    template = (
        f'{{"ph": "X", "pid": {pid}, "tid": {tid}, "name": %s, "ts": %.3f, "dur": %.3f, "args": {{{arguments}%s}}}}'
    )
    is_open = track.end == OPEN
    end = np.where(is_open, np.maximum(last_ns, track.begin), track.end)
    labels = [json.dumps(label) for label in track.labels]
    columns = [
        [labels[label] for label in track.label.tolist()],
        _microseconds(track.begin - origin),
        _microseconds(end - track.begin),
        *(_values(one) for one in track.arguments),
        [open_ended if one else "" for one in is_open.tolist()],
    ]
    return [template % row for row in zip(*columns, strict=True)]


def _flow_events(track: Track, pid: int, tid: int, origin: int, last_ns: int) -> list[str]:
    """Return what joins slices: begin of the first to arrive, begin of the next, end of the last."""
    if track.flow is None or track.place is None:
        return []
    rows = np.flatnonzero(track.flow > 0)
    place = track.place[rows]
    end = np.where(track.end[rows] == OPEN, last_ns, track.end[rows])
    at = np.where((place == FIRST) | (place == BETWEEN), track.begin[rows], np.maximum(track.begin[rows], end - 1))
    phases = ('"s"', '"t"', '"f", "bp": "e"')
    template = f'{{"ph": %s, "pid": {pid}, "tid": {tid}, "cat": "met", "name": "met", "id": %d, "ts": %.3f}}'
    columns = [[phases[one] for one in place.tolist()], track.flow[rows].tolist(), _microseconds(at - origin)]
    return [template % row for row in zip(*columns, strict=True)]


def _counter_events(counter: Counter, pid: int, origin: int) -> list[str]:
    template = (
        f'{{"ph": "C", "pid": {pid}, "tid": 0, "name": {_in_template(json.dumps(counter.name))}, '
        '"ts": %.3f, "args": {"bytes": %d}}'
    )
    return [template % row for row in zip(_microseconds(counter.t_ns - origin), counter.value.tolist(), strict=True)]


def _values(argument: Argument) -> list[Any]:
    if argument.texts is not None:
        texts = [json.dumps(text) for text in argument.texts]
        return [texts[position] for position in argument.values.tolist()]
    values: list[Any] = argument.values.tolist()
    return values if not len(values) or min(values) >= 0 else [value if value >= 0 else "null" for value in values]


def _microseconds(times: Column) -> list[float]:
    result: list[float] = (times / 1000).tolist()
    return result


def _in_template(text: str) -> str:
    return text.replace("%", "%%")
