"""The strings file of a rank: names, call sites, groups and other entries that are written once, one a line.

Part of the reader. `Strings` takes entries one by one, so that a follower can read a growing file.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from dtprof.records import events, paths, schema, tables
from dtprof.records.axis_names import KNOWN_AXES, axis_of, canonical_axis
from dtprof.records.rank_log.crash_stacks import qualify_names, read_crash
from dtprof.records.rank_log.group_members import share, share_range
from dtprof.records.sites import Label, Site
from dtprof.records.tables import UNKNOWN_NS, Group

Row = dict[str, Any]
Entry = TypeVar("Entry")
MAX_MEMBERS = 1 << 20
"""Members that a group can have."""
ENTRY_ERRORS = (KeyError, TypeError, ValueError, OverflowError)
_CALLS_COMPILED = "DisableContext.__call__.<locals>._fn"
"""The function that torch.compile inserts where rewritten code calls one of its graphs."""
_COMPILED_GRAPH = "compiled graph"
_MOST_KNOWN, _MOST_KNOWN_BYTES = 4096, 512
"""Limits of the cache of decoded lines, in lines and in bytes a line: all ranks write the same operations and sites."""
_known: dict[bytes, Row] = {}
_ACTION = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})", re.ASCII)


class Strings:
    """The entries of a strings file, by kind."""

    def __init__(self) -> None:
        """Start empty."""
        self.process: dict[str, Any] = {}
        self.ops: list[str] = []
        self.frames: dict[int, Site] = {}
        self.sites: dict[int, Site] = {}
        self.labels: dict[int, Label] = {}
        self.groups: dict[int, Group] = {}
        self.has_crowd = False  # groups beyond the last id share it
        self.axes: dict[str, str] = {}
        self.first_rank = 0
        """The number of rank 0 of this replica."""
        self.meshes: list[tables.Mesh] = []
        self.shardings: list[tables.Sharding] = []
        self.pipelines: dict[int, tables.Pipeline] = {}
        self.bucket_layouts: list[tables.BucketLayout] = []
        self.threads: dict[int, str] = {}
        self.native_threads: dict[int, int] = {}
        self.thread_starts: dict[int, Site] = {}
        """By the native id of a thread: the line of the user's code that started it."""
        self.streams: dict[int, str] = {}
        self.device_uuid = ""
        self.sizes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.features: list[str] = []
        self.exceptions: list[tables.ExceptionRecord] = []
        self.thread_exceptions: list[tables.ThreadException] = []
        self.out_of_memory: list[tables.OutOfMemory] = []
        self.early_uses: dict[int, tuple[tables.EarlyUse, int]] = {}  # and the id of the group
        self.wrapped_parameters: list[tables.WrappedParameters] = []
        self.optimizer_ages: list[tables.OptimizerAge] = []
        self.crash: tables.CrashStack | None = None
        self.windows: dict[int, tables.Window] = {}
        self.snapshots: list[tables.Snapshot] = []
        self.notes: list[str] = []
        self.ended_ns = UNKNOWN_NS
        self.last_ns = 0

    def take(self, row: Row) -> None:
        """Add an entry.

        Raises:
            ENTRY_ERRORS: it is invalid.
        """
        self.last_ns = max(self.last_ns, int_or_0(row.get("t_ns")))
        read = READERS.get(row.get("k", ""))
        if read is not None:  # a later version of the format may have more kinds
            read(self, row)

    def _take_process(self, row: Row) -> None:
        self.process = row

    def _take_op(self, row: Row) -> None:
        position = int(row["id"])
        if not 0 <= position <= schema.MAX_TABLE_ENTRIES:
            raise ValueError(position)
        self.ops += ["?"] * (position + 1 - len(self.ops))
        self.ops[position] = str(row["name"])

    def _take_site(self, row: Row) -> None:
        self.sites[int(row["id"])] = self._labelled_site(row) if "of" in row else _site(row, self.frames)

    def _take_axis(self, row: Row) -> None:
        self.axes.setdefault(str(row["group"]), str(row["axis"]))

    def _take_thread(self, row: Row) -> None:
        self.threads[int(row["id"])] = str(row["name"])
        self.native_threads[int(row["id"])] = int_or_0(row.get("native_id"))

    def _take_thread_start(self, row: Row) -> None:
        self.thread_starts[int(row["native_id"])] = _site(row)

    def _take_device(self, row: Row) -> None:
        self.device_uuid = str(row.get("uuid") or "")

    def _take_exit(self, row: Row) -> None:
        self.ended_ns = int_or_0(row.get("t_ns"))

    def _labelled_site(self, row: Row) -> Site:
        plain = self.sites.get(int(row["of"]), Site(file="", line=0, function=""))
        return dataclasses.replace(plain, label=self.labels[int(row["label"])])

    def groups_with_axes(self) -> dict[int, Group]:
        """Return the groups with their axes, by the mesh dimension, the user or the description of the group.

        Several dimensions may have one group, as "world" and "tp" where all ranks are tensor-parallel: then one whose
        name says what it is for, else the use of the group, counts. Flattened dimensions come last of either kind.
        """
        named: dict[str, str] = {}
        unclear: dict[str, str] = {}
        for mesh in sorted(self.meshes, key=lambda mesh: mesh.flattened):
            for dimension, name in zip(mesh.names, mesh.groups, strict=False):
                served = canonical_axis(dimension)
                (named if served in KNOWN_AXES else unclear).setdefault(name, served)
        axes = unclear | self.axes | named
        groups = dict(self.groups)
        if self.has_crowd:
            del groups[schema.MAX_TABLE_ENTRIES]
        if self.first_rank:
            for number, group in groups.items():
                members = share(rank + self.first_rank for rank in group.ranks)
                groups[number] = dataclasses.replace(group, ranks=members)
        for number, group in groups.items():
            if axis := axes.get(group.name) or axis_of(group.description):
                groups[number] = dataclasses.replace(group, axis=axis)
        return groups

    def _take_early_use(self, row: Row) -> None:
        number = int(row["id"])
        if "waited" in row:
            use, group = self.early_uses[number]
            self.early_uses[number] = dataclasses.replace(use, waited=bool(row["waited"])), group
            return
        op = int(row["op"])
        use = tables.EarlyUse(
            t_ns=int_or_0(row.get("t_ns")),
            use=str(row["use"]),
            by=str(row["by"]),
            used=self.sites.get(int(row["used"])),
            op=events.canonical_op(self.ops[op]) if 0 <= op < len(self.ops) else "?",
            group=None,
            seq=int(row["seq"]),
            site=self.sites.get(int(row["site"])),
            step=int(row["step"]),
            dropped=bool(row["dropped"]),
        )
        self.early_uses[number] = use, int(row["group"])

    def canonical_ops(self) -> tuple[str, ...]:
        """Return the names of operations and spans, by id, as rules and figures know them."""
        return tuple(events.canonical_op(name) if name not in events.PHASES else name for name in self.ops)

    def _take_group(self, row: Row) -> None:
        known = self.groups.get(int(row["id"]))
        self.has_crowd |= known is not None and int(row["id"]) == schema.MAX_TABLE_ENTRIES and known.name != row["name"]
        ranks = _members(row) or (known.ranks if known else ())
        self.groups[int(row["id"])] = Group(
            name=str(row["name"]),
            description=str(row.get("description", known.description if known else "")),
            size=int_or_0(row.get("size", known.size if known else len(ranks))),
            ranks=ranks,
            backend=row.get("backend", known.backend if known else None),
            timeout_s=row.get("timeout_s", known.timeout_s if known else None),
        )


_Reader = Callable[[Strings, Row], None]


def _by_id(table: Callable[[Strings], dict[int, Entry]], parse: Callable[[Row], Entry]) -> _Reader:
    def read(strings: Strings, row: Row) -> None:
        table(strings)[int(row["id"])] = parse(row)

    return read


def _in_order(entries: Callable[[Strings], list[Entry]], parse: Callable[[Row], Entry]) -> _Reader:
    return lambda strings, row: entries(strings).append(parse(row))


def names_in_tables(strings: Strings) -> dict[str, Any]:
    """Return the fields of a RankTables that come from the strings file."""
    groups = strings.groups_with_axes()
    return {
        "ops": strings.canonical_ops(),
        "raw_ops": tuple(strings.ops),
        "sites": strings.sites,
        "groups": groups,
        "threads": strings.threads,
        "streams": strings.streams,
        "device_uuid": strings.device_uuid,
        "sizes": strings.sizes,
        "meshes": tuple(strings.meshes),
        "shardings": tuple(strings.shardings),
        "pipelines": strings.pipelines,
        "bucket_layouts": tuple(strings.bucket_layouts),
        "features": tuple(strings.features),
        "exceptions": tuple(strings.exceptions),
        "thread_exceptions": tuple(strings.thread_exceptions),
        "out_of_memory": tuple(strings.out_of_memory),
        "early_uses": tuple(
            dataclasses.replace(use, group=groups.get(number)) for use, number in strings.early_uses.values()
        ),
        "wrapped_parameters": tuple(strings.wrapped_parameters),
        "optimizer_ages": tuple(strings.optimizer_ages),
        "crash": strings.crash,
        "windows": tuple(strings.windows.values()),
        "snapshots": tuple(strings.snapshots),
        "ended_ns": strings.ended_ns,
        "notes": tuple(strings.notes),
    }


def _exception(row: Row) -> dict[str, Any]:
    frame = row.get("frame")
    return {
        "t_ns": int_or_0(row.get("t_ns")),
        "type": str(row["type"]),
        "message": str(row.get("message", "")),
        "traceback": str(row.get("traceback", "")),
        "frame": _site(frame) if isinstance(frame, dict) else None,
    }


def _wrapped_parameters(row: Row) -> tables.WrappedParameters:
    place = row.get("place")
    return tables.WrappedParameters(
        group=str(row["group"]),
        by=str(row["by"]),
        names=int(row["names"]),
        count=int(row["count"]),
        some=tuple(map(str, row["some"])),
        site=_site(place) if isinstance(place, dict) else None,
    )


def _label(row: Row) -> Label:
    return Label(
        api=str(row["api"]),
        text=str(row["text"]),
        module=str(row.get("module", "")),
        stage=int(row.get("stage", -1)),
        microbatch=int(row.get("microbatch", -1)),
    )


def _sharding(row: Row) -> tables.Sharding:
    return tables.Sharding(scheme=str(row["scheme"]), shards=int(row["shards"]), by=str(row["by"]))


def _bucket_layout(row: Row) -> tables.BucketLayout:
    return tables.BucketLayout(
        t_ns=int(row["t_ns"]),
        reducer=int(row["id"]),
        group=str(row["group"]),
        sizes=tuple(map(int, row["buckets"])),
        num_parameters=int(row["parameters"]),
    )


def _optimizer_age(row: Row) -> tables.OptimizerAge:
    return tables.OptimizerAge(
        steps=int(row["steps"]), parameters=int(row["parameters"]), elements=int(row["elements"])
    )


def _thread_exception(row: Row) -> tables.ThreadException:
    return tables.ThreadException(**_exception(row), thread=str(row.get("thread", "")))


def _uneven_sizes(row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(map(int, row["inputs"])), tuple(map(int, row["outputs"]))


def read_strings(folder: Path, problems: list[str]) -> Strings:
    """Read the strings file of a rank folder; invalid entries are omitted and reported."""
    file = folder / paths.STRINGS
    strings = Strings()
    damaged = 0
    rows = json_lines(file, problems, known=_known)
    if not rows and not file.exists():
        problems.append(f"{folder.name}/{file.name} is missing: operations, lines and groups have no names")
    for row in rows:
        try:
            strings.take(row)
        except ENTRY_ERRORS:
            damaged += 1
    if (crash := read_crash(folder / paths.CRASH)) is not None:
        strings.crash = qualify_names(crash, strings.sites.values())
    if strings.has_crowd:
        problems.append(
            f"{folder.name} has more than {schema.MAX_TABLE_ENTRIES:,} groups: those beyond are indistinguishable, and "
            "their operations are left out"
        )
    if damaged:
        problems.append(f"{folder.name}/{file.name} holds {damaged} entries that cannot be understood, left out")
    return strings


def _members(row: Row) -> tuple[int, ...]:
    """Return the global ranks in a group."""
    if "range" in row:
        first, count, stride = map(int, row["range"])
        if not 0 <= count <= MAX_MEMBERS:
            raise ValueError(count)
        return share_range(first, count, stride)
    return share(map(int, row.get("ranks", ())))


def _mesh(row: Row) -> tables.Mesh:
    coordinate = row.get("coordinate")
    return tables.Mesh(
        names=tuple(map(str, row["names"])),
        shape=tuple(map(int, row["shape"])),
        coordinate=None if coordinate is None else tuple(map(int, coordinate)),
        groups=tuple(map(str, row["groups"])),
        device_type=str(row.get("device_type", "")),
        flattened=bool(row.get("flattened", False)),
    )


def _pipeline(row: Row) -> tables.Pipeline:
    order, offered = row.get("order"), row.get("offered")
    return tables.Pipeline(
        schedule=str(row["schedule"]),
        num_stages=int(row["num_stages"]),
        stages=tuple(map(int, row["stages"])),
        num_microbatches=int(row["microbatches"]),
        group=str(row.get("group", "")),
        group_rank=int(row.get("group_rank", -1)),
        group_size=int(row.get("group_size", 0)),
        order=None if order is None else tuple(tuple(map(_action, str(slot).split())) for slot in order),
        offered=None if offered is None else tuple(map(str, offered)),
    )


def _action(text: str) -> tables.Action:
    parts = _ACTION.fullmatch(text)
    if parts is None:
        raise ValueError(text)
    stage, kind, microbatch = parts.groups()
    return tables.Action(
        stage=int(stage), name=events.PIPELINE_KINDS.get(kind, kind), microbatch=int(microbatch) if microbatch else -1
    )


def _out_of_memory(row: Row) -> tables.OutOfMemory:
    return tables.OutOfMemory(
        t_ns=int_or_0(row.get("t_ns")),
        device=str(row["device"]),
        message=str(row.get("message", "")),
        live_bytes=None if row.get("live_bytes") is None else int(row["live_bytes"]),
        held_bytes={str(name): int(held) for name, held in dict(row["held_bytes"]).items()},
        largest=None if row.get("largest") is None else str(row["largest"]),
        allocations=tuple(
            f"{int(block['bytes'])} bytes: {' < '.join(map(str, block['frames']))}" for block in row["allocations"]
        ),
    )


def _window(row: Row) -> tables.Window:
    return tables.Window(
        number=int(row["id"]),
        state=str(row["state"]),
        first=int(row["first"]),
        last=int(row["last"]),
        begin_ns=int(row.get("begin_ns", UNKNOWN_NS)),
        end_ns=int(row.get("end_ns", UNKNOWN_NS)),
        ready_ns=int(row.get("ready_ns", UNKNOWN_NS)),
        file=_name_of_file(row),
        size_bytes=int_or_0(row.get("bytes")),
        realtime_ns=int_or_0(row.get("realtime_ns")),
        reason=str(row.get("reason", "")),
        request=str(row.get("request", "")),
    )


def _snapshot(row: Row) -> tables.Snapshot:
    return tables.Snapshot(
        state=str(row["state"]),
        why=str(row["why"]),
        step=int(row["step"]),
        t_ns=int_or_0(row.get("t_ns")),
        device=str(row.get("device", "")),
        file=_name_of_file(row),
        size_bytes=int_or_0(row.get("bytes")),
        held_bytes={str(name): int(held) for name, held in dict(row.get("held_bytes") or {}).items()},
        reason=str(row.get("reason", "")),
        request=str(row.get("request", "")),
    )


def _name_of_file(row: Row) -> str:
    """Return the name of a file in the folder of the rank.

    Raises:
        ValueError: it is a path to somewhere else.
    """
    name = str(row.get("file") or "")
    if "/" in name or name.startswith("."):
        raise ValueError(name)
    return name


def _site(row: Row, frames: Mapping[int, Site] = MappingProxyType({})) -> Site:
    numbers = [int(number) for number in row.get("callers", ())]
    return _known_site(
        str(row["file"]),
        int(row["line"] or 0),
        str(row["function"]),
        str(row.get("api", "")),
        str(row.get("package", "")),
        tuple(frames[number] for number in numbers if number in frames),
    )


@functools.lru_cache(maxsize=4096)
def _known_site(file: str, line: int, function: str, api: str, package: str, callers: tuple[Site, ...]) -> Site:
    """Return a site, the same object for all ranks."""
    shown = _COMPILED_GRAPH if api == _CALLS_COMPILED else api
    return Site(file=file, line=line, function=function, api=shown, package=package, callers=callers)


READERS: dict[str, _Reader] = {
    "process": Strings._take_process,
    "op": Strings._take_op,
    "site": Strings._take_site,
    "frame": _by_id(lambda strings: strings.frames, _site),
    "label": _by_id(lambda strings: strings.labels, _label),
    "group": Strings._take_group,
    "axis": Strings._take_axis,
    "mesh": _in_order(lambda strings: strings.meshes, _mesh),
    "sharding": _in_order(lambda strings: strings.shardings, _sharding),
    "ddp": _in_order(lambda strings: strings.bucket_layouts, _bucket_layout),
    "parameters": _in_order(lambda strings: strings.wrapped_parameters, _wrapped_parameters),
    "optimizer": _in_order(lambda strings: strings.optimizer_ages, _optimizer_age),
    "pipeline": _by_id(lambda strings: strings.pipelines, _pipeline),
    "thread": Strings._take_thread,
    "thread_start": Strings._take_thread_start,
    "device": Strings._take_device,
    "stream": _by_id(
        lambda strings: strings.streams, lambda row: f"{row['device']}:{int(row['index'])} stream {int(row['stream'])}"
    ),
    "sizes": _by_id(lambda strings: strings.sizes, _uneven_sizes),
    "feature": _in_order(lambda strings: strings.features, lambda row: str(row["name"])),
    "exception": _in_order(lambda strings: strings.exceptions, lambda row: tables.ExceptionRecord(**_exception(row))),
    "thread_exception": _in_order(lambda strings: strings.thread_exceptions, _thread_exception),
    "out_of_memory": _in_order(lambda strings: strings.out_of_memory, _out_of_memory),
    "early_use": Strings._take_early_use,
    "window": _by_id(lambda strings: strings.windows, _window),
    "snapshot": _in_order(lambda strings: strings.snapshots, _snapshot),
    "exit": Strings._take_exit,
    "note": _in_order(lambda strings: strings.notes, lambda row: str(row.get("text", ""))),
}
"""What takes an entry, by its kind: one for each of `schema.STRING_ENTRIES`."""


def json_lines(path: Path, problems: list[str], *, known: dict[bytes, Row] | None = None) -> list[Row]:
    """Return the objects of a file of JSON lines; a last line cut short by a kill is no problem.

    Parameters:
        known: cache of decoded lines, which new lines are added to.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path} cannot be read ({error.strerror})")
        return []
    lines = list(filter(None, lines[:-1]))
    rows = _decode(lines) if known is None else _decode_new(lines, known)
    sound = [row for row in rows if row is not None]
    if len(sound) < len(rows):
        problems.append(f"{path.parent.name}/{path.name} holds {len(rows) - len(sound)} damaged lines, left out")
    return sound


def _decode_new(lines: list[bytes], known: dict[bytes, Row]) -> list[Row | None]:
    """Return the object of each line, decoding those that are not known."""
    rows = [known.get(line) for line in lines]
    unknown = [i for i, row in enumerate(rows) if row is None]
    for i, row in zip(unknown, _decode([lines[i] for i in unknown]), strict=True):
        rows[i] = row
        if row is not None and len(known) < _MOST_KNOWN and len(lines[i]) <= _MOST_KNOWN_BYTES:
            known[lines[i]] = row
    return rows


def _decode(lines: list[bytes]) -> list[Row | None]:
    """Return the object of each line; None where it is damaged."""
    try:
        # Decoding all lines at once takes half the time. No string holds a line feed, and any other damage changes the
        # number of objects.
        rows = json.loads(b"[" + b"\n,".join(lines) + b"]")
        if len(rows) == len(lines) and all(isinstance(row, dict) for row in rows):
            return list(rows)
    except ValueError:
        pass
    return list(map(_decode_alone, lines))


def _decode_alone(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def int_or_0(value: object) -> int:
    """Return a whole number as it is, 0 for anything else."""
    return value if isinstance(value, int) else 0
