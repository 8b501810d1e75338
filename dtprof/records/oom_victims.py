"""Processes that the kernel's OOM killer ended while a job ran, as run.json lists them. Standard library only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OomVictim:
    """A process that the OOM killer ended."""

    pid: int  # as the host counts, which a container does not see
    name: str
    t_ns: int  # of the kernel's clock: CLOCK_MONOTONIC, but for the time the host slept
    resident_bytes: int


def read_oom_victims(rows: Any) -> Iterator[OomVictim]:
    """Give the victims in an entry of run.json; invalid entries are omitted."""
    for row in rows if isinstance(rows, list) else ():
        try:
            yield OomVictim(
                pid=int(row["pid"]),
                name=str(row["name"]),
                t_ns=int(row["t_ns"]),
                resident_bytes=int(row["resident_bytes"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
