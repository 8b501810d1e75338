"""Watch a running job from the headers of its records: notice that it has stalled, and that a disk is full.

Headers alone are read, without numpy: a launcher polls twice a second for as long as the job runs.
"""

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtprof.fence import REPORTED, fenced, is_first
from dtprof.job.stalls import INTERVAL_NS, Pauses, RankPhase, stall_threshold
from dtprof.launch import stack_sampler
from dtprof.launch.rendezvous_waits import RendezvousWatch
from dtprof.launch.unjoined_processes import find_starting
from dtprof.records import paths, schema, writer
from dtprof.records.rank_log.strings import json_lines

_READ = schema.HEADER_STRUCT.size
_AT = schema.HEADER_OFFSET
RECHECK_SHARE = 0.25
POLL_INTERVAL_S = 5.0
"""Longest pause between two polls of a launcher that has started no rank."""
STREAM = b'{"k":"stream"'


@dataclass(frozen=True, kw_only=True)
class StallVerdict:
    """Result of a diagnosis of a stalled job."""

    is_hang: bool
    text: str
    is_unclear: bool = False  # the records do not show why it has stalled: reported, and no hang
    is_early: bool = False  # a rank that the others wait for works on its first step
    headline: str = ""  # what is said without figures that differ from poll to poll


DiagnoseStall = Callable[[Path], StallVerdict]
"""Reads a run and diagnoses the stall; `is_hang` is False where ranks only compute for long."""


@dataclass(kw_only=True)
class LogProgress:
    """How far one rank's log had come at the last poll."""

    heads: dict[int, int] = field(default_factory=dict)  # records claimed, by number of the segment
    pid: int = 0
    truncated: bool = False


class Watcher:
    """Reads the newest segment header of every rank of this host each time it is ticked."""

    def __init__(
        self,
        *,
        run: Path,
        hang_after_s: float,
        diagnose: DiagnoseStall,
        say: Callable[[str], None],
        boot_id: str | None = None,
        on_hang: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock of progress now; 0 seconds turns the hang alarm off.

        With a boot id, ranks of hosts with another one are left to the launchers there. `on_hang` is called once a new
        hang has been reported.
        """
        self._boot_id = boot_id.encode()[:39] if boot_id is not None else None
        self._run = run
        self._hang_after_s = hang_after_s
        self._diagnose = diagnose
        self._say = say
        self._on_hang = on_hang
        self._clock = clock
        self._last_progress = self._last_diagnosis = clock()
        self._ranks: dict[str, LogProgress] = {}
        self._pauses = Pauses()
        self._reported_truncated = False
        self._reported_hangs: set[str] = set()
        self._reported_unclear = False
        self._rendezvous = RendezvousWatch(run, run / paths.node_folder_name(writer.host_name()))
        self._next_poll = self._last_progress
        self.hang: StallVerdict | None = None
        self.hang_detected_ns: int | None = None
        self.may_yet_start = False
        """The hang is a rendezvous to which nodes may still come: it is reported, and no reason yet to stop the job."""

    @property
    def pids(self) -> list[int]:
        """Processes that write a log in this run."""
        return [progress.pid for progress in list(self._ranks.values()) if progress.pid]

    @property
    def truncated(self) -> bool:
        """Say whether any rank had to stop recording."""
        return any(progress.truncated for progress in list(self._ranks.values()))

    def tick(self) -> None:
        """Poll the headers once; diagnose the job where it has stalled."""
        self._poll_progress()
        now = self._clock()
        self._report_truncated("recording stopped; the job goes on, the run is marked truncated")
        quiet_s = now - self._last_progress
        if self._hang_after_s and not self._ranks:
            self._watch_rendezvous(now)
            return
        self.may_yet_start = False
        if not self._hang_after_s or quiet_s < self._threshold_s():
            return
        # A hang is diagnosed again each time it has lasted twice as long: it may come to another verdict.
        pause_s = self._hang_after_s * RECHECK_SHARE if self.hang is None else quiet_s / 2
        if now - self._last_diagnosis < pause_s and self._last_diagnosis > self._last_progress:
            return
        self._last_diagnosis = now
        if not self._all_have_ended():
            self._examine(quiet_s)

    def _poll_progress(self) -> bool:
        """Poll the headers; return whether the job makes progress."""
        moved = self._poll()
        if moved:
            now = self._clock()
            self._pauses.add([int(now * 1e9) // INTERVAL_NS])
            self._last_progress = now
            self.hang = None
        return moved

    def _threshold_s(self, phase: RankPhase = RankPhase.STEPS) -> float:
        """Return the stall threshold where the ranks that others wait for are in a phase."""
        return stall_threshold(hang_after_s=self._hang_after_s, usual_pause_s=self._pauses.usual_s, phase=phase).seconds

    def _watch_rendezvous(self, now: float) -> None:
        """Diagnose a launcher that has been in a rendezvous for the threshold; what it did before is its own affair."""
        if now < self._next_poll:
            return
        threshold_s = self._threshold_s()
        self._next_poll = now + min(POLL_INTERVAL_S, threshold_s * RECHECK_SHARE)
        waited_s = self._rendezvous.poll(now)
        self.may_yet_start = waited_s < self._threshold_s(RankPhase.FIRST_STEP)
        if not waited_s:
            self.hang = None
        if waited_s < threshold_s or (self.hang is not None and now - self._last_diagnosis < waited_s / 2):
            return
        self._last_diagnosis = now
        self._rendezvous.write()
        if self._take(self._diagnose(self._run), f"no rank has started, after {waited_s:.0f} s in a rendezvous"):
            self._on_hang()

    def _all_have_ended(self) -> bool:
        """Say whether the launcher under this one saw the end of every rank, and itself takes its time to end."""
        rows = json_lines(self._run / paths.node_folder_name(writer.host_name()) / paths.EXITS, [])
        return {progress.pid for progress in self._ranks.values()} <= {row.get("pid") for row in rows}

    @fenced("the last poll of the job's records", "failed")
    def poll_last(self) -> None:
        """Poll once more after the job has ended: events since the last tick."""
        self._poll()
        self._report_truncated("recording stopped before the job ended; the run is marked truncated")

    def _report_truncated(self, consequence: str) -> None:
        if self.truncated and not self._reported_truncated:
            self._reported_truncated = True
            self._say(f"the disk is full or not writable: {consequence}")

    def _examine(self, quiet_s: float) -> None:
        stalled_since = self._last_progress
        self._sample_stacks(native=self.hang is not None and self._follows_devices())
        if self._last_progress != stalled_since:
            return  # ranks went on while their stacks were taken: the stall is over
        verdict = self._diagnose(self._run)
        if verdict.is_early and quiet_s < self._threshold_s(RankPhase.FIRST_STEP):
            verdict = replace(verdict, is_hang=False)
        is_new = self._take(verdict, f"no rank has made progress for {quiet_s:.0f} s")
        # In which call of its driver a host is blocked only native frames tell, which take a second or more to read:
        # after the report, and before the job is stopped.
        if is_new:
            if self._follows_devices():
                self._sample_stacks(native=True)
            self._on_hang()

    def _take(self, verdict: StallVerdict, seen: str) -> bool:
        """Keep a verdict and report it where it is a new one; return whether the hang is new."""
        if not verdict.is_hang:
            self.hang = None
            if verdict.is_unclear and not self._reported_unclear:
                self._reported_unclear = True
                self._say(f"{seen}\n{verdict.text}")
            return False
        is_new = self.hang is None
        if is_new:
            self.hang_detected_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.hang = verdict
        headline = verdict.headline or verdict.text
        if headline not in self._reported_hangs:
            self._reported_hangs.add(headline)
            if is_first(self._run, headline, mark=REPORTED):
                self._say(f"{seen}\n{verdict.text}")
        return is_new

    def _sample_stacks(self, *, native: bool = False) -> None:
        recorded = {found[0] for found in map(paths.parse_rank_folder, list(self._ranks)) if found is not None}
        stack_sampler.sample(
            self.pids,
            self._run / paths.node_folder_name(writer.host_name()),
            native=native,
            starting=find_starting(self._run, recorded=recorded),
            # Of a stall that ends meanwhile, the stacks taken earlier in it say what it was.
            is_current=lambda: not self._poll_progress(),
        )

    def _follows_devices(self) -> bool:
        """Say whether a rank has declared a stream of a device."""
        for folder in list(self._ranks):
            try:
                if STREAM in (self._run / folder / paths.STRINGS).read_bytes():
                    return True
            except OSError:
                continue
        return False

    def _poll(self) -> bool:
        """Read the headers; return whether anything moved since the last poll."""
        moved = False
        for folder in self._run.iterdir():
            if paths.parse_rank_folder(folder.name) is None:
                continue
            # The newest may be a spare, opened before the one that is written to is full.
            segments = paths.segment_files(folder)[-2:]
            if folder.name not in self._ranks and self._is_elsewhere(segments):
                continue
            known = self._ranks.setdefault(folder.name, LogProgress())
            for segment in segments:
                moved |= _read(segment, known)
        return moved

    def _is_elsewhere(self, segments: list[Path]) -> bool:
        """Say whether a rank runs on another host, or on an unknown one so far."""
        if self._boot_id is None:
            return False
        for segment in segments:
            try:
                with segment.open("rb", buffering=0) as file:
                    header = file.read(_READ)
            except OSError:
                continue
            if len(header) == _READ:
                (boot_id,) = struct.unpack_from("<40s", header, _AT["boot_id"])
                return bool(boot_id.rstrip(b"\0") != self._boot_id)
        return True


def _read(segment: Path, known: LogProgress) -> bool:
    """Update the known progress of a rank from its newest header; return whether it changed."""
    try:
        with segment.open("rb", buffering=0) as file:
            header = file.read(_READ)
    except OSError:
        return False
    if len(header) < _READ:
        return False
    (head,) = struct.unpack_from("<Q", header, _AT["head"])
    (number,) = struct.unpack_from("<I", header, _AT["segment"])
    (marks,) = struct.unpack_from("<I", header, _AT["marks"])
    (known.pid,) = struct.unpack_from("<I", header, _AT["pid"])
    known.truncated |= bool(marks & schema.MARK["truncated"])
    changed: bool = head != known.heads.get(number)
    known.heads[number] = head
    return changed
