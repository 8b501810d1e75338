"""Damage to files: cut, bytes changed, JSON values replaced. `python -m tests.interchange.damage 10000` does more."""

import copy
import json
import pickle
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kineto_traces import Shape, write_traces
from dtprof.analysis.run_summary import summarise
from dtprof.errors import DtprofError
from dtprof.interchange.importers.imported_files import import_files
from dtprof.interchange.importers.imported_run import write_imported
from dtprof.records.reader import open_run
from tests.interchange.test_kineto_traces import host_step, trace
from tests.interchange.test_other_formats import dump, straggler_table, timeline, xla
from tests.interchange.test_xplane_files import GROUPS, space

ODD = (None, -1, 2**70, 1e300, "", "x" * 50, [], {}, [[]], True, float("nan"), "\ud800", -(2**63), 0.5, {"a": [1]})


def samples(folder: Path) -> dict[str, bytes]:
    """Return a small file of each format."""
    kineto = write_traces(folder / "kineto", Shape(ranks=1, steps=2, layers=2))[0].read_bytes()
    return {
        "kineto": kineto,
        "host": trace(0, host_step(0), host_name="a").encode(),
        "horovod": timeline().encode(),
        "xla": json.dumps(xla(told=True)).encode(),
        "xplane": space(GROUPS["rows"]),
        "dump": json.dumps(dump(0, [0, 10, 20])).encode(),
        "pickle": pickle.dumps(dump(0, [0, 10, 20])),
        "parquet": straggler_table(folder / "table").read_bytes(),
    }


def damaged(data: bytes, random_: random.Random) -> bytes:
    """Return the file with one kind of damage."""
    kind = random_.randrange(5)
    if kind == 0:
        return data[: random_.randrange(len(data))]
    if kind == 1 or data[:1] not in (b"{", b"["):
        changed = bytearray(data)
        for _ in range(random_.choice((1, 3, 20))):
            changed[random_.randrange(len(changed))] = random_.randrange(256)
        return bytes(changed)
    if kind == 2:
        begin, end = sorted((random_.randrange(len(data)), random_.randrange(len(data))))
        return data[:begin] + data[end:]
    document = json.loads(data)
    for _ in range(random_.choice((1, 2, 10))):
        holder, key = random_.choice(list(_places(document)))
        holder[key] = copy.deepcopy(random_.choice(ODD))
        if not isinstance(document, dict | list):
            break
    return json.dumps(document).encode("utf-8", "replace")


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in list(items):
        yield document, key
        yield from _places(value)


def try_one(data: bytes, folder: Path, *, whole: bool) -> str | None:
    """Import a file, and look at the run where that is asked for; return the sentence where it is refused."""
    path = folder / "file_0"
    path.write_bytes(data)
    try:
        run, _ = import_files([path])
    except DtprofError as error:
        return str(error)
    if whole:
        shutil.rmtree(folder / "run", ignore_errors=True)
        write_imported(run, folder / "run")
        summarise(open_run(folder / "run"))
    return None


def main(count: int, seed: int) -> int:
    """Damage files of all formats; a traceback names the format and the damage."""
    refused = 0
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = samples(folder)
        for number in range(count):
            random_ = random.Random(seed + number)
            kind = random_.choice(list(found))
            data = damaged(found[kind], random_)
            try:
                refused += try_one(data, folder, whole=number % 4 == 0) is not None
            except Exception:
                print(f"{kind}, seed {seed + number}: {data[:2000]!r}", file=sys.stderr)
                raise
    print(f"{count} files, {refused} refused with a sentence")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
