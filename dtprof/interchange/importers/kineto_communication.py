"""The communication of one torch.profiler trace as records: kernels of a device, or work of gloo on the host."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtprof.diagnosis.sources.flight_recorder.dump_fields import MAX_RANK, dtype_code, numel, rank_numbers
from dtprof.interchange.importers.collective_names import of_kernel, operation_name
from dtprof.interchange.importers.imported_records import LAST_NS, ImportedOperation
from dtprof.interchange.importers.kineto_events import EventArguments, KinetoTrace, TracedCall
from dtprof.job.axes import DEFAULT_GROUP
from dtprof.records import events, schema

SECOND_INPUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operators whose first argument is the output."""
PLACE_OF_ROOT = {"broadcast": 2, "send": 2, "recv": 2, "reduce": 3, "gather": 3, "scatter": 3}
PLACE_OF_TAG = 3
NOT_RECORDED = "?"
MAX_GROUPS = 60_000
_WHOLE = re.compile(r"-?\d{1,9}$")


@dataclass(kw_only=True)
class Groups:
    """The process groups of a rank: ids are positions."""

    rank: int
    world_size: int
    configured: dict[str, Mapping[str, Any]]  # by name, as the trace lists them
    entries: list[dict[str, Any]] = field(default_factory=list)
    _ids: dict[str, int] = field(default_factory=dict)

    def of(self, name: str, description: str, ranks: tuple[int, ...], size: int) -> int:
        """Return the id of a group."""
        if name in self._ids:
            return self._ids[name]
        known = self.configured.get(name, {})
        listed = rank_numbers(known.get("ranks"))
        if size and len(ranks) != size and len(listed) == size:
            ranks = listed
        if size and len(ranks) != size and name != NOT_RECORDED:
            ranks = tuple(range(size)) if size == self.world_size else _progression(ranks, size)
        number = self._ids[name] = min(len(self.entries), MAX_GROUPS)
        if number == len(self.entries):
            backend = str(known.get("backend_config") or known.get("backend") or "").split(",")[0].rpartition(":")[2]
            self.entries.append(
                {
                    "name": name,
                    "description": description or str(known.get("pg_desc") or ""),
                    "size": len(ranks) or size,
                    "ranks": list(ranks),
                    "backend": backend or None,
                }
            )
        return number

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the ids of the groups whose members are not recorded."""
        return tuple(i for i, entry in enumerate(self.entries) if entry["name"] == NOT_RECORDED)

    def only(self) -> int | None:
        """Return the id of the group that an operation must be of where none is named; None where it is not sure.

        It is sure where all groups of the rank have the same members: then their operations follow one another.
        """
        known = {name: rank_numbers(group.get("ranks")) for name, group in self.configured.items()}
        shared = {name: ranks for name, ranks in known.items() if len(ranks) > 1 and self.rank in ranks}
        if not shared and not self.configured:
            return self.of("0", DEFAULT_GROUP, tuple(range(self.world_size)), self.world_size)
        if len(set(shared.values())) != 1:
            return None
        name, ranks = next(iter(shared.items()))
        return self.of(name, "", ranks, len(ranks))


def _progression(ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the members of a group of which only the first and the last are listed, where they are evenly apart."""
    if len(ranks) < 4 or not 1 < size <= MAX_RANK:
        return ()
    step = ranks[1] - ranks[0]
    whole = tuple(range(ranks[0], ranks[0] + step * size, step)) if step > 0 else ()
    return whole if len(whole) == size and whole[: len(ranks) - 1] == ranks[:-1] and whole[-1] == ranks[-1] else ()


def device_operations(trace: KinetoTrace, groups: Groups) -> list[ImportedOperation]:
    """Return the operations whose kernels ran on the device."""
    operations = []
    for call in trace.collectives:
        arguments = call.arguments
        if arguments.collective is None:
            arguments = trace.described.get(arguments.external_id, arguments)
        op, reduction, dtype = of_kernel(call.name)
        if isinstance(arguments.collective, str) and arguments.collective:
            op = operation_name(arguments.collective)
        peer = _peer(arguments, op)
        group = _group_of(arguments, groups)
        members = groups.entries[group]["ranks"]
        operations.append(
            ImportedOperation(
                op=op,
                begin=call.begin,
                end=call.end,
                group=group,
                numel=_count(arguments.elements_in),
                dtype=code if (code := dtype_code(arguments.dtype)) != schema.NO_CODE else dtype,
                reduce_op=reduction,
                peer=members.index(peer) if peer in members else -1,
            )
        )
    return operations


def _peer(arguments: EventArguments, op: str) -> int:
    value = {"send": arguments.target, "recv": arguments.source}.get(op)
    return value if type(value) is int else -1


def _count(value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 18:
        value = int(value)
    return value if type(value) is int and 0 <= value < LAST_NS else 0


def host_operations(trace: KinetoTrace, groups: Groups) -> list[ImportedOperation]:
    """Return the operations that the program issued on the host, each with the work of the back end on it.

    Where only that work is in the trace, it stands for the call.
    """
    if not trace.calls:
        return [_work_alone(work, groups) for work in trace.works]
    calls = sorted(trace.calls, key=lambda call: call.begin)
    named = [events.canonical_op(call.name.rpartition(":")[2]) for call in calls]
    done = _pair_up(calls, named, sorted(trace.works, key=lambda call: call.begin))
    group = groups.only()
    if group is None and calls:
        group = groups.of(NOT_RECORDED, "not recorded", (), groups.world_size)
    operations = []
    for position, (call, op) in enumerate(zip(calls, named, strict=True)):
        work = done.get(position)
        elements, dtype = _payload(call, work, op)
        values = call.inputs()[2]
        operations.append(
            ImportedOperation(
                op=op,
                begin=call.begin,
                end=max(work.end, call.begin) if work is not None else -1,
                group=group or 0,
                numel=elements,
                dtype=dtype,
                peer=_whole(values, PLACE_OF_ROOT[op]) if op in PLACE_OF_ROOT else -1,
                tag=max(0, _whole(values, PLACE_OF_TAG)) if op in events.POINT_TO_POINT else 0,
                returned_after=call.end - call.begin,
            )
        )
    return operations


def _work_alone(work: TracedCall, groups: Groups) -> ImportedOperation:
    op = operation_name(work.name)
    elements, dtype = _payload(work, work, op)
    return ImportedOperation(
        op=op, begin=work.begin, end=work.end, group=_group_of(work.arguments, groups), numel=elements, dtype=dtype
    )


def _group_of(arguments: EventArguments, groups: Groups) -> int:
    """Return the id of the group that an event names; else the only one that it can be, or one of its own."""
    if isinstance(arguments.group, str) and arguments.group:
        ranks = rank_numbers(arguments.group_ranks)
        return groups.of(arguments.group, str(arguments.group_text or ""), ranks, _count(arguments.group_size))
    only = groups.only()
    return groups.of(NOT_RECORDED, "not recorded", (), groups.world_size) if only is None else only


def _pair_up(calls: Sequence[TracedCall], named: Sequence[str], works: Sequence[TracedCall]) -> dict[int, TracedCall]:
    """Return the work of each call by position: of one operation they begin in the order in which they were issued."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for position, op in enumerate(named):
        waiting[op].append(position)
    by_op: dict[str, list[TracedCall]] = defaultdict(list)
    # What is more than calls was issued before the trace began, and so begins first.
    for work in works[max(0, len(works) - len(calls)) :]:
        by_op[operation_name(work.name)].append(work)
    work_of_call: dict[int, TracedCall] = {}
    left: list[TracedCall] = []
    for op, op_works in by_op.items():
        left += _in_order(calls, waiting.get(op, []), op_works, work_of_call)
    # gloo does some operations as others: what is left over belongs together in order.
    rest = [position for position in range(len(calls)) if position not in work_of_call]
    _in_order(calls, rest, sorted(left, key=lambda work: work.begin), work_of_call)
    return work_of_call


def _in_order(
    calls: Sequence[TracedCall],
    positions: Sequence[int],
    works: Sequence[TracedCall],
    work_of_call: dict[int, TracedCall],
) -> list[TracedCall]:
    """Pair calls and works one after the other; return the works that begin before any call that is left."""
    left, at = [], 0
    for work in works:
        if at >= len(positions) or calls[positions[at]].begin > work.begin:
            left.append(work)  # of what was issued before the trace began, or of another operation
            continue
        work_of_call[positions[at]] = work
        at += 1
    return left


def _payload(call: TracedCall, work: TracedCall | None, op: str) -> tuple[int, int]:
    """Return how many elements this rank puts in, and the code of their type."""
    dims, types, _ = call.inputs()
    place = 1 if op in SECOND_INPUT and len(dims) > 1 and dims[1] else 0
    elements, dtype = -1, schema.NO_CODE
    shape = dims[place] if place < len(dims) else None
    if isinstance(shape, list) and shape:
        elements = numel(shape if isinstance(shape[0], list) else [shape])
        dtype = dtype_code(types[place]) if place < len(types) else schema.NO_CODE
    if work is not None and (elements < 0 or dtype == schema.NO_CODE):
        dims, types, _ = work.inputs()
        if elements < 0 and dims:
            elements = numel(dims)
        if dtype == schema.NO_CODE and types:
            dtype = dtype_code(types[0])
    return max(elements, 0), dtype


def _whole(values: Sequence[object], place: int) -> int:
    value = values[place] if place < len(values) else None
    return int(value) if isinstance(value, str) and _WHOLE.match(value) else -1
