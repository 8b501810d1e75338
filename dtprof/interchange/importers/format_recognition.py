"""Which format a file is of, by what it holds; names say nothing."""

import shlex
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dtprof.diagnosis.sources.flight_recorder.dump_reader import looks_like_dump
from dtprof.errors import NotATraceError
from dtprof.interchange.importers.trace_stream import read_head
from dtprof.records import paths as run_paths
from dtprof.records import remote

KINETO = "torch.profiler traces"
FLIGHT_RECORDER = "Flight Recorder dumps"
HOROVOD = "a Horovod timeline"
XLA = "XLA or JAX traces"
STRAGGLERS = "StragglerAnalysis parquet"
FORMATS = (KINETO, FLIGHT_RECORDER, HOROVOD, XLA, STRAGGLERS)
MAX_FILES = 100_000
_KINETO = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"baseTimeNanoseconds"', b'"traceName"')
_HOROVOD = (b"start_time_since_epoch_in_micros", b"NEGOTIATE_")
_XLA = (b'"/host:', b'"/device:', b"highres-ticks", b"hlo_op", b"hlo_module")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Files of one format."""

    format: str
    files: tuple[Path, ...]
    left_out: tuple[str, ...]  # of directories: what is of no format that is known


def sort_inputs(paths: Iterable[Path]) -> Inputs:
    """Find out of which format all files are; of directories those are taken that are of any.

    Raises:
        NotATraceError: a path does not exist, is of no known format, or two are of different ones.
    """
    by_format: dict[str, list[Path]] = {}
    left_out: list[str] = []
    for path in dict.fromkeys(map(remote.plain, paths)):
        if remote.url_of(path) is not None:
            raise NotATraceError(
                f"{remote.named(path)} is a URL. Expected files of this machine: copy them here first."
            )
        if not path.exists():
            raise NotATraceError(f"{path} does not exist. Expected {_wanted()}.")
        for file in _files(path) if path.is_dir() else (path,):
            name, begins = recognise(file)
            if name is not None:
                by_format.setdefault(name, []).append(file)
            elif path.is_dir():
                left_out.append(file.name)
            else:
                raise NotATraceError(f"{file} is of no format that can be imported: {begins}. Expected {_wanted()}.")
    if not by_format:
        if runs := [str(path) for path in paths if (path / run_paths.MANIFEST).is_file()]:
            raise NotATraceError(f"{runs[0]} is a run, which needs no import: dtprof summary {shlex.quote(runs[0])}")
        held = f"{len(left_out)} files of no known format" if left_out else "no file"
        raise NotATraceError(f"{', '.join(map(str, paths))} holds {held}. Expected {_wanted()}.")
    if len(by_format) > 1:
        (a, of_a), (b, of_b) = list(by_format.items())[:2]
        raise NotATraceError(
            f"{of_a[0]} looks like {a}, {of_b[0]} like {b}; expected files of one format. "
            "Import each into a run of its own."
        )
    ((name, files),) = by_format.items()
    return Inputs(format=name, files=tuple(files), left_out=tuple(left_out))


def _wanted() -> str:
    return f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def _files(path: Path) -> Iterator[Path]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("."))
    yield from (file for file, _ in zip(files, range(MAX_FILES), strict=False))


def recognise(file: Path) -> tuple[str | None, str]:
    """Return the format of a file, None where it is of none, and how it begins.

    Raises:
        NotATraceError: it cannot be read.
    """
    try:
        head = read_head(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise NotATraceError(f"{file} cannot be read: {reason}. Give a file that you may read.") from None
    except (EOFError, zlib.error) as error:
        raise NotATraceError(f"{file} is packed by gzip and damaged ({error}). Copy it again.") from None
    if not head:
        return None, "it is empty"
    begins = f"it begins with {head[:24]!r}"
    if head[:4] == b"PAR1":
        return STRAGGLERS, begins
    text = head.lstrip()[:1] in (b"{", b"[")
    if text and (b'"traceEvents"' in head or any(mark in head for mark in _KINETO)):
        if any(mark in head for mark in _KINETO):
            return KINETO, begins
        if any(mark in head for mark in _XLA):
            return XLA, begins
    if text and any(mark in head for mark in _HOROVOD):
        return HOROVOD, begins
    if looks_like_dump(head):
        return FLIGHT_RECORDER, begins
    return None, begins
