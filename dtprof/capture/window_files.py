"""The file of a window: the trace of torch.profiler with the steps that dtprof counts, compressed.

Steps have a separate track: they end inside the optimizer's step, which a track of nested calls cannot show.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STEP_TRACK = 1 << 30
CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 12
LEVEL = 4
GZIP = 16 + zlib.MAX_WBITS
RAW_PER_PACKED = 40
"""The highest compression ratio to expect of a trace: a larger file is refused before it is compressed."""
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d{1,19})')


class TracedStep(NamedTuple):
    """A step of a window; times in ns since 1970."""

    number: int
    begin_ns: int
    end_ns: int


class TooLargeError(Exception):
    """The file exceeds its size limit."""


def pack(raw: Path, target: Path, *, pid: int, steps: Sequence[TracedStep], facts: object, limit_bytes: int) -> int:
    """Write the file from the raw trace of torch, remove that, and return the size.

    Raises:
        TooLargeError: it exceeds the limit.
        ValueError: the raw trace is not complete: the disk is full.
        OSError: the file cannot be written.
    """
    draft = target.with_name(f".{target.name}")
    try:
        _pack(raw, draft, pid=pid, steps=steps, facts=facts, limit_bytes=limit_bytes)
        draft.replace(target)
    finally:
        # Also after an error: neither file may stay on a disk that is perhaps full.
        for file in (raw, draft):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
    return target.stat().st_size


def _pack(raw: Path, draft: Path, *, pid: int, steps: Sequence[TracedStep], facts: object, limit_bytes: int) -> None:
    size = raw.stat().st_size
    if size > RAW_PER_PACKED * limit_bytes:
        raise TooLargeError(size // RAW_PER_PACKED)
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
    written = 0
    with raw.open("rb") as source, draft.open("wb") as sink:
        base = _BASE.search(source.read(HEAD_BYTES))
        source.seek(max(0, size - TAIL_BYTES))
        tail = source.read()
        # The steps go to the end of the list of events, so that its many megabytes are copied and never parsed.
        end = tail.rfind(b'],"traceName"')
        end = end if end >= 0 else tail.rfind(b"]")
        if end < 0 or not tail.rstrip().endswith(b"}"):
            raise ValueError("the trace is not complete")
        body = size - len(tail) + end
        source.seek(0)

        def put(data: bytes, *, is_last: bool = False) -> None:
            nonlocal written
            written += sink.write(packer.compress(data) + (packer.flush() if is_last else b""))
            if written > limit_bytes:
                raise TooLargeError(written)

        while body > 0 and (chunk := source.read(min(CHUNK_BYTES, body))):
            body -= len(chunk)
            put(chunk)
        put(_steps(steps, pid=pid, base_ns=int(base[1]) if base else 0))
        put(b'],"dtprof":' + json.dumps(facts).encode() + tail[end + 1 :], is_last=True)


def _steps(steps: Sequence[TracedStep], *, pid: int, base_ns: int) -> bytes:
    """Return the steps as events to append to a JSON list."""
    name = {"ph": "M", "name": "thread_name", "ts": 0, "pid": pid, "tid": STEP_TRACK, "args": {"name": "dtprof: steps"}}
    events: list[dict[str, object]] = [name] if steps else []
    events += [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{step.number}",
            "pid": pid,
            "tid": STEP_TRACK,
            "ts": (step.begin_ns - base_ns) / 1000,
            "dur": (step.end_ns - step.begin_ns) / 1000,
        }
        for step in steps
    ]
    return "".join(f",\n  {json.dumps(event)}" for event in events).encode()
