"""The text to train on, as bytes: the standard library's source, a file, or a folder; free of torch."""

import codecs
import os
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from reference_trainer.errors import UsageError

# Text holds no byte 0 (a file that does is refused), so it can end each document and 256 tokens are enough.
DOCUMENT_END = b"\0"

# What lies beside the standard library's own source, and its tests.
STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Hold the text of all documents, one after the other, and what a reader should know about its origin."""

    text: bytes
    source: Path
    num_files: int
    num_files_skipped: int
    cut: bool


def read_corpus(path: Path | None, *, limit_bytes: int) -> Corpus:
    """Read at most `limit_bytes` of UTF-8 text in an order that is the same on every rank.

    Files that are not text are skipped in a folder, and refused where they were asked for by name.
    """
    source = path or Path(sysconfig.get_path("stdlib"))
    files = _list_files(source) if path else _list_standard_library(source)
    documents: list[bytes] = []
    num_bytes = num_skipped = 0
    cut = False
    for file in files:
        document = _read_text(file, limit_bytes=limit_bytes - num_bytes)
        if document is None:
            num_skipped += 1
        if not document:
            continue
        documents.append(document + DOCUMENT_END)
        num_bytes += len(documents[-1])
        if num_bytes >= limit_bytes:
            cut = True
            break
    if not documents:
        raise UsageError(_explain_no_text(source, named=path is not None))
    return Corpus(
        text=b"".join(documents)[:limit_bytes],
        source=source,
        num_files=len(documents),
        num_files_skipped=num_skipped,
        cut=cut,
    )


def _list_standard_library(folder: Path) -> Iterator[Path]:
    """Return the Python files of the standard library proper."""
    return (file for file in _list_files(folder, skipped_folders=STDLIB_SKIPPED_FOLDERS) if file.suffix == ".py")


def _list_files(source: Path, *, skipped_folders: Set[str] = frozenset()) -> Iterator[Path]:
    """Yield `source` itself, or the files below it in the order of their names, hidden ones left out."""
    if source.is_file():
        yield source
        return
    if not source.is_dir():
        raise UsageError(f"--corpus {source}: no such file or folder; give a text file or a folder of text files")
    for folder, subfolders, names in os.walk(source, onerror=_refuse_unreadable):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped_folders and name[0] != ".")
        files = (Path(folder, name) for name in sorted(names) if name[0] != ".")
        yield from (file for file in files if file.is_file())


def _refuse_unreadable(error: OSError) -> NoReturn:
    raise UsageError(
        f"--corpus: {error.filename} cannot be read ({error.strerror}); make it readable or move it"
    ) from error


def _read_text(file: Path, *, limit_bytes: int) -> bytes | None:
    """Return the start of a file, or None where it is not UTF-8 text."""
    try:
        with file.open("rb") as stream:
            content = stream.read(limit_bytes)
    except OSError as error:
        _refuse_unreadable(error)
    try:
        # Incremental: the limit may cut the last character in two.
        codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError:
        return None
    return None if DOCUMENT_END in content else content


def _explain_no_text(source: Path, *, named: bool) -> str:
    """Say why nothing was found to train on, and what to give instead."""
    if not named:
        return f"no source of the standard library in {source}; give --corpus a text file or a folder of text files"
    if source.is_file():
        what = "file is empty" if source.stat().st_size == 0 else "file is binary, not UTF-8 text"
    else:
        what = "folder holds no UTF-8 text"
    return f"--corpus {source}: the {what}; give a text file or a folder of text files"
