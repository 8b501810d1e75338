"""Find the importer of files by their content; names say nothing."""

import shlex
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprof.errors import NotATraceError
from dtprof.interchange.importers.imported_records import Importer
from dtprof.interchange.importers.trace_stream import read_head
from dtprof.records import paths as run_paths
from dtprof.records import remote

MAX_FILES = 100_000


@dataclass(frozen=True, kw_only=True)
class FormatFiles:
    """Files of one format."""

    importer: Importer
    files: tuple[Path, ...]
    left_out: tuple[str, ...]  # names of files in directories that no importer recognises


def sort_inputs(paths: Sequence[Path], importers: Sequence[Importer]) -> FormatFiles:
    """Find the one importer of all files; files of directories that no importer recognises are left out.

    Raises:
        NotATraceError: a path does not exist, is of no known format, or two are of different ones.
    """
    by_importer: dict[str, tuple[Importer, list[Path]]] = {}
    left_out: list[str] = []
    names = [importer.name for importer in importers]
    wanted = f"{', '.join(names[:-1])} or {names[-1]}"
    for path in dict.fromkeys(map(remote.plain, paths)):
        if remote.url_of(path) is not None:
            raise NotATraceError(
                f"{remote.named(path)} is a URL. Expected files of this machine: copy them here first."
            )
        if not path.exists():
            raise NotATraceError(f"{path} does not exist. Expected {wanted}.")
        for file in _files(path) if path.is_dir() else (path,):
            importer, begins = recognise(file, importers)
            if importer is not None:
                by_importer.setdefault(importer.name, (importer, []))[1].append(file)
            elif path.is_dir():
                left_out.append(file.name)
            else:
                raise NotATraceError(f"{file} is of no format that can be imported: {begins}. Expected {wanted}.")
    if not by_importer:
        if runs := [str(path) for path in paths if (path / run_paths.MANIFEST).is_file()]:
            raise NotATraceError(f"{runs[0]} is a run, which needs no import: dtprof summary {shlex.quote(runs[0])}")
        held = f"{len(left_out)} files of no known format" if left_out else "no file"
        raise NotATraceError(f"{', '.join(map(str, paths))} holds {held}. Expected {wanted}.")
    if len(by_importer) > 1:
        (a, of_a), (b, of_b) = list(by_importer.values())[:2]
        raise NotATraceError(
            f"{of_a[0]} looks like {a.name}, {of_b[0]} like {b.name}; expected files of one format. "
            "Import each into a run of its own."
        )
    ((chosen, files),) = by_importer.values()
    return FormatFiles(importer=chosen, files=tuple(files), left_out=tuple(left_out))


def _files(path: Path) -> Iterator[Path]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("."))
    yield from (file for file, _ in zip(files, range(MAX_FILES), strict=False))


def recognise(file: Path, importers: Iterable[Importer]) -> tuple[Importer | None, str]:
    """Return the importer of a file, None where no importer recognises it, and how the file begins.

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
    return next((importer for importer in importers if importer.recognises(head)), None), begins
