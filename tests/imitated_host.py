"""A host whose launcher and ranks are imitated: it writes what they would, record by record, and archives like them.

Every record has a value of its own in `numel`, and is completed in place some records after it was issued.
"""

import json
import time
from pathlib import Path

import numpy as np

from dtprof.launch.archiver import sealed_segments
from dtprof.records import paths, schema
from dtprof.records.rank_log import archive
from dtprof.records.rank_log.archive import RECORD_DTYPE

LATE = 100
"""Records after which one is completed."""


class ImitatedRank:
    """Writes segments through a mapping, as the hooks do."""

    def __init__(self, run: Path, rank: int, *, world_size: int, host: str) -> None:
        """Claim the folder, and open the first segment."""
        self.folder = run / paths.rank_folder_name(rank, 0)
        self.folder.mkdir(parents=True)
        self.rank, self.count = rank, 0
        self._world_size, self._host = world_size, host
        self._segment = -1
        self._say({"k": "process", "rank": rank, "host": host})
        self._next()

    def write(self, count: int) -> None:
        """Issue some records, and complete those issued long enough ago."""
        while count:
            room = schema.SEGMENT_CAPACITY - self._used
            if not room:
                self._next()
                continue
            part = min(count, room)
            rows = np.zeros(part, RECORD_DTYPE)
            rows["kind"], rows["state"] = schema.KIND["collective"], schema.STATE["issued"]
            rows["numel"] = rows["seq"] = np.arange(self.count, self.count + part)
            rows["issued_ns"] = 1_000_000 + 1000 * rows["seq"].astype(np.uint64)
            self._records[self._used : self._used + part] = rows
            self._used += part
            self._set("head", self._used)
            self.count += part
            count -= part
            self._complete(LATE)

    def end(self) -> None:
        """Complete all records."""
        self._complete(0)
        self._set("marks", schema.MARK["closed"])
        self._say({"k": "exit", "t_ns": 1, "how": "normal", "code": 0})

    def _complete(self, late: int) -> None:
        end = max(0, self._used - late)
        chosen = self._records[self._done : end]
        chosen["state"] = schema.STATE["done"]
        chosen["done_after"] = 500
        chosen["waits"], chosen["waited_from"], chosen["waited_for"] = 1, 100, 400
        self._done = max(self._done, end)

    def _next(self) -> None:
        if self._segment >= 0:
            self._complete(0)
            self._set("marks", schema.MARK["sealed"])
        self._segment += 1
        file = self.folder / paths.segment_name(self._segment)
        header = schema.pack_header(
            segment=self._segment,
            rank=self.rank,
            local_rank=self.rank,
            world_size=self._world_size,
            attempt=0,
            pid=1000 + self.rank,
            tap=1,
            opened_monotonic_ns=1_000_000,
            opened_realtime_ns=time.time_ns(),
            dropped=0,
            host=self._host,
            boot_id=f"boot-of-{self._host}",
            torch_version="2.13.0",
            dtprof_version="0",
        )
        file.write_bytes(header.ljust(schema.HEADER_SIZE, b"\0"))
        self._bytes = np.memmap(file, np.uint8, "r+", shape=(schema.SEGMENT_SIZE,))
        self._records = np.frombuffer(
            memoryview(self._bytes)[schema.HEADER_SIZE :], RECORD_DTYPE, schema.SEGMENT_CAPACITY
        )
        self._used = self._done = 0
        self._say({"k": "op", "id": self._segment + 1, "name": f"op-{self._segment}"})

    def _set(self, name: str, value: int) -> None:
        at = schema.HEADER_OFFSET[name]
        size = 8 if name == "head" else 4
        self._bytes[at : at + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)

    def _say(self, entry: dict[str, object]) -> None:
        with (self.folder / paths.STRINGS).open("ab") as stream:
            stream.write(json.dumps(entry).encode() + b"\n")


class ImitatedHost:
    """Writes the part of a run of one host."""

    def __init__(self, run: Path, *, host: str, ranks: range, world_size: int, job: str | None = None) -> None:
        """Write the manifest and begin the ranks."""
        self.run, self.host = run, host
        self.node = run / paths.node_folder_name(host)
        self.node.mkdir(parents=True)
        self.manifest = {
            "format_version": schema.FORMAT_VERSION,
            "command": ["torchrun", "train.py"],
            "hosts": [host],
            "boot_id": f"boot-of-{host}",
            "launcher_pid": 77,
            "job": job,
            "settings": {},
            "notes": [],
            "started_realtime_ns": time.time_ns(),
            "ended_realtime_ns": 0,
            "exit_status": None,
        }
        self._write_manifest()
        self.ranks = [ImitatedRank(run, rank, world_size=world_size, host=host) for rank in ranks]
        self.samples = 0

    def write(self, count: int) -> None:
        """Let every rank issue some records, and the launcher take a sample and archive what is sealed."""
        for rank in self.ranks:
            rank.write(count)
        self.samples += 1
        with (self.node / "samples.jsonl").open("ab") as stream:
            stream.write(json.dumps({"t": self.samples, "host": [1.5] * 16}).encode() + b"\n")
        for segment in sealed_segments(self.run):
            archive.archive_segment(segment)

    def end(self) -> None:
        """End the job well."""
        for rank in self.ranks:
            rank.end()
        self.manifest |= {"ended_realtime_ns": time.time_ns(), "exit_status": 0}
        self._write_manifest()

    def _write_manifest(self) -> None:
        draft = self.run / ".run.json.1"
        draft.write_text(json.dumps(self.manifest))
        draft.replace(self.run / paths.MANIFEST)


def records_of(folder: Path) -> np.ndarray:
    """Return all records in the folder of a rank, in the order of segments."""
    parts = []
    for file in paths.segment_files(folder):
        data = file.read_bytes()
        data = archive.unpack(data) if paths.is_archive(file) else data
        head = int.from_bytes(data[schema.HEADER_OFFSET["head"] :][:8], "little")
        rows = np.frombuffer(data, RECORD_DTYPE, min(head, schema.SEGMENT_CAPACITY), schema.HEADER_SIZE)
        parts.append(rows)
    return np.concatenate(parts) if parts else np.zeros(0, RECORD_DTYPE)


def differences(sent: Path, kept: Path) -> list[str]:
    """Return what a collected run lacks, has twice or has changed, in words; none where it is a true copy."""
    found = []
    for folder in sorted(sent.iterdir()):
        if paths.parse_rank_folder(folder.name):
            own, other = records_of(folder), records_of(kept / folder.name)
            if len(own) != len(other):
                found.append(f"{folder.name}: {len(own)} records sent, {len(other)} kept")
            elif own.tobytes() != other.tobytes():
                found.append(f"{folder.name}: {int((own != other).sum())} records differ")
        if folder.is_dir():
            found += [
                f"{folder.name}/{file.name} differs"
                for file in folder.glob("*.jsonl")
                if (kept / folder.name / file.name).read_bytes() != file.read_bytes()
            ]
    return found
