"""The readers that are fuzzed: sound inputs to begin with, and what must hold for any other."""

import gzip
import json
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.torch_pickle import as_torch_pickles
from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.sources.flight_recorder.dump_reader import dump_from
from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable
from dtprof.diagnosis.sources.flight_recorder.dumped_ranks import gather_dumps
from dtprof.diagnosis.sources.program_source import ProgramSource, keep_program
from dtprof.diagnosis.verdict import decide
from dtprof.errors import DtprofError, NotADumpError
from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_run import write_imported
from dtprof.records import paths, schema
from dtprof.records.reader import open_run
from dtprof.report.documents.verdict_json import verdict_json
from dtprof.report.text.verdict_text import verdict_text
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import RankBuilder, write_run
from tests.diagnosis.dump_builder import job
from tests.diagnosis.test_log_reader import PIECES, check
from tests.fuzz.tables import TableInput
from tests.interchange import damage

MAX_SENTENCE = 2000
WHOLE_OF = 16
"""One input of so many is followed to the end: written as a run, or diagnosed."""
Check = Callable[[bytes], bool]
"""Returns whether the input was taken; refused inputs raise nothing but say a sentence."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One reader: sound inputs, and its check, which is made for a folder of its own."""

    seeds: Callable[[Path], list[bytes]]
    check: Callable[[Path], Check]
    max_bytes: int = 4096
    words: tuple[bytes, ...] = ()


def _sentence(error: DtprofError) -> bool:
    text = str(error)
    assert 20 < len(text) < MAX_SENTENCE, text
    return False


def _verdict(verdict: Verdict) -> None:
    json.dumps(verdict_json(verdict))
    assert len(verdict_text(verdict).splitlines()) < 25


def _is_followed(data: bytes) -> bool:
    return sum(data[-8:]) % WHOLE_OF == 0


def _dump_seeds(_: Path) -> list[bytes]:
    ranks = job(3, a=[0, 1])
    ranks[0].op("all_reduce", line=3).op("send 0->1", done=False).op("coalesced", same_seq=True, done=False)
    ranks[0].op("_all_gather_base", group="a", done=False)
    ranks[0].status = {"0": {"last_enqueued_collective": 1, "last_started_collective": -1}}
    ranks[1].op("all_reduce", line=3, done=False)
    documents: list[Any] = [ranks[0].document(), ranks[1].document(), ranks[1].document()["entries"]]
    found = [as_torch_pickles(document) for document in documents]
    found += [pickle.dumps(document, protocol=protocol) for document in documents for protocol in (2, 4, 5)]
    return found + [json.dumps(document).encode() for document in documents]


def _check_dump(_: Path) -> Check:
    def run(data: bytes) -> bool:
        labels = ArgumentTable()
        try:
            dump = replace(dump_from(data, Path("dump_0"), labels, written_ns=0), rank=0)
            verdict = decide(gather_dumps([dump], [], [], labels))
        except NotADumpError as error:
            return _sentence(error)
        _verdict(verdict)
        return True

    return run


def _log_seeds(_: Path) -> list[bytes]:
    chance = random.Random(1)
    pieces = [piece.encode("utf-8", "replace") for piece in PIECES]
    return pieces + [b"\n".join(chance.choices(pieces, k=3)) for _ in range(30)]


def _check_log(folder: Path) -> Check:
    path = folder / "rank.log"

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        check(path)
        return True

    return run


def _sample(*names: str) -> Callable[[Path], list[bytes]]:
    def seeds(folder: Path) -> list[bytes]:
        found = damage.samples(folder)
        return [found[name] for name in names]

    return seeds


def _check_import(folder: Path) -> Check:
    path = folder / "file_0"

    def run(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            run, _ = import_files([path])
        except DtprofError as error:
            return _sentence(error)
        if _is_followed(data):
            shutil.rmtree(folder / "run", ignore_errors=True)
            write_imported(run, folder / "run")
            for tables in open_run(folder / "run").load_all():
                assert len(tables.operations) + len(tables.spans) + len(tables.samples) == tables.num_events
        return True

    return run


def _check_table(folder: Path) -> Check:
    """Odd values in a whole table, and odd bytes in its file."""
    read = _check_import(folder)

    def run(data: bytes) -> bool:
        return read(TableInput(data[1:]).file_bytes(folder) if data[:1] == b"\0" else data[1:])

    return run


def _table_seeds(folder: Path) -> list[bytes]:
    whole = damage.samples(folder)["parquet"]
    return [b"\1" + whole, b"\0", b"\0" + bytes(range(64)), b"\0" + bytes(64)]


RUN_FILES = {
    "rank-00000.0/events.00000": "events",
    f"rank-00000.0/{paths.STRINGS}": "strings",
    paths.MANIFEST: "manifest",
    f"node-host-a/{paths.EXITS}": "exits",
    f"node-host-a/{paths.PROCESSES}": "processes",
    f"node-host-a/{paths.STACKS}": "stacks",
    f"node-host-a/{paths.MISMATCHES}": "mismatches",
}
"""The files of a run; the first byte of an input chooses which one the rest is put in the place of."""


def _write_template(run: Path) -> None:
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.threads = {1: "MainThread"}
        rank.sizes = {1: ((1, 3), (2, 2))}
        rank.span("backward", 5, 30)
        rank.op("all_reduce", 40, 80, nbytes=64, dtype="float32", api="all_reduce")
        rank.op("send" if rank.rank else "recv", 90, peer=1 - rank.rank)
        rank.sample("rss_bytes", 100, 5)
    ranks[1].exception(130)
    write_run(run, ranks)
    node = run / "node-host-a"
    node.mkdir(exist_ok=True)
    (node / paths.EXITS).write_text(
        '{"pid":1000,"status":-9,"t_ns":1000000200,"by":1}\n{"pid":1001,"status":0,"t_ns":5}\n'
    )
    (node / paths.PROCESSES).write_text('{"pid":1000,"env_rank":"0","host":"host-a","t_ns":5}\n')
    stack = {"name": "MainThread", "frames": [{"file": "/srv/train.py", "line": 3, "function": "main"}]}
    stacks = {"t_ns": 5, "processes": {"1000": {"state": "running", "threads": [stack]}}}
    (node / paths.STACKS).write_text(json.dumps(stacks))
    (node / paths.MISMATCHES).write_text('{"kind":"size-mismatch","group":"0","seq":1,"t_ns":9}\n')


def _run_seeds(folder: Path) -> list[bytes]:
    run = folder / "seeds"
    _write_template(run)
    used = schema.HEADER_SIZE + 5 * schema.RECORD_SIZE
    return [bytes([i]) + (run / name).read_bytes()[:used] for i, name in enumerate(RUN_FILES)]


def _check_run(folder: Path) -> Check:
    run = folder / "run"
    _write_template(run)
    for rank in (0, 1):  # segments are as long as they are used, which is much faster to write
        segment = run / f"rank-{rank:05d}.0/events.00000"
        segment.write_bytes(segment.read_bytes()[: schema.HEADER_SIZE + 8 * schema.RECORD_SIZE])
    files = [run / name for name in RUN_FILES]
    whole = [file.read_bytes() for file in files]

    def read(data: bytes) -> bool:
        chosen = data[0] % len(files) if data else 0
        files[chosen].write_bytes(data[1:])
        try:
            opened = open_run(run)
            for tables in opened.load_all():
                assert len(tables.operations) + len(tables.spans) + len(tables.samples) == tables.num_events
                assert all("\n" not in sentence for sentence in (*opened.problems, *tables.problems))
            if _is_followed(data):
                _verdict(diagnose_run(run))
        except DtprofError as error:
            return _sentence(error)
        finally:
            files[chosen].write_bytes(whole[chosen])
        return True

    return read


SOURCE = """\
import torch.distributed as dist

def train(steps):
    for step in range(steps):
        try:
            dist.barrier()
        except RuntimeError:
            dist.all_reduce(step)
            continue
"""


def _kept_program(folder: Path) -> Path:
    """Keep the program of a run; return the document."""
    source, run = folder / "train.py", folder / "kept"
    source.write_text(SOURCE)
    for name in ("rank-00000.0", "node-a"):
        (run / name).mkdir(parents=True, exist_ok=True)
    site = {"k": "site", "id": 1, "file": str(source), "line": 6, "function": "train"}
    (run / "rank-00000.0" / paths.STRINGS).write_text(json.dumps(site) + "\n")
    keep_program(run, "a", source.stat().st_mtime_ns + 1)
    return run / "node-a" / paths.PROGRAM


def _program_seeds(folder: Path) -> list[bytes]:
    return [gzip.decompress(_kept_program(folder).read_bytes())]


def _check_program(folder: Path) -> Check:
    document = _kept_program(folder)
    source = str(folder / "train.py")

    def read(data: bytes) -> bool:
        document.write_bytes(gzip.compress(data, compresslevel=1) if data[:1] == b"{" else data)
        of_run = ProgramSource(document.parent.parent, 0)
        places = [place for line in range(10) if (place := of_run.find_place(source, line)) is not None]
        assert all(place.is_other_branch(place) is False for place in places)
        assert all(handler.line == int(handler.line) for handler in of_run.find_handlers(source).values())
        return bool(places)

    return read


_JSON_WORDS = (b"null", b"-1", b"1e999", b"NaN", b'""', b"[]", b"{}", b"18446744073709551616", b'"\\ud800"', b"true")

TARGETS: dict[str, Target] = {
    "flight-recorder": Target(seeds=_dump_seeds, check=_check_dump, words=_JSON_WORDS),
    "logs": Target(seeds=_log_seeds, check=_check_log, max_bytes=2048, words=(b"[rank1]: ", b"1: ", b"\x1b[0m", b"\r")),
    "kineto": Target(seeds=_sample("host", "kineto"), check=_check_import, max_bytes=8192, words=_JSON_WORDS),
    "horovod": Target(seeds=_sample("horovod"), check=_check_import, words=_JSON_WORDS),
    "xplane": Target(seeds=_sample("xplane"), check=_check_import, max_bytes=2048),
    "xla": Target(seeds=_sample("xla"), check=_check_import, words=_JSON_WORDS),
    "stragglers": Target(seeds=_table_seeds, check=_check_table, max_bytes=16384),
    "program": Target(seeds=_program_seeds, check=_check_program, words=_JSON_WORDS),
    "run": Target(seeds=_run_seeds, check=_check_run, max_bytes=schema.HEADER_SIZE + 600, words=_JSON_WORDS),
}


def scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder for the files of one target, in memory where that is possible."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="dtprof-fuzz-", dir=memory if memory.is_dir() else None)
