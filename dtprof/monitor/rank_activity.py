"""The activity of each rank of a running job at this moment, from its newest records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

import numpy as np

from dtprof.analysis.rank_exits import RankEnd, find_end
from dtprof.analysis.steps.step_boundaries import number_marks
from dtprof.job.axes import purpose_of
from dtprof.job.stalls import SLOW_AFTER_NS, RankPhase, phase_of
from dtprof.monitor.device_operations import OpenDeviceOperations
from dtprof.records import events, schema
from dtprof.records.run_follower import Growth
from dtprof.records.tables import Array, ProcessExit, RankTables

MEMORY_SAMPLES = (events.CUDA_ALLOCATED_BYTES, events.RSS_BYTES)
"""Samples that may give the memory of a rank; the first one that is sampled does."""


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """One rank at this moment."""

    rank: int
    host: str
    end: RankEnd
    step: int  # optimizer steps that it had ended by its newest record
    doing: str  # "all_reduce #17 of dp", "all_reduce #17 of dp on its device", "backward"; empty between phases
    blocks: bool  # it is inside an operation, or waits for one
    where: str  # "train.py:42"; empty where that is not known
    since_ns: int | None  # how long it has been at that, or since its newest record; None where no clock tells
    quiet_ns: int | None  # since its newest record; None where no clock tells
    memory_bytes: int | None
    phase: RankPhase = RankPhase.STEPS
    joins: bool = False  # it is in init_process_group or new_group, in which others must come


class RankActivities:
    """Keeps the known state of every rank between polls."""

    def __init__(self) -> None:
        """Know no rank."""
        self._newest_ns: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._before_marks: dict[int, int] = {}  # steps that were counted before the program marked them itself
        self._memory: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._devices: dict[int, OpenDeviceOperations] = {}

    def take(
        self,
        growths: Mapping[int, Growth],
        *,
        exit_of: Callable[[str, int], ProcessExit | None],
        job_has_ended: bool,
        boot_id: str,
    ) -> list[RankActivity]:
        """Return the state of all ranks.

        Parameters:
            growths: of every rank, as a RunFollower gives them.
            exit_of: how a process of a host ended.
            job_has_ended: nothing can come any more.
            boot_id: of this host, whose clock ranks with the same one share.
        """
        now_ns = monotonic_ns()
        found = []
        for rank, growth in sorted(growths.items()):
            known = growth.tables
            if self._attempts.get(rank) != known.attempt:
                self._attempts[rank] = known.attempt
                for values in (self._newest_ns, self._steps, self._before_marks, self._memory):
                    values.pop(rank, None)
            self._update(rank, growth)
            end = find_end(
                exit_seen=exit_of(known.host, known.pid),
                ended_ns=known.ended_ns,
                has_exception=bool(known.exceptions),
                job_has_ended=job_has_ended,
            )
            on_device = self._devices.setdefault(rank, OpenDeviceOperations())
            open_on_device = on_device.take(growth)
            doing, blocks, where, from_ns = _doing(growth)
            # A device always has something to do; what it is in matters once the rank makes no progress.
            is_quiet = known.boot_id == boot_id and now_ns - self._newest_ns[rank] > SLOW_AFTER_NS
            if not blocks and is_quiet and len(front := on_device.front(open_on_device)):
                doing, blocks, where, from_ns = _in_operation(front[0], known, " on its device")
            open_phases = [_name(int(op), known) for op in growth.open_spans["op"].tolist()]
            step = self._steps.get(rank, 0) - self._before_marks.get(rank, 0)
            newest_ns = self._newest_ns[rank]
            on_this_clock = known.boot_id == boot_id and end.is_running
            found.append(
                RankActivity(
                    rank=rank,
                    host=known.host,
                    end=end,
                    step=step,
                    doing=doing,
                    blocks=blocks,
                    where=where,
                    since_ns=max(0, now_ns - (from_ns or newest_ns)) if on_this_clock else None,
                    quiet_ns=max(0, now_ns - newest_ns) if on_this_clock else None,
                    memory_bytes=self._memory.get(rank),
                    phase=phase_of(open_phases, steps=step),
                    joins=events.INIT in open_phases or events.NEW_GROUP in open_phases,
                )
            )
        return found

    def _update(self, rank: int, growth: Growth) -> None:
        known = growth.tables
        parts: tuple[tuple[Array, tuple[str, ...]], ...] = (
            (known.operations, ("issued_ns", "returned_ns", "done_ns")),
            (known.spans, ("begin_ns", "end_ns")),
            (known.samples, ("t_ns",)),
            (growth.open_operations, ("issued_ns", "returned_ns")),
            (growth.open_spans, ("begin_ns",)),
            (known.device_intervals, ("begin_ns", "end_ns")),
            (growth.open_device_intervals, ("begin_ns",)),
        )
        times = [int(rows[name].max()) for rows, names in parts if len(rows) for name in names]
        steps = [int(rows["step"].max()) for rows, _ in parts if len(rows)]
        self._newest_ns[rank] = max([self._newest_ns.get(rank, known.first_ns), *times])
        self._steps[rank] = max([self._steps.get(rank, 0), *steps])
        if rank not in self._before_marks and events.STEP in known.ops:
            marks = known.spans[known.spans["op"] == known.ops.index(events.STEP)]
            if len(marks):
                self._before_marks[rank] = int(marks["step"][0]) - int(number_marks(marks)[0]) + 1
        for name in MEMORY_SAMPLES:
            if name in known.ops and len(rows := known.samples[known.samples["op"] == known.ops.index(name)]):
                self._memory[rank] = int(rows["value"][-1])
                break


def _doing(growth: Growth) -> tuple[str, bool, str, int]:
    """Return the innermost activity of a rank, whether it blocks, its line, and its begin; 0 where there is none."""
    known, open_ = growth.tables, growth.open_operations
    inside = (open_["state"] == schema.STATE["issued"]) | (
        (open_["state"] == schema.STATE["returned"]) & (open_["waits"] > 0)
    )
    if inside.any():
        return _in_operation(open_[np.flatnonzero(inside)[-1]], known)
    if len(growth.open_spans):
        row = growth.open_spans[-1]
        return _name(int(row["op"]), known), False, _name_site(int(row["site"]), known), int(row["begin_ns"])
    return "", False, "", 0


def _in_operation(row: Array, known: RankTables, where: str = "") -> tuple[str, bool, str, int]:
    """Return that an operation blocks a rank, at its line, since it was issued."""
    name = f"{_name_operation(row, known)}{where}"
    return name, True, _name_site(int(row["site"]), known), int(row["issued_ns"])


def _name_operation(row: Array, known: RankTables) -> str:
    group = known.groups.get(int(row["group"]))
    of = f" of {purpose_of(group) or group.name}" if group is not None else ""
    return f"{_name(int(row['op']), known)} #{int(row['seq'])}{of}"


def _name(op: int, known: RankTables) -> str:
    return known.ops[op].removeprefix(events.USER_PHASE) if op < len(known.ops) else "?"


def _name_site(number: int, known: RankTables) -> str:
    site = known.sites.get(number)
    return f"{Path(site.file).name}:{site.line}" if site is not None and site.file else ""
