"""The Python tap: the same records as the native one, for machines without a compiler.

Kernels at DispatchKey.BackendSelect, registered through torch.library, see each c10d operation once on its way to
whatever back end and redispatch with the GIL released. Calling the back end's kernel directly instead would hold the
GIL and deadlock with gloo's own threads.
"""

import itertools
import mmap
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from types import FrameType
from typing import Any

from dtprof.capture import fence
from dtprof.capture.call_sites import CallSites, CodeOwners
from dtprof.run_format import paths, schema

AT = schema.OFFSET
STATE = schema.STATE
FLAG = schema.FLAG
PACK = schema.RECORD_STRUCT.pack_into
_pack_f32 = struct.Struct("<f").pack_into
_unpack_f32 = struct.Struct("<f").unpack_from
_pack_u64 = struct.Struct("<Q").pack_into
_unpack_u64 = struct.Struct("<Q").unpack_from
_pack_u32 = struct.Struct("<I").pack_into
_unpack_u32 = struct.Struct("<I").unpack_from


WAITED_IN_CPP = {"reduce_scatter_tensor_coalesced_"}
"""Operations without a future whose wait, too, is out of Python's sight: their completion is not known."""
MAX_WATCHED = 64
"""Operations in flight whose work is held; of more, the oldest are let go and stay `returned`."""
POLLED_AT_ONCE = 8


class Segment:
    """One mapped segment file and the next free record in it."""

    def __init__(self, path: Path, header: bytes, number: int) -> None:
        """Allocate and map the file.

        Raises:
            OSError: the disk is full or cannot be written to.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            # Allocated, not sparse: a full disk must be an error here and not a SIGBUS in the job.
            os.posix_fallocate(descriptor, 0, schema.SEGMENT_SIZE)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.memory = mmap.mmap(descriptor, schema.SEGMENT_SIZE, flags)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.number = number
        self.path = path
        self.memory[: len(header)] = header
        self.claim = itertools.count().__next__

    def mark(self, bits: int) -> None:
        """Set bits of the header's marks."""
        at = schema.HEADER_OFFSET["marks"]
        _pack_u32(self.memory, at, _unpack_u32(self.memory, at)[0] | bits)

    def add(self, field: str, amount: int) -> None:
        """Add to a 64-bit counter of the header."""
        at = schema.HEADER_OFFSET[field]
        _pack_u64(self.memory, at, _unpack_u64(self.memory, at)[0] + amount)


class Group:
    """What the tap keeps of one process group."""

    def __init__(self, group_id: int, gloo: bool) -> None:
        """Count operations from 0."""
        self.id = group_id
        self.gloo = gloo
        self.next_collective = itertools.count().__next__
        self.next_p2p = itertools.count().__next__


class PythonTap:
    """A Recorder in Python."""

    def __init__(self, *, folder: Path, header: bytes, owners: CodeOwners, max_segments: int) -> None:
        """Open the first segment.

        Raises:
            OSError: the log cannot be created.
        """
        self._folder = folder
        self._header = header
        self._max_segments = max_segments
        self._strings = os.open(folder / paths.STRINGS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._on = True
        self._dropped = 0
        self._kept: list[Segment] = []
        self._ring: list[Segment] = []
        self._segment = self._create(0)
        self._sites = CallSites(owners)
        self._names: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        self._groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()
        self._group_ids = itertools.count().__next__
        self._sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._step = 0
        self._backward_site = 0
        self._spans: dict[int, tuple[Segment, int, int]] = {}
        self._span_ids = itertools.count(1).__next__
        self._library: Any = None
        self._unbox_work: Any = None
        os.register_at_fork(after_in_child=self.off)

    # ---- segments ------------------------------------------------------------------------------------------------

    def _create(self, number: int) -> Segment:
        segment = Segment(self._folder / paths.segment_name(number), self._header, number)
        memory, at = segment.memory, schema.HEADER_OFFSET
        _pack_u32(memory, at["segment"], number)
        _pack_u64(memory, at["opened_monotonic_ns"], monotonic_ns())
        _pack_u64(memory, at["dropped"], self._dropped)
        return segment

    def _claim(self) -> tuple[Segment, int] | None:
        """Return a segment and the offset of a free record in it, or None when recording has stopped."""
        while self._on:
            segment = self._segment
            i = segment.claim()
            if i < schema.SEGMENT_CAPACITY:
                _pack_u64(segment.memory, schema.HEADER_OFFSET["head"], i + 1)
                return segment, schema.HEADER_SIZE + i * schema.RECORD_SIZE
            self._move_on(segment)
        return None

    def _move_on(self, full: Segment) -> None:
        with self._lock:
            if self._segment is not full or not self._on:
                return
            first_quarter = self._max_segments // 4
            (self._kept if full.number < first_quarter else self._ring).append(full)
            if len(self._ring) >= self._max_segments - first_quarter:
                # Unlinked but still mapped while events in it are open: they complete into the void.
                self._ring.pop(0).path.unlink(missing_ok=True)
                self._dropped += schema.SEGMENT_CAPACITY
            try:
                self._segment = self._create(full.number + 1)
            except OSError as error:
                full.mark(schema.MARK["truncated"])
                self._on = False
                fence.warn_once(f"recording stopped, {error.strerror}: the run is marked truncated; the job goes on")

    # ---- names ---------------------------------------------------------------------------------------------------

    def write_entry(self, line: str) -> None:
        """Append a line to the strings file."""
        data = line.encode() + b"\n"
        try:
            complete = os.write(self._strings, data) == len(data)
        except OSError:
            complete = False
        if not complete:
            self._segment.mark(schema.MARK["truncated"])

    def _declare(self, kind: str, entry_id: int, **fields: object) -> None:
        from dtprof.capture.recorder import entry

        self.write_entry(entry(kind, id=entry_id, **fields))

    def name_id(self, name: str) -> int:
        """Return the id of a name, declaring it in the run."""
        with self._lock:
            known = self._names.get(name)
            if known is None:
                known = self._names[name] = min(len(self._names), schema.MAX_TABLE_ENTRIES)
                self._declare("op", known, name=name)
        return known

    def _new_thread(self) -> int:
        count = min(len(self._threads) + 1, schema.MAX_TABLE_ENTRIES)
        new = self._threads.setdefault(threading.get_ident(), count)
        name = threading.current_thread().name
        self._declare("thread", new, name=name, native_id=threading.get_native_id())
        return new

    def _site(self) -> int:
        site_id, new = self._sites.find(sys._getframe(1))
        if new is not None:
            self._declare("site", site_id, file=new.file, line=new.line, function=new.function, api=new.api)
        return site_id

    def _sizes_id(self, inputs: list[int], outputs: list[int]) -> int:
        key = (tuple(inputs), tuple(outputs))
        known = self._sizes.get(key)
        if known is None:
            if len(self._sizes) >= schema.MAX_TABLE_ENTRIES:
                return -1 - (hash(key) & 0x3FFFFFFF)
            known = self._sizes.setdefault(key, len(self._sizes) + 1)
            self._declare("sizes", known, inputs=inputs, outputs=outputs)
        return known

    def _new_group(self, process_group: Any) -> Group:
        from dtprof.capture import groups

        new = Group(min(self._group_ids(), schema.MAX_TABLE_ENTRIES), groups.uses_gloo(process_group))
        self._groups[process_group] = new
        self.write_entry(groups.first_entry(new.id, process_group))
        if extra := groups.members_entry(new.id, process_group.group_name):
            self.write_entry(extra)
        return new

    # ---- spans and samples ---------------------------------------------------------------------------------------

    def _plain(self, kind: int, op: int, value: int, site: int, issued: int) -> tuple[Segment, int] | None:
        claimed = self._claim()
        if claimed is None:
            return None
        segment, at = claimed
        thread = self._threads.get(threading.get_ident()) or self._new_thread()
        none = schema.NO_CODE
        fields = (
            0,
            kind,
            none,
            none,
            op,
            thread,
            0,
            0,
            0,
            0,
            -1,
            0,
            site,
            self._step,
            issued,
            value,
            0.0,
            0.0,
            0.0,
            0.0,
        )
        PACK(segment.memory, at, *fields)
        segment.memory[at] = STATE["issued"]
        return claimed

    def begin_span(self, op: int, is_backward: bool) -> int:
        """Record that a phase begins."""
        issued = monotonic_ns()
        if _watched:
            self._poll()
        site = self._site()
        if is_backward:
            self._backward_site = site
        claimed = self._plain(schema.KIND["span"], op, 0, site, issued)
        if claimed is None:
            return 0
        handle = self._span_ids()
        self._spans[handle] = (*claimed, issued)
        claimed[0].add("capture_ns", monotonic_ns() - issued)
        return handle

    def end_span(self, handle: int, failed: bool, flags: int, is_backward: bool) -> None:
        """Record that it ended."""
        span = self._spans.pop(handle, None)
        if span is None or not self._on:
            return
        segment, at, issued = span
        if _watched:
            self._poll()
        if is_backward:
            self._backward_site = 0
        if flags:
            segment.memory[at + AT["flags"]] |= flags
        _complete(segment.memory, at, issued, STATE["failed"] if failed else STATE["done"])

    def sample(self, op: int, value: int) -> None:
        """Record one value now."""
        issued = monotonic_ns()
        claimed = self._plain(schema.KIND["sample"], op, value, 0, issued)
        if claimed is not None:
            claimed[0].memory[claimed[1]] = STATE["done"]

    def advance_step(self) -> int:
        """Count an optimizer step."""
        self._step += 1
        return self._step

    def close_log(self) -> None:
        """Mark the log as ended in order."""
        self._segment.mark(schema.MARK["closed"])

    def off(self) -> None:
        """Write nothing more."""
        self._on = False

    # ---- operations ----------------------------------------------------------------------------------------------

    def install(self, ops: list[str]) -> None:
        """Tap these operators of the c10d namespace."""
        import torch.library

        self._unbox_work = torch._C._distributed_c10d.Work.unbox
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for op in ops:
            self._library.impl(op, self._kernel(op), "BackendSelect", with_keyset=True)

    def _kernel(self, name: str) -> Callable[..., Any]:
        """Return the kernel of one operator."""
        import torch

        overload = getattr(torch.ops.c10d, name).default
        redispatch = overload._handle.redispatch_boxed
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        has_return = len(overload._schema.returns) > 0
        issue = self._issuer(name, Arguments(name, overload._schema.arguments))
        follow = self._follow
        returned_state = STATE["returned"] if has_return else STATE["done"]
        returned_at = AT["returned_after"]

        def kernel(keys: Any, *arguments: Any) -> Any:
            event = issue(arguments) if self._on else None
            if event is None:
                return redispatch(keys & below, *arguments)
            memory, at, issued, watch = event
            try:
                result = redispatch(keys & below, *arguments)
            except BaseException:
                _pack_f32(memory, at + returned_at, monotonic_ns() - issued)
                _complete(memory, at, issued, STATE["failed"])
                raise
            _pack_f32(memory, at + returned_at, monotonic_ns() - issued)
            memory[at] = returned_state
            if has_return:
                follow(memory, at, issued, watch, result)
            return result

        return kernel

    def _issuer(self, name: str, describe: "Arguments") -> Callable[..., tuple[mmap.mmap, int, int, bool] | None]:
        """Return the function that records the issue of one operator's calls, written for speed."""
        op = self.name_id(name)
        p2p = describe.p2p
        kind = schema.KIND["p2p"] if p2p else schema.KIND["collective"]
        observed = FLAG["polled"] | FLAG["completion"] if name not in WAITED_IN_CPP else 0
        metered = itertools.count(1).__next__

        @fence.fenced("an operation")
        def issue(arguments: tuple[Any, ...]) -> tuple[mmap.mmap, int, int, bool] | None:
            issued = monotonic_ns()
            if _watched:
                self._poll()
            call = describe(arguments)
            if call.meta:
                return None
            group = self._groups.get(call.group) or self._new_group(call.group)
            flags = call.flags
            watch = group.gloo and not flags & FLAG["device"] and observed != 0
            if watch:
                flags |= observed
            site = self._site()
            if site == 0 and self._backward_site:
                site, flags = self._backward_site, flags | FLAG["inferred_site"]
            tag = self._sizes_id(call.inputs, call.outputs) if call.uneven else call.tag
            thread = self._threads.get(threading.get_ident()) or self._new_thread()
            claimed = self._claim()
            if claimed is None:
                return None
            segment, at = claimed
            memory = segment.memory
            seq = group.next_p2p() if p2p else group.next_collective()
            PACK(
                memory,
                at,
                0,
                kind,
                call.dtype,
                call.reduce_op,
                op,
                thread,
                group.id,
                flags,
                0,
                seq,
                call.peer,
                tag,
                site,
                self._step,
                issued,
                call.numel,
                0.0,
                0.0,
                0.0,
                0.0,
            )
            memory[at] = 1  # issued: last, so that a record is whole or not there
            if metered() % METER_EVERY == 0:
                segment.add("capture_ns", (monotonic_ns() - issued) * METER_EVERY)
            return memory, at, issued, watch

        return issue

    @fence.fenced("the completion of an operation")
    def _follow(self, memory: mmap.mmap, at: int, issued: int, watch: bool, result: Any) -> None:
        """Arrange to learn when the operation completes."""
        boxed = result[-1] if isinstance(result, tuple | list) else result
        work = self._unbox_work(boxed) if boxed is not None else None
        if work is None:
            memory[at + AT["flags"]] |= FLAG["no_work"]
        elif watch:
            _watched[id(work)] = Watched(work, memory, at, issued)
            while len(_watched) > MAX_WATCHED:
                _watched.pop(next(iter(_watched)), None)

    def _poll(self) -> None:
        """See which of the oldest operations in flight have completed.

        A callback on the operation's future would tell at once, but it takes the GIL on gloo's thread and costs the
        launching thread up to 100 us in handing it over.
        """
        for key, watched in list(itertools.islice(_watched.items(), POLLED_AT_ONCE)):
            if watched.work.is_completed():
                watched.complete(STATE["done"])
                _watched.pop(key, None)


class Watched:
    """An operation in flight: its work, held so that the job is handed this very object, and its record."""

    __slots__ = ("at", "issued", "memory", "work")

    def __init__(self, work: Any, memory: mmap.mmap, at: int, issued: int) -> None:
        """Hold the work until it completes."""
        self.work = work
        self.memory = memory
        self.at = at
        self.issued = issued

    def complete(self, state: int) -> None:
        """Move the record to done or failed."""
        _complete(self.memory, self.at, self.issued, state)


_watched: dict[int, Watched] = {}
"""Operations in flight, by the id of their work, which is let go at the wait or the first event after completion."""


def _complete(memory: mmap.mmap, at: int, issued: int, state: int) -> None:
    """Move a record to done or failed once; whoever comes first decides."""
    if memory[at] in (STATE["issued"], STATE["returned"]):
        _pack_f32(memory, at + AT["done_after"], monotonic_ns() - issued)
        memory[at] = state


def watch_waits(work_class: Any) -> None:
    """Time every wait made from Python on an operation in flight."""
    original = work_class.wait

    def wait(self: Any, *arguments: Any, **options: Any) -> Any:
        watched = _watched.get(id(self))
        if watched is None:
            return original(self, *arguments, **options)
        memory, at, issued = watched.memory, watched.at, watched.issued
        begun = monotonic_ns()
        if memory[at + AT["waits"]] == 0:
            _pack_f32(memory, at + AT["waited_from"], begun - issued)
        memory[at + AT["waits"]] = min(memory[at + AT["waits"]] + 1, 255)
        state = STATE["failed"]
        try:
            result = original(self, *arguments, **options)
            state = STATE["done"]
        finally:
            so_far = _unpack_f32(memory, at + AT["waited_for"])[0]
            _pack_f32(memory, at + AT["waited_for"], so_far + monotonic_ns() - begun)
            watched.complete(state)
            _watched.pop(id(self), None)
        return result

    work_class.wait = wait


class Call:
    """What the arguments of one call say."""

    __slots__ = ("dtype", "flags", "group", "inputs", "meta", "numel", "outputs", "peer", "reduce_op", "tag", "uneven")

    def __init__(self) -> None:
        """Start from what a call without arguments would say."""
        self.group: Any = None
        self.dtype = self.reduce_op = schema.NO_CODE
        self.flags = self.numel = self.tag = 0
        self.peer = -1
        self.meta = self.uneven = False
        self.inputs: list[int] = []
        self.outputs: list[int] = []


class Arguments:
    """Where an operator keeps what, found by the names in its schema; trailing defaults are not passed."""

    def __init__(self, op: str, schema_arguments: list[Any]) -> None:
        """Find the positions."""
        import torch

        names = [argument.name for argument in schema_arguments]
        self.p2p = op == "send" or op.startswith("recv")
        self._empty = "barrier" in op

        def first(*wanted: str) -> int:
            return next((i for i, name in enumerate(names) if name.startswith(wanted) and "split" not in name), -1)

        self._group = first("process_group")
        self._reduce_op = first("reduce_op")
        self._peer = first("root_rank", "dst", "src")
        self._tag = first("tag")
        self._async = first("async_op", "asyncOp")
        self._async_default = self._async >= 0 and bool(schema_arguments[self._async].default_value)
        self._splits = [
            names.index(name) if name in names else -1 for name in ("input_split_sizes", "output_split_sizes")
        ]
        self._outputs = first("output")
        self._inputs = max(first("input"), 0)
        self._unbox_group = torch._C._distributed_c10d.ProcessGroup.unbox
        self._dtypes = {
            dtype: code for code, (name, _) in enumerate(schema.DTYPES) if (dtype := getattr(torch, name, None))
        }

    def __call__(self, arguments: tuple[Any, ...]) -> Call:
        """Read one call."""
        call = Call()
        given = len(arguments)
        call.group = self._unbox_group(arguments[self._group])
        self._measure(call, arguments[self._inputs], call.inputs)
        if self._outputs >= 0:
            self._measure(call, arguments[self._outputs], call.outputs)
        if 0 <= self._peer < given:
            call.peer = int(arguments[self._peer])
        if 0 <= self._tag < given:
            call.tag = int(arguments[self._tag])
        if arguments[self._async] if 0 <= self._async < given else self._async_default:
            call.flags |= FLAG["async"]
        if 0 <= self._reduce_op < given:
            call.reduce_op = _reduce_op(arguments[self._reduce_op])
        if self._empty:
            call.dtype, call.inputs, call.outputs = schema.NO_CODE, [], []
        elif not self.p2p and (self._splits[0] >= 0 or len(call.inputs) > 1 or len(call.outputs) > 1):
            self._compare(call, arguments)
        call.numel = sum(call.inputs) or sum(call.outputs)
        return call

    def _compare(self, call: Call, arguments: tuple[Any, ...]) -> None:
        """Note whether sizes differ between peers or tensors."""
        sizes = [call.inputs, call.outputs]
        for i, position in enumerate(self._splits):
            if 0 <= position < len(arguments) and arguments[position]:
                sizes[i] = list(arguments[position])
        if any(len(set(one)) > 1 for one in sizes):
            call.uneven, call.inputs, call.outputs = True, *sizes

    def _measure(self, call: Call, value: Any, sizes: list[int]) -> None:
        if value.__class__ is list:
            for item in value:
                self._measure(call, item, sizes)
            return
        if call.dtype == schema.NO_CODE:
            call.dtype = self._dtypes.get(value.dtype, schema.NO_CODE)
            if not value.is_cpu:
                call.meta = value.is_meta
                call.flags |= FLAG["device"]
        sizes.append(int(value._nnz() if value.is_sparse else value.numel()))


def _reduce_op(boxed: Any) -> int:
    """Return the code of a reduction.

    The frame of torch.distributed's own function that makes the call holds the options in `opts`, which is read in a
    third of the time that the boxed object's method takes; calls from C++ have no such frame.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES_TO_CALLER):
        frame = frame.f_back if frame is not None else None
    if frame is not None and "opts" in frame.f_code.co_varnames:
        reduction = getattr(frame.f_locals.get("opts"), "reduceOp", None)
        if reduction is not None:
            return int(reduction.op)
    try:
        return int(boxed.op())
    except (AttributeError, RuntimeError):
        return schema.NO_CODE


FRAMES_TO_CALLER = 4
"""From Arguments.__call__ over the issuer, its fence and the kernel to who called the operator."""
METER_EVERY = 16
"""The cost of recording is metered on one operation in this many."""
