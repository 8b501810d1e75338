"""Bandwidths of a cluster, kept from one `dtprof doctor` to the next, and read by `dtprof plan`.

One file a cluster, in the user's data directory: the newest measurements, the last at the end.
"""

import hashlib
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.analysis.doctor.doctor_judgement import DoctorResult, Earlier
from dtprof.errors import OutputError, UsageError
from dtprof.records import writer

SCHEMA = 1
MOST_KEPT = 20
LARGE_BYTES = 1 << 20
"""Collectives of fewer bytes say nothing about a bandwidth."""


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Bus bandwidths of a cluster in bytes/s, for plans; None where no measurement has them."""

    link_bytes_per_s: float | None
    network_bytes_per_s: float | None


def default_file(hosts: Sequence[str], environment: Mapping[str, str]) -> Path:
    """Return the file of a cluster: named by the scheduler, else by its hosts."""
    base = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    name = environment.get("SLURM_CLUSTER_NAME") or ""
    if not name:
        ordered = sorted(hosts)
        mark = hashlib.sha256("\n".join(ordered).encode()).hexdigest()[:8]
        name = ordered[0] if len(ordered) == 1 else f"{ordered[0]}-and-{len(ordered) - 1}-{mark}"
    return Path(base) / "dtprof" / "clusters" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name).lstrip('.')[:80]}.json"


def read_earlier(file: Path) -> list[dict[str, Any]]:
    """Return the measurements that a file keeps; none where there is no file.

    Raises:
        UsageError: it is no file of a cluster.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} cannot be read as bandwidths of a cluster "
            f"({getattr(error, 'strerror', None) or error}); expected a "
            "file that dtprof doctor wrote"
        ) from error
    found = document.get("measurements") if isinstance(document, dict) else None
    if not isinstance(found, list) or document.get("schema") != SCHEMA:
        raise UsageError(
            f"{file} holds no bandwidths of a cluster; expected a file that dtprof doctor wrote (schema {SCHEMA})"
        )
    return [one for one in found if isinstance(one, dict)]


def earlier_of(measurements: Sequence[Mapping[str, Any]]) -> Earlier:
    """Return medians over measurements, by back end, sending and receiving host."""
    rates: dict[tuple[str, str, str], list[float]] = {}
    for measurement in measurements:
        for pair in measurement.get("pairs", ()):
            if isinstance(pair, dict) and isinstance(pair.get("gb_per_s"), int | float):
                key = (str(pair.get("backend")), str(pair.get("from")), str(pair.get("to")))
                rates.setdefault(key, []).append(float(pair["gb_per_s"]))
    return Earlier(gb_per_s={key: statistics.median(values) for key, values in rates.items()}, count=len(measurements))


def keep(file: Path, measurements: Sequence[Mapping[str, Any]], result: DoctorResult) -> None:
    """Add a measurement, and forget the oldest beyond MOST_KEPT.

    Raises:
        OutputError: the file cannot be written.
    """
    best: dict[tuple[str, str, str], list[float]] = {}
    for rate in result.pairs:
        if rate.gb_per_s is not None:
            best.setdefault((rate.backend, rate.sender_host, rate.receiver_host), []).append(rate.gb_per_s)
    added = {
        "measured_realtime_ns": time.time_ns(),
        "hosts": list(result.hosts),
        "ranks": result.world_size,
        "pairs": [
            {"backend": backend, "from": sender, "to": receiver, "gb_per_s": max(rates)}
            for (backend, sender, receiver), rates in sorted(best.items())
        ],
        "bandwidth": [
            {
                "backend": row.backend,
                "op": row.op,
                "bytes": row.nbytes,
                "ranks": len(row.ranks),
                "hosts": row.hosts,
                "busbw_gb_per_s": row.busbw_gb_per_s,
            }
            for row in result.bandwidth
        ],
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        writer.write_json(file, {"schema": SCHEMA, "measurements": [*measurements, added][-MOST_KEPT:]})
    except OSError as error:
        raise OutputError(f"{file} cannot be written ({error.strerror}); give another with --matrix FILE") from error


def read_link_rates(file: Path) -> LinkRates:
    """Return the bandwidths that the newest measurement of a cluster gives plans.

    NCCL's where it was measured, else gloo's: the best bus bandwidth of large collectives within a host, and between
    hosts.

    Raises:
        UsageError: it is no file of a cluster.
    """
    measurements = read_earlier(file)
    within: list[float] = []
    between: list[float] = []
    rows = [row for row in (measurements[-1].get("bandwidth", ()) if measurements else ()) if isinstance(row, dict)]
    backends = {row.get("backend") for row in rows}
    chosen = "nccl" if "nccl" in backends else "gloo"
    for row in rows:
        rate, nbytes, hosts = row.get("busbw_gb_per_s"), row.get("bytes"), row.get("hosts")
        if not (isinstance(rate, int | float) and isinstance(nbytes, int) and isinstance(hosts, int)):
            continue
        if row.get("backend") == chosen and nbytes >= LARGE_BYTES:
            (between if hosts > 1 else within).append(float(rate) * 1e9)
    return LinkRates(link_bytes_per_s=max(within, default=None), network_bytes_per_s=max(between, default=None))
