"""Run commands of dtprof in this process on unpacked inputs; what they print, made the same on any machine."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dtprof import __version__
from dtprof.cli.main import main
from tests.golden.pages import text_of_page

HERE = Path(__file__).parent
STORED = HERE
ENVIRONMENT = {"COLUMNS": "100", "LINES": "50", "NO_COLOR": "1", "TERM": "dumb", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")
GZIP = b"\x1f\x8b"
FIRST_LINES = 24
"""Lines that a transcript shows of a long table; a digest stands for all of it."""
LONG_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{7,}(?:e[+-]?\d+)?|(?<![\w.])-?\d+(?:\.\d+)?e[+-]\d+")


def unpack(archive: str, folder: Path) -> None:
    """Unpack an archive of stored inputs, unless the folder holds it already."""
    mark = folder / f".{archive.replace('/', '-')}"
    if not mark.exists():
        with tarfile.open(STORED / f"{archive}.tar.xz") as tar:
            tar.extractall(folder, filter="data")
        mark.touch()


def transcript(folder: Path, lines: Iterable[str]) -> str:
    """Run command lines in a folder and return each with its output, its exit status, and what it wrote.

    A line `show PATH` shows a file or folder that a command before it has written.
    """
    parts = []
    with _environment(folder):
        for line in lines:
            name, *arguments = shlex.split(line)
            if name == "show":
                parts.append(f"$ {line}\n{_normalised(_shown(Path(arguments[0])), folder)}")
                continue
            assert name == "dtprof", line
            stdout, stderr = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                status = _status_of(arguments)
            said = "".join(f"stderr: {text}\n" for text in stderr.getvalue().splitlines())
            parts.append(f"$ {line}\n{_normalised(stdout.getvalue() + said, folder)}exit status {status}\n")
    return "".join(parts)


def _status_of(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:  # of the parser
        return end.code if isinstance(end.code, int) else 1


@contextlib.contextmanager
def _environment(folder: Path) -> Iterator[None]:
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update({name: before[name] for name in PASSED_ON if name in before})
        os.environ.update(ENVIRONMENT | {"HOME": str(folder)})
        with contextlib.chdir(folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _normalised(text: str, folder: Path) -> str:
    """Replace the folder's path and the version, and cut numbers to nine digits: more depend on the processor."""
    text = text.replace(str(folder.resolve()), "FOLDER").replace(str(folder), "FOLDER")
    text = text.replace(f"dtprof {__version__}", "dtprof VERSION")
    return LONG_NUMBER.sub(lambda found: f"{float(found[0]):.9g}", text)


def _shown(path: Path) -> str:
    if path.is_dir():
        return "".join(f"== {one.relative_to(path)}\n{_shown(one)}" for one in sorted(path.rglob("*")) if one.is_file())
    data = path.read_bytes()
    if data.startswith(GZIP):
        data = gzip.decompress(data)
    if path.suffix == ".pftrace":
        return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}\n"
    if path.suffix == ".html":
        return _normalised(text_of_page(data.decode()), Path.cwd())
    text = _normalised(data.decode(), Path.cwd())
    if text.startswith("{") and "traceEvents" in text:
        return _shown_trace(json.loads(text))
    lines = text.splitlines(keepends=True)
    if path.suffix != ".csv" or len(lines) <= 2 * FIRST_LINES:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{''.join(lines[:FIRST_LINES])}... {len(lines)} lines in all, sha256 {digest}\n"


def _shown_trace(trace: dict[str, Any]) -> str:
    """Count the events of a trace by form and name, and show what is not an event, and the first events."""
    events = trace.pop("traceEvents")
    counts = Counter(
        (str(event.get("ph")), str(event.get("cat", "-")), re.sub(r"\d+", "N", str(event.get("name", "-"))))
        for event in events
    )
    digest = hashlib.sha256(json.dumps(events).encode()).hexdigest()
    return "".join(
        [
            json.dumps(trace, indent=1, sort_keys=True) + "\n",
            *(f"{count:6} {' '.join(key)}\n" for key, count in sorted(counts.items())),
            *(json.dumps(event) + "\n" for event in events[:FIRST_LINES]),
            f"... {len(events)} events in all, sha256 {digest}\n",
        ]
    )
