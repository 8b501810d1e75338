"""The event log of one process in Python: records in mapped segments, and the lines that explain their codes.

The same format as native/event_log.h writes. Operations, spans and samples claim one record each.
"""

import itertools
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns, time_ns
from types import FrameType
from typing import Any

from dtprof.capture import group_descriptions, string_entries
from dtprof.capture.call_sites import CallSites, CodeOwners
from dtprof.capture.python_hook.segment_retention import SegmentRetention
from dtprof.capture.python_hook.segment_writer import (
    AT,
    STATE,
    Segment,
    complete,
    pack_f32,
    pack_u16,
    pack_u32,
    pack_u64,
)
from dtprof.capture.python_hook.work_waits import poll, settle
from dtprof.capture.reopened_files import ReopenedFile
from dtprof.records import paths, schema
from dtprof.records.sites import Site

FLAG = schema.FLAG
PACK = schema.RECORD_STRUCT.pack_into
HEAD_AT = schema.HEADER_OFFSET["head"]
METER_EVERY = 16
"""The cost of recording is metered on one operation in this many: reading the clock is a good part of it."""


class GroupCounters:
    """Id and sequence numbers of one process group."""

    def __init__(self, group_id: int, gloo: bool) -> None:
        """Count operations from 0."""
        self.id = group_id
        self.gloo = gloo
        self.next_collective = itertools.count().__next__
        self.next_p2p = itertools.count().__next__


class ThreadLabels(threading.local):
    """Attribution labels of a thread."""

    def __init__(self) -> None:
        """Start without a label; Python calls this in each thread at its first use."""
        self.label = 0
        self.p2p_labels: deque[int] = deque()
        """Labels of the next point-to-point operations."""


class EventLog:
    """A `Recorder` in Python, less the hooks into operations."""

    def __init__(self, *, folder: Path, header: bytes, owners: CodeOwners, max_segments: int) -> None:
        """Open the first segment.

        Raises:
            OSError: the log cannot be created.
        """
        self._folder = folder
        self._header = header
        self._retention = SegmentRetention(folder, max_segments)
        self._strings: ReopenedFile | None = ReopenedFile(
            folder / paths.STRINGS, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        self._lock = threading.RLock()  # a signal handler may issue an operation in the middle of ours
        self._on = True
        self._moving = False
        self._segment = self._create(0)
        self._sites = CallSites(owners)
        self._frames: dict[Site, int] = {}
        self._names: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        self._on_group: Callable[[int, str], object] = lambda _id, _name: None
        self._groups: weakref.WeakKeyDictionary[Any, GroupCounters] = weakref.WeakKeyDictionary()
        self._group_ids = itertools.count().__next__
        self._sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._step = 0
        self._backward_site = 0
        self._labelled_sites: dict[tuple[int, int], int] = {}
        self._thread_labels = ThreadLabels()
        self._spans: dict[int, tuple[Segment, int, int]] = {}
        self._span_ids = itertools.count(1).__next__
        os.register_at_fork(after_in_child=self.off)

    def _create(self, number: int) -> Segment:
        segment = Segment(self._folder / paths.segment_name(number), self._header, number)
        memory, at = segment.memory, schema.HEADER_OFFSET
        pack_u32(memory, at["segment"], number)
        pack_u64(memory, at["opened_monotonic_ns"], monotonic_ns())
        pack_u64(memory, at["opened_realtime_ns"], time_ns())
        pack_u64(memory, at["dropped"], self._retention.dropped)
        return segment

    def _claim(self) -> tuple[Segment, int] | None:
        """Return a segment and the offset of a free record in it, or None when recording has stopped."""
        while self._on:
            segment = self._segment
            i = segment.claim()
            if i < schema.SEGMENT_CAPACITY:
                pack_u64(segment.memory, HEAD_AT, i + 1)
                return segment, schema.HEADER_SIZE + i * schema.RECORD_SIZE
            if not self._move_on(segment):
                self._retention.dropped += 1
                return None
        return None

    def _move_on(self, full: Segment) -> bool:
        """Continue in a new segment; return False in a signal handler that interrupted this thread in here."""
        with self._lock:
            if self._segment is not full or not self._on:
                return True
            if self._moving:
                return False
            self._moving = True
            try:
                self._retention.retire(full)
                self._segment = self._create(full.number + 1)
            except (OSError, ValueError):
                full.mark(schema.MARK["truncated"])  # the launcher warns the user
                self._on = False
            finally:
                self._moving = False
            return True

    def write_entry(self, line: str) -> None:
        """Append a line to the strings file."""
        if self._strings is None:
            return
        data = line.encode() + b"\n"
        try:
            complete = os.write(self._strings.descriptor(), data) == len(data)
        except OSError:
            complete = False
        if not complete:
            self._segment.mark(schema.MARK["truncated"])

    def _declare(self, kind: str, entry_id: int, **fields: object) -> None:
        self.write_entry(string_entries.entry(kind, id=entry_id, **fields))

    def on_group(self, call: Callable[[int, str], object]) -> None:
        """Call this with id and name of each new process group."""
        self._on_group = call

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
            self._declare_site(site_id, new)
        return site_id

    def _declare_site(self, site_id: int, new: Site) -> None:
        more: dict[str, object] = {"package": new.package} if new.package else {}
        if new.callers:
            more["callers"] = [self._frame_id(caller) for caller in new.callers]
        self._declare("site", site_id, file=new.file, line=new.line, function=new.function, api=new.api, **more)

    def _frame_id(self, caller: Site) -> int:
        with self._lock:
            known = self._frames.get(caller)
            if known is None:
                known = self._frames[caller] = len(self._frames) + 1
                self._declare("frame", known, file=caller.file, line=caller.line, function=caller.function)
        return known

    def sizes_id(self, inputs: list[int], outputs: list[int]) -> int:
        """Return the id of sizes that differ between peers or tensors, declaring new ones."""
        key = (tuple(inputs), tuple(outputs))
        known = self._sizes.get(key)
        if known is None:
            if len(self._sizes) >= schema.MAX_TABLE_ENTRIES:
                return -1 - (hash(key) & 0x3FFFFFFF)
            known = self._sizes.setdefault(key, len(self._sizes) + 1)
            self._declare("sizes", known, inputs=inputs, outputs=outputs)
        return known

    def _new_group(self, process_group: Any) -> GroupCounters:
        new = GroupCounters(
            min(self._group_ids(), schema.MAX_TABLE_ENTRIES), group_descriptions.uses_gloo(process_group)
        )
        self._groups[process_group] = new
        self.write_entry(group_descriptions.first_entry(new.id, process_group))
        self._on_group(new.id, group_descriptions.name_of(process_group))
        return new

    def _plain(
        self, kind: int, op: int, value: int, site: int, issued: int, stage: int = -1, microbatch: int = 0
    ) -> tuple[Segment, int] | None:
        claimed = self._claim()
        if claimed is None:
            return None
        segment, at = claimed
        thread = self._threads.get(threading.get_ident()) or self._new_thread()
        head = (0, kind, schema.NO_CODE, schema.NO_CODE, op, thread, 0, 0, 0, 0, stage, microbatch, site)
        PACK(segment.memory, at, *head, self._step, issued, value, 0.0, 0.0, 0.0, 0.0)
        segment.memory[at] = STATE["issued"]
        return claimed

    def begin_span(self, op: int, is_backward: bool, stage: int = -1, microbatch: int = 0) -> int:
        """Record that a phase begins."""
        issued = monotonic_ns()
        poll()
        site = self._labelled(self._site(), self._thread_labels.label)
        if is_backward:
            self._backward_site = site
        claimed = self._plain(schema.KIND["span"], op, 0, site, issued, stage, microbatch)
        if claimed is None:
            return 0
        handle = self._span_ids()
        self._spans[handle] = (*claimed, issued)
        claimed[0].add("capture_ns", monotonic_ns() - issued)
        return handle

    def end_span(self, handle: int, failed: bool, flags: int, is_backward: bool) -> None:
        """Record that the phase ended."""
        span = self._spans.pop(handle, None)
        if span is None or not self._on:
            return
        segment, at, issued = span
        poll()
        if is_backward:
            self._backward_site = 0
        if flags:
            segment.memory[at + AT["flags"]] |= flags
        complete(segment.memory, at, issued, STATE["failed"] if failed else STATE["done"])

    def take_last_operation(self) -> None:
        """Return None: only the native hook follows devices."""

    def begin_wait(self, operation: object) -> int:  # noqa: ARG002
        """Record nothing."""
        return 0

    def past_span(self, op: int, begin_ns: int, end_ns: int) -> None:
        """Record a phase that has ended, by its times."""
        claimed = self._plain(schema.KIND["span"], op, 0, 0, begin_ns)
        if claimed is not None:
            segment, at = claimed
            pack_f32(segment.memory, at + AT["done_after"], end_ns - begin_ns)
            segment.memory[at] = STATE["done"]

    def device_time(self, group: int, taken_ns: int, duration_ns: int, seen_ns: int) -> None:
        """Record how long an operation took on its device."""
        claimed = self._plain(schema.KIND["device_time"], 0, duration_ns, 0, taken_ns)
        if claimed is not None:
            segment, at = claimed
            pack_u16(segment.memory, at + AT["group"], group)
            pack_f32(segment.memory, at + AT["done_after"], seen_ns - taken_ns)
            segment.memory[at] = STATE["done"]

    def sample(self, op: int, value: int) -> None:
        """Record one value now."""
        issued = monotonic_ns()
        claimed = self._plain(schema.KIND["sample"], op, value, 0, issued)
        if claimed is not None:
            claimed[0].memory[claimed[1]] = STATE["done"]

    def set_label(self, label: int) -> int:
        """Attribute the operations that this thread issues to a label; return the label before."""
        before, self._thread_labels.label = self._thread_labels.label, label
        return before

    def label_next_p2p(self, labels: list[int]) -> None:
        """Label the point-to-point operations that this thread issues next."""
        self._thread_labels.p2p_labels = deque(labels)

    def _labelled(self, site: int, label: int) -> int:
        """Return the id of a site with a label; the site itself for label 0."""
        if label == 0:
            return site
        known = self._labelled_sites.get((site, label))
        if known is None:
            with self._lock:
                new = schema.FIRST_LABELLED_SITE + len(self._labelled_sites)
                known = self._labelled_sites.setdefault((site, label), new)
            if known == new:
                self.write_entry(string_entries.entry("site", id=known, of=site, label=label))
        return known

    def advance_step(self) -> int:
        """Count an optimizer step."""
        self._step += 1
        return self._step

    def close_log(self) -> None:
        """Mark the log as complete: the process exits in order."""
        settle()
        self._segment.mark(schema.MARK["closed"])

    def off(self) -> None:
        """Stop recording: a forked process must not write to the files of its parent."""
        self._on = False
        self._strings = None

    def writer(self, name: str, *, p2p: bool) -> Callable[..., tuple[mmap.mmap, int] | None]:
        """Return the function that writes the record of an operation at its issue.

        It takes the time of issue, the frame of the caller, the group, and the fields of the record. It returns memory
        and offset of the record, or None when recording has stopped.
        """
        op = self.name_id(name)
        kind = schema.KIND["p2p"] if p2p else schema.KIND["collective"]
        metered = itertools.count(1).__next__
        threads, thread_id, find_site, thread_labels = (
            self._threads,
            threading.get_ident,
            self._sites.find,
            self._thread_labels,
        )

        def write(
            issued: int,
            caller: FrameType | None,
            group: GroupCounters,
            dtype: int,
            reduce_op: int,
            flags: int,
            peer: int,
            tag: int,
            numel: int,
        ) -> tuple[mmap.mmap, int] | None:
            site, new_site = find_site(caller)
            if new_site is not None:
                self._declare_site(site, new_site)
            if site == 0 and self._backward_site:
                site, flags = self._backward_site, flags | FLAG["inferred_site"]
            label = thread_labels.p2p_labels.popleft() if p2p and thread_labels.p2p_labels else thread_labels.label
            if label:
                site = self._labelled(site, label)
            thread = threads.get(thread_id()) or self._new_thread()
            # `_claim`, inlined: each Python call costs.
            segment = self._segment
            i = segment.claim()
            memory = segment.memory
            if i < schema.SEGMENT_CAPACITY:
                pack_u64(memory, HEAD_AT, i + 1)
                at = schema.HEADER_SIZE + i * schema.RECORD_SIZE
            else:
                claimed = self._claim()
                if claimed is None:
                    return None
                segment, at = claimed
                memory = segment.memory
            seq = group.next_p2p() if p2p else group.next_collective()
            head = (0, kind, dtype, reduce_op, op, thread, group.id, flags, 0, seq, peer, tag, site)
            PACK(memory, at, *head, self._step, issued, numel, 0.0, 0.0, 0.0, 0.0)
            memory[at] = 1  # issued: written last, so that a reader sees a whole record or none
            if metered() % METER_EVERY == 0:
                segment.add("capture_ns", (monotonic_ns() - issued) * METER_EVERY)
            return memory, at

        return write

    def recording(self) -> bool:
        """Say whether operations are being recorded."""
        return self._on

    def group(self, process_group: Any) -> GroupCounters:
        """Return the state of a process group, declaring a new one."""
        return self._groups.get(process_group) or self._new_group(process_group)
