"""The graph of a job whose records are operations of a pipeline by type, as ByteDance's StragglerAnalysis has them.

What depends on what follows from the order of operations in one replica of the first step (Lin et al., OSDI'25,
"Understanding Stragglers in Large Model Training Using What-if Analysis"): computation and each direction of messages
are streams; a receive follows the computation before its own and precedes that, a send follows its computation; the
gradients of a stage are reduced after its last backward, and the optimizer comes after that. The host between
operations is left out: what it delays is the replay error. Steps are independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dtprof.analysis.whatif.operation_graph import STRUCTURE, Kind, OperationGraph
from dtprof.analysis.whatif.replay import Dependencies
from dtprof.columns import distinct, median
from dtprof.intervals import Column, Floats
from dtprof.records import events
from dtprof.records.tables import RankTables

FORWARD, BACKWARD, OPTIMIZER, PAUSE, CLIP = "forward", "backward", "optimizer", "garbage_collection", "clip"
GATHER, SCATTER, SEPARATE = "all_gather dp", "reduce_scatter dp", "all_reduce dp"
EMBEDDING, LAYERNORM = "all_reduce embedding", "all_reduce tp"
SENDS = {FORWARD: "send forward", BACKWARD: "send backward"}
RECEIVES = {FORWARD: "recv forward", BACKWARD: "recv backward"}
MESSAGES = (*SENDS.values(), *RECEIVES.values())
OF_REPLICAS = (GATHER, SCATTER, SEPARATE, CLIP)
"""Of these all replicas wait for each other."""
SYNCHRONISED = (*MESSAGES, *OF_REPLICAS, EMBEDDING)
COMMUNICATION = (*SYNCHRONISED, LAYERNORM)
"""Of communication the ideal is the median, of the rest the mean."""
CLIP_PHASE = "clip_gradients"
"""The phase that the importer marks where an optimizer clips gradients, for which it waits for all ranks."""
MATCH_NS = 50_000
"""By so much clocks may be apart where messages are matched to computation."""
MIN_TRANSFER_NS = -10_000_000
"""A transfer that is shorter than this is none; times of clocks that are less apart are taken as they are."""


class OpName(NamedTuple):
    """An operation of one replica in one step."""

    kind: str
    number: int  # of its kind, in order of time
    stage: int


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """The operations of one rank by kind: begin, end and model chunk; one row a step, one column an operation."""

    rank: int
    stage: int
    replica: int
    num_stages: int  # of the pipeline: ranks
    begin: dict[str, Floats]
    end: dict[str, Floats]
    chunk: dict[str, Column]  # in the first step
    lengths: Floats  # of steps
    shared: bool  # several replicas


@dataclass
class _Model:
    """The dependencies of one replica and step."""

    after: dict[OpName, list[OpName]] = field(default_factory=dict)
    groups: list[list[OpName]] = field(default_factory=list)  # that wait for each other

    def chain(self, names: Sequence[OpName], *, last: Sequence[OpName] = ()) -> None:
        """Let each operation follow the one before; the first follows `last`."""
        before = list(last)
        for name in names:
            self.after.setdefault(name, []).extend(before)
            before = [name]


def read_rows(tables: RankTables, windows: Column) -> RankRows | str:
    """Return the operations of one rank; a sentence where its steps differ.

    Parameters:
        windows: begin of each step, and the end of the last.
    """
    pipeline = next(iter(tables.pipelines.values()), None)
    if pipeline is None:
        return f"rank {tables.rank} recorded no pipeline"
    times: dict[str, list[tuple[Column, Column, Column]]] = {}
    spans, ops = tables.spans, tables.operations
    names = np.array([*tables.ops, "?"])
    clipped = spans["begin_ns"][names[spans["op"]] == events.USER_PHASE + CLIP_PHASE]
    for name, kind in (
        (events.PP_FORWARD, FORWARD),
        (events.PP_BACKWARD, BACKWARD),
        (events.OPTIMIZER, OPTIMIZER),
        (events.GARBAGE_COLLECTION, PAUSE),
    ):
        own = spans[names[spans["op"]] == name]
        # Clipping is imported as an optimizer phase inside a phase of the program with the same begin.
        is_clip = np.isin(own["begin_ns"], clipped) & (kind == OPTIMIZER)
        for rows, label in ((own[~is_clip], kind), (own[is_clip], CLIP)):
            if len(rows):
                times.setdefault(label, []).append((rows["begin_ns"], rows["end_ns"], rows["stage"]))
    axes = {number: group.axis or group.description for number, group in tables.groups.items()}
    shared = any(group.axis == "dp" and group.size > 1 for group in tables.groups.values())
    for number, axis in axes.items():
        for op in distinct(ops["op"]).tolist():
            rows = ops[(ops["group"] == number) & (ops["op"] == op)]
            name = tables.ops[op]
            # Messages of the forward and of the backward pass differ by their tag alone.
            for way, direction in enumerate((FORWARD, BACKWARD)) if name in events.POINT_TO_POINT else ((-1, ""),):
                some = rows[rows["tag"] == way] if way >= 0 else rows
                label = f"{name} {direction}" if direction else f"{name} {_AXES.get(axis, axis)}"
                if len(some):
                    times.setdefault(label, []).append((some["issued_ns"], some["done_ns"], some["tag"]))
    begin: dict[str, Floats] = {}
    end: dict[str, Floats] = {}
    chunk: dict[str, Column] = {}
    num_steps = len(windows) - 1
    for label, parts in times.items():
        starts, ends, chunks = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(starts, kind="stable")
        starts, ends, chunks = starts[order], ends[order], chunks[order]
        step = np.searchsorted(windows[:-1], starts, "right") - 1
        counts = np.bincount(step, minlength=num_steps)
        # Operations become a matrix of steps by position: each step must hold as many.
        if (counts != counts[0]).any():
            return (
                f"rank {tables.rank} has {counts.min()} to {counts.max()} operations {label!r} a step; expected equal"
            )
        origin = windows[:-1, np.newaxis]
        begin[label] = (starts.reshape(num_steps, -1) - origin).astype(np.float64)
        end[label] = (ends.reshape(num_steps, -1) - origin).astype(np.float64)
        chunk[label] = chunks[: counts[0]].astype(np.int64) // (
            pipeline.group_size if label in (FORWARD, BACKWARD) else 1
        )
    groups = [group for group in tables.groups.values() if group.axis == "dp" and tables.rank in group.ranks]
    return RankRows(
        rank=tables.rank,
        stage=pipeline.group_rank,
        replica=groups[0].ranks.index(tables.rank) if groups else 0,
        num_stages=pipeline.group_size,
        begin=begin,
        end=end,
        chunk=chunk,
        lengths=np.diff(windows).astype(np.float64),
        shared=shared,
    )


_AXES = {"first and last stage": "embedding", "tensor parallel": "tp"}


def build_graph(ranks: Sequence[RankRows], steps: tuple[int, int]) -> OperationGraph | str:
    """Return the graph of a job; a sentence where its ranks do not fit together."""
    by_place = {(own.replica, own.stage): own for own in ranks}
    num_stages = ranks[0].num_stages
    num_replicas = 1 + max(own.replica for own in ranks)
    for place in ((replica, stage) for replica in range(num_replicas) for stage in range(num_stages)):
        if place not in by_place:
            return f"no rank recorded stage {place[1]} of replica {place[0]}"
        first, own = by_place[0, place[1]], by_place[place]
        for kind in first.begin.keys() | own.begin.keys():
            counts = [one.begin[kind].shape[1] if kind in one.begin else 0 for one in (first, own)]
            if counts[0] != counts[1]:
                return f"ranks {first.rank} and {own.rank} have {counts[0]} and {counts[1]} operations {kind!r} a step"
    model = _find_dependencies([by_place[0, stage] for stage in range(num_stages)])
    if isinstance(model, str):
        return model
    return _unroll(model, by_place, num_replicas, steps)


def _find_dependencies(stages: Sequence[RankRows]) -> _Model | str:
    model = _Model()
    messages: dict[tuple[str, int], list[OpName]] = {}
    overlapped = any(SEPARATE in own.begin for own in stages)
    for own in stages:
        computes = _list_computes(own)
        if not computes:
            return f"rank {own.rank} computes nothing in step {0}"
        model.chain(computes)
        for direction in (FORWARD, BACKWARD):
            for kind in (SENDS[direction], RECEIVES[direction]):
                found = _match_messages(model, own, direction, kind, computes)
                if isinstance(found, str):
                    return found
                messages[kind, own.stage] = found
        _delay_first_backward(model, own, computes)
        _add_gradients(model, own, computes, overlapped=overlapped, num_stages=len(stages))
    paired: set[OpName] = set()
    for (kind, stage), names in messages.items():
        if not kind.startswith("send"):
            continue
        direction = kind.removeprefix("send ")
        peer = (stage + (1 if direction == FORWARD else -1)) % len(stages)
        received = messages[RECEIVES[direction], peer]
        for pair in zip(names, received, strict=False):
            model.groups.append(list(pair))
            paired.update(pair)
    every = {name for name in model.after if name.kind in (*MESSAGES, GATHER, SCATTER, SEPARATE)}
    model.groups += [[name] for name in sorted(every - paired)]
    ends = [OpName(EMBEDDING, 0, stage) for stage in dict.fromkeys((0, len(stages) - 1))]
    model.groups.append([name for name in ends if name in model.after])
    model.groups.append([name for name in (OpName(CLIP, 0, own.stage) for own in stages) if name in model.after])
    model.groups = [group for group in model.groups if group]
    return model


def _list_computes(own: RankRows) -> list[OpName]:
    """Return the computations of the first step in order of time."""
    some = [
        (own.begin[kind][0, number], number, kind)
        for kind in (FORWARD, BACKWARD)
        for number in range(own.begin[kind].shape[1] if kind in own.begin else 0)
    ]
    # Of one moment by number, then backward before forward.
    return [OpName(kind, number, own.stage) for _, number, kind in sorted(some)]


def _match_messages(
    model: _Model, own: RankRows, direction: str, kind: str, computes: Sequence[OpName]
) -> list[OpName] | str:
    """Add the messages of one stage and direction; return those that have a peer, in order."""
    if kind not in own.begin:
        return []
    count = own.begin[kind].shape[1]
    names = [OpName(kind, number, own.stage) for number in range(count)]
    model.chain(names)
    of_compute = [name for name in computes if name.kind == direction]
    is_send = kind in SENDS.values()
    if not of_compute:
        return []
    # Messages outside the time of computation were recorded, but not sent.
    if is_send:
        real = own.end[kind][0] >= own.end[direction][0].min() - MATCH_NS
    else:
        real = own.begin[kind][0] <= own.begin[direction][0].max() + MATCH_NS
    found = [name for name, is_real in zip(names, real.tolist(), strict=True) if is_real]
    skipped = 0
    if len(found) != len(of_compute):
        if found and len(found) + 1 != len(of_compute):
            return f"rank {own.rank} has {len(found)} operations {kind!r} for {len(of_compute)} of {direction!r}"
        skipped = int(bool(found) and not is_send)
    last_stage = own.num_stages * (1 + max(int(own.chunk[direction].max()), 0)) - 1
    valid = []
    for number, name in enumerate(found, start=skipped):
        compute = OpName(direction, number, own.stage)
        stage = int(own.chunk[direction][number]) * own.num_stages + own.stage
        peer = stage + (1 if (direction == FORWARD) == is_send else -1)
        if 0 <= peer <= last_stage:
            valid.append(name)
        if is_send:
            model.after[name].append(compute)
        else:
            model.after.setdefault(compute, []).append(name)
            if number:
                model.after[name].append(compute._replace(number=number - 1))
    return valid


def _delay_first_backward(model: _Model, own: RankRows, computes: Sequence[OpName]) -> None:
    """Let the first gradients be sent and received no earlier than the last forward but one before them ends."""
    first = next((i for i, name in enumerate(computes) if name.kind == BACKWARD), 0)
    if first < 2:
        return
    for kind in (RECEIVES[BACKWARD], SENDS[BACKWARD]):
        name = OpName(kind, 0, own.stage)
        if name in model.after:
            model.after[name].append(computes[first - 2])


def _add_gradients(
    model: _Model, own: RankRows, computes: Sequence[OpName], *, overlapped: bool, num_stages: int
) -> None:
    """Add parameters that are gathered before, gradients that are reduced after the computation, and the optimizer."""

    def every(kind: str) -> list[OpName]:
        return [
            OpName(kind, number, own.stage) for number in range(own.begin[kind].shape[1] if kind in own.begin else 0)
        ]

    def time_of(name: OpName, times: dict[str, Floats]) -> float:
        return float(times[name.kind][0, name.number])

    gathered, scattered = every(GATHER), every(SCATTER)
    model.chain(sorted((*gathered, *scattered), key=lambda name: time_of(name, own.begin)))
    for chunk in set(own.chunk[GATHER].tolist()) if gathered else ():
        last = [name for name in gathered if own.chunk[GATHER][name.number] == chunk][-1]
        users = [name for name in every(FORWARD) if own.chunk[FORWARD][name.number] == chunk]
        if users:
            model.after[min(users, key=lambda name: time_of(name, own.begin))].append(last)
    for chunk in set(own.chunk[SCATTER].tolist()) if scattered and overlapped else ():
        first = next(name for name in scattered if own.chunk[SCATTER][name.number] == chunk)
        makers = [name for name in every(BACKWARD) if own.chunk[BACKWARD][name.number] == chunk]
        if makers:
            model.after[first].append(max(makers, key=lambda name: time_of(name, own.end)))
    last_compute = max(computes, key=lambda name: time_of(name, own.end))
    pause = every(PAUSE)[:1]
    for name in pause:
        model.after.setdefault(name, []).append(last_compute)
    before = pause or [last_compute]
    embedding = every(EMBEDDING)[:1] if own.stage in (0, num_stages - 1) else []
    if overlapped:
        chain, before = [*every(LAYERNORM)[:1], *embedding, *every(SEPARATE)[:1]], [*scattered[-1:], *before]
    elif own.shared:
        chain = [*every(LAYERNORM)[:1], *embedding, *scattered]
    else:
        chain = [*every(LAYERNORM)[:1], *embedding]
    model.chain([*chain, *every(CLIP)[:1], *every(OPTIMIZER)[:1]], last=before)


def _unroll(
    model: _Model, by_place: dict[tuple[int, int], RankRows], num_replicas: int, steps: tuple[int, int]
) -> OperationGraph | str:
    """Return the graph of all replicas and steps: one block of nodes an operation, rows by replica, then step."""
    num_steps = len(by_place[0, 0].lengths)
    size = num_replicas * num_steps
    names = sorted(model.after)
    block = {name: number * size for number, name in enumerate(names)}
    group_of = {name: number for number, group in enumerate(model.groups) for name in group}
    rows = np.arange(size)
    begin, end = (
        {
            name: np.concatenate(
                [
                    getattr(by_place[replica, name.stage], side)[name.kind][:, name.number]
                    for replica in range(num_replicas)
                ]
            )
            for name in names
        }
        for side in ("begin", "end")
    )
    durations = [end[name] - begin[name] for name in names]
    before: list[Column] = []
    after: list[Column] = []
    num_nodes = len(names) * size
    for members in model.groups:
        joined = members[0].kind in OF_REPLICAS
        # One arrival for all replicas of a step, or one for each.
        arrival = num_nodes + (rows % num_steps if joined else rows)
        num_nodes += num_steps if joined else size
        last = np.max([begin[name] for name in members], axis=0)
        if joined:
            last = np.tile(last.reshape(num_replicas, num_steps).max(axis=0), num_replicas)
        for name in members:
            for source in model.after[name]:
                before.append(block[source] + rows)
                after.append(arrival)
            before.append(arrival)
            after.append(block[name] + rows)
            transfer = end[name] - last
            durations[block[name] // size] = np.where(transfer <= MIN_TRANSFER_NS, 0.0, transfer)
    for name in names:
        if name not in group_of:
            for source in model.after[name]:
                before.append(block[source] + rows)
                after.append(block[name] + rows)
    kinds = tuple(dict.fromkeys(name.kind for name in names))
    ideal = _idealise(names, durations)
    fill = num_nodes - len(names) * size
    graph = Dependencies(num_nodes=num_nodes, before=np.concatenate(before), after=np.concatenate(after))
    if not graph.is_acyclic:
        return "its operations wait for each other in a circle"
    ranks = [[by_place[replica, name.stage].rank for replica in range(num_replicas)] for name in names]
    number = {kind: i for i, kind in enumerate(kinds)}
    replay_rows = [
        np.concatenate([block[name] + rows[rows % num_steps == step] for name in names]) for step in range(num_steps)
    ]
    return OperationGraph(
        dependencies=graph,
        durations=np.concatenate([*durations, np.zeros(fill)]),
        modelled=(np.concatenate([*durations, np.zeros(fill)]),),
        ideal=np.concatenate([*ideal, np.zeros(fill)]),
        kinds=tuple(_describe(kind) for kind in kinds),
        kind=np.r_[np.repeat([number[name.kind] for name in names], size), np.full(fill, STRUCTURE)],
        rank=np.r_[np.repeat(np.array(ranks).ravel(), num_steps), np.full(fill, STRUCTURE)],
        stage=np.r_[np.repeat([name.stage for name in names], size), np.full(fill, STRUCTURE)],
        step=np.r_[np.tile(rows % num_steps, len(names)), np.full(fill, STRUCTURE)],
        nbytes=np.zeros(num_nodes, np.int64),
        is_wide_sum=np.zeros(num_nodes, np.bool_),
        is_superseded=np.zeros(num_nodes, np.bool_),
        instance=np.full(num_nodes, STRUCTURE),
        issued_by=np.full(num_nodes, STRUCTURE),
        hosts={},
        group_sizes={"dp": num_replicas, "pp": by_place[0, 0].num_stages, "embedding": 2},
        world_size=len(by_place),
        steps=steps,
        step_ends=replay_rows,
        chained=False,
        begins=np.zeros(0, np.int64),
        measured_ns=_measure(begin, end, num_replicas),
        replicas={own.rank: place for place, own in by_place.items()},
    )


def _measure(begin: dict[OpName, Floats], end: dict[OpName, Floats], num_replicas: int) -> Floats:
    first = np.min(list(begin.values()), axis=0).reshape(num_replicas, -1).min(axis=0)
    last = np.max(list(end.values()), axis=0).reshape(num_replicas, -1).max(axis=0)
    lengths: Floats = last - first
    return lengths


def _idealise(names: Sequence[OpName], durations: Sequence[Floats]) -> list[Floats]:
    by_kind: dict[str, list[Floats]] = {}
    for name, own in zip(names, durations, strict=True):
        by_kind.setdefault(name.kind, []).append(own)
    ideal = {
        kind: float(median(np.concatenate(own)) if kind in COMMUNICATION else np.concatenate(own).mean())
        for kind, own in by_kind.items()
    }
    return [np.full(len(own), ideal[name.kind]) for name, own in zip(names, durations, strict=True)]


def _describe(kind: str) -> Kind:
    if kind not in COMMUNICATION or kind == CLIP:
        return Kind(name=kind)
    op, group = kind.split(" ", 1)
    is_message = kind in MESSAGES
    return Kind(name=f"p2p {group}" if is_message else kind, op=op, group="pp" if is_message else group)
