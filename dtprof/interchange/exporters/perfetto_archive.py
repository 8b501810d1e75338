"""A TAR of Perfetto's format with a file a host, and the manifest that tells Perfetto how their clocks relate.

Each file holds the ranks of a host on the clock of that host, so that traces of other tools from the same host can be
put beside it. https://perfetto.dev/docs/reference/perfetto-manifest defines the manifest. Perfetto joins slices by
arrows within a file only.
"""

import io
import json
import re
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtprof.analysis.timeline.operation_detail import RankDetail, RunDetail, read_ranks
from dtprof.interchange.exporters.exported_steps import choose_window
from dtprof.interchange.exporters.perfetto_trace import MAX_EVENTS, rank_packets
from dtprof.interchange.exporters.trace_tracks import build_tracks

MANIFEST = "perfetto_manifest.json"
CLOCK = "BOOTTIME"
"""Times are of CLOCK_MONOTONIC, which shows the same on a host that was never suspended."""
MAX_NAME = 80
"""Characters of a host in the name of its file; Perfetto's page takes names of 99."""
ARROWS = "arrows join ranks of the same host only, which is as far as Perfetto follows them in an archive"
BY_WALL_CLOCK = "where clocks are not aligned, hosts are placed by their wall clocks"


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """The file of a host, and how its clock is turned into that of the run."""

    name: str
    host: str
    offset_ns: int | None  # to add to its times; None: not known
    to_wall_ns: int  # to add to times of the run's clock, or of its own where no offset is known


def write_perfetto_archive(run: RunDetail, path: Path, *, steps: tuple[int, int] | None = None) -> list[str]:
    """Write the file; return remarks on omitted events."""
    window = choose_window(run, steps=steps, max_events=MAX_EVENTS)
    left_out = 0
    hosts: dict[str, HostFile] = {}  # by boot id
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".dtprof-") as scratch:
        for rank in read_ranks(run):
            boot = rank.boot_id
            if boot not in hosts:
                hosts[boot] = _find_host(run, rank, boot, taken=[host.name for host in hosts.values()])
            since, until = window.bounds(rank)
            tracks = build_tracks(rank, since_ns=since, until_ns=until)
            left_out += tracks.left_out
            with (Path(scratch) / hosts[boot].name).open("ab") as file:
                file.write(rank_packets(tracks.moved(-(hosts[boot].offset_ns or 0)), has_clocks=False))
        ordered = sorted(hosts, key=lambda boot: boot != run.surveys.clocks.reference)
        manifest = describe_hosts(run.run.name, [hosts[boot] for boot in ordered])
        with tarfile.open(path, "w") as archive:
            text = json.dumps(manifest, indent=1).encode()
            head = tarfile.TarInfo(MANIFEST)
            head.size, head.mtime = len(text), int(time.time())
            archive.addfile(head, io.BytesIO(text))
            for boot in ordered:
                archive.add(Path(scratch) / hosts[boot].name, hosts[boot].name)
    said = window.describe(left_out)
    if len(hosts) > 1:
        said.append(ARROWS)
    return [*said, BY_WALL_CLOCK] if any(host.offset_ns is None for host in hosts.values()) else said


def describe_hosts(run: str, hosts: Sequence[HostFile]) -> dict[str, object]:
    """Return the manifest: the clock of the time line, and the offsets of the other clocks.

    Parameters:
        hosts: the first is the reference.
    """
    files: list[dict[str, object]] = []
    for host in hosts:
        entry: dict[str, object] = {"path": host.name, "machine": {"name": host.host}}
        if host is not hosts[0]:
            offset_ns = host.to_wall_ns - hosts[0].to_wall_ns if host.offset_ns is None else host.offset_ns
            offset_ns -= hosts[0].offset_ns or 0  # the reference itself may have left no ranks
            reference = {"file": hosts[0].name, "clock": CLOCK}
            entry["clocks"] = {"clock": CLOCK, "sync_to": reference, "offset_ns": offset_ns}
        files.append(entry)
    manifest: dict[str, object] = {"version": 1, "attributes": {"dtprof.run": run}, "files": files}
    if hosts:
        manifest["trace_time"] = {"clock": CLOCK, "file": hosts[0].name}
    return {"perfetto_manifest": manifest}


def _find_host(run: RunDetail, rank: RankDetail, boot: str, *, taken: Sequence[str]) -> HostFile:
    tables, clocks = rank.tables, run.surveys.clocks
    offset_ns: int | None = 0
    if tables.boot_id != boot:
        # Offsets are known by times of the host; this converges at once, since clocks drift by millionths.
        middle = (tables.first_ns + tables.last_ns) // 2
        offset_ns = 0
        for _ in range(3):
            offset_ns = int(clocks.offset(boot, np.array([middle - offset_ns], np.int64))[0])
    elif boot != (clocks.reference or run.surveys.facts[0].boot_id):
        offset_ns = None
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", tables.host)[:MAX_NAME].lstrip(".") or "host"
    names = (f"{stem}{suffix}.pftrace" for suffix in ("", *(f"-{count}" for count in range(2, len(taken) + 2))))
    name = next(candidate for candidate in names if candidate not in taken)
    host = tables.host or name.removesuffix(".pftrace")
    return HostFile(name=name, host=host, offset_ns=offset_ns, to_wall_ns=tables.monotonic_to_realtime_ns)
