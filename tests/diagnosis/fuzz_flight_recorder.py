"""Feeds damaged dumps to their reader and the rules: `python -m tests.diagnosis.fuzz_flight_recorder [INPUTS] [SEED]`.

Every input must give a verdict or a sentence; anything else ends the program with the input on disk. Inputs that reach
lines of dtprof that none before them reached become seeds of others.
"""

import json
import pickle
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.torch_pickle import as_torch_pickles
from dtprof.diagnosis.dumps.decision import diagnose_dumps
from dtprof.dumps import Labels
from dtprof.errors import NotADumpError
from dtprof.importers.flight_recorder import dump_from
from dtprof.report.verdict_json import verdict_json
from dtprof.report.verdict_text import verdict_text
from tests.diagnosis.dump_builder import job

COVERED_OF = 10
"""One input of so many is run with its lines followed, which is slow."""
OPCODES = bytes(range(256))
EXTREMES = (
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80",
    b"\xff" * 8,
    b"\x8a\xff" + b"\x7f" * 255,
    b"-1",
    b"1e999",
    b"null",
)


def seeds() -> list[bytes]:
    """Return sound dumps of many shapes."""
    ranks = job(3, a=[0, 1])
    ranks[0].op("all_reduce", line=3).op("send 0->1", done=False).op("coalesced", same_seq=True, done=False)
    ranks[0].op("_all_gather_base", group="a", done=False)
    ranks[0].status = {"0": {"last_enqueued_collective": 1, "last_started_collective": -1}}
    ranks[1].op("all_reduce", line=3, done=False)
    documents: list[Any] = [ranks[0].document(), ranks[1].document(), ranks[1].document()["entries"]]
    found = [as_torch_pickles(document) for document in documents]
    found += [pickle.dumps(document, protocol=protocol) for document in documents for protocol in (2, 4, 5)]
    return found + [json.dumps(document).encode() for document in documents]


def damaged(source: random.Random, corpus: list[bytes]) -> bytes:
    """Return an input with some of its bytes changed, left out, repeated, or taken from another."""
    data = bytearray(source.choice(corpus))
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        at = source.randrange(len(data) + 1)
        end = min(len(data), at + source.choice((0, 1, 1, 4, 32)))
        kind = source.randrange(6)
        if kind == 0:
            data[at:end] = bytes([source.choice(OPCODES)])
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end] * source.choice((1, 2, 50))
        elif kind == 3:
            data[at:end] = source.choice(EXTREMES)
        elif kind == 4:
            other = source.choice(corpus)
            begin = source.randrange(len(other))
            data[at:end] = other[begin : begin + source.choice((1, 8, 64))]
        elif source.random() < 0.2:
            del data[at:]
        data = data or bytearray(b"\x80")
    return bytes(data[:20_000])


def try_one(data: bytes) -> bool:
    """Read and diagnose; return whether it was a dump. Anything but a verdict or a sentence is raised."""
    labels = Labels()
    try:
        dump = replace(dump_from(data, Path("dump_0"), labels, written_ns=0), rank=0)
        verdict = diagnose_dumps([dump], [], [], labels)
    except NotADumpError as error:
        if len(str(error)) > 2000:
            raise ValueError(f"a sentence of {len(str(error))} characters") from error
        return False
    json.dumps(verdict_json(verdict))
    verdict_text(verdict)
    return True


def follow(data: bytes) -> set[tuple[str, int]]:
    """Return the lines of dtprof that an input reaches."""
    reached: set[tuple[str, int]] = set()

    def look(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if "/dtprof/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return look

    sys.settrace(look)
    try:
        try_one(data)
    finally:
        sys.settrace(None)
    return reached


def main(inputs: int = 1_000_000, seed: int = 1) -> int:
    """Try so many inputs and say what came of them."""
    source = random.Random(seed)
    corpus = seeds()
    covered: set[tuple[str, int]] = set()
    dumps = 0
    slowest_s = 0.0
    for i in range(inputs):
        data = damaged(source, corpus)
        begin = time.perf_counter()
        try:
            dumps += try_one(data)
            if i % COVERED_OF == 0 and (new := follow(data) - covered):
                covered |= new
                corpus.append(data)
        except Exception:
            path = Path(tempfile.gettempdir()) / f"dtprof-fuzz-{seed}-{i}"
            path.write_bytes(data)
            print(f"input {i} of seed {seed}, kept as {path}", file=sys.stderr)
            raise
        slowest_s = max(slowest_s, time.perf_counter() - begin)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{inputs} inputs, {dumps} of them dumps, {inputs - dumps} refused with a sentence; "
        f"{len(covered)} lines reached, {len(corpus)} seeds; slowest {slowest_s:.2f} s, peak {peak_mb:.0f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
