"""Lines of the strings file, which explain the codes of records."""

import json
import time

from dtprof.records import schema


def entry(kind: str, **fields: object) -> str:
    """Return a line of the strings file."""
    if kind not in schema.STRING_ENTRIES:
        raise ValueError(f"{kind!r} is not an entry of the strings file")
    return json.dumps({"k": kind, **fields}, separators=(",", ":"), default=str)


def timed_entry(kind: str, **fields: object) -> str:
    """Return a line of the strings file that carries the host clock."""
    return entry(kind, t_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC), **fields)
