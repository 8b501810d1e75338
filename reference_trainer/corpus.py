"""The text to train on, as bytes: the standard library's source, a file, or a folder; free of torch."""

import codecs
import json
import os
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from reference_trainer.errors import UsageError

# Text holds no byte 0 (a file that does is refused), so it can end each document and 256 tokens are enough.
DOCUMENT_END = b"\0"

JSON_LINES = ".jsonl"

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

    A file is a document, and so is each line of a `.jsonl` file: a string, or an object with the string `text`. Files
    that are not text are skipped in a folder, and refused where they were asked for by name.
    """
    source = find_source(path)
    texts: list[bytes] = []
    num_bytes = num_skipped = 0
    cut = False
    for file in list_files(path):
        text = _read_text(file, limit_bytes=limit_bytes - num_bytes)
        if text is None:
            num_skipped += 1
        if not text:
            continue
        texts.append(text + DOCUMENT_END)
        num_bytes += len(texts[-1])
        if num_bytes >= limit_bytes:
            cut = True
            break
    if not texts:
        raise UsageError(_explain_no_text(source, named=path is not None))
    return Corpus(
        text=b"".join(texts)[:limit_bytes],
        source=source,
        num_files=len(texts),
        num_files_skipped=num_skipped,
        cut=cut,
    )


def find_source(path: Path | None) -> Path:
    """Return where the text comes from: the path given, or the folder of the standard library."""
    return path or Path(sysconfig.get_path("stdlib"))


def list_files(path: Path | None) -> Iterator[Path]:
    """Yield the files of the corpus in their order: those of the path given, or the Python files of the library."""
    if path is not None:
        return _list_files(path)
    files = _list_files(find_source(None), skipped_folders=STDLIB_SKIPPED_FOLDERS)
    return (file for file in files if file.suffix == ".py")


def _list_files(source: Path, *, skipped_folders: Set[str] = frozenset()) -> Iterator[Path]:
    """Yield `source` itself, or the files below it in the order of their names, hidden ones left out."""
    if source.is_file():
        yield source
        return
    if not source.is_dir():
        raise UsageError(
            f"--corpus {source}: no such file or folder; give a text file, a .jsonl file, or a folder of them"
        )
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
    if file.suffix == JSON_LINES:
        return _read_json_lines(file, limit_bytes=limit_bytes)
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


def _read_json_lines(file: Path, *, limit_bytes: int) -> bytes:
    """Return the texts in the lines of a file, up to a limit, each but the last ended."""
    texts: list[bytes] = []
    num_bytes = 0
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if num_bytes >= limit_bytes:
                    break
                if line.strip():
                    texts.append(_read_json_text(line, place=f"{file}, line {number}"))
                    num_bytes += len(texts[-1]) + 1
    except OSError as error:
        _refuse_unreadable(error)
    return DOCUMENT_END.join(filter(None, texts))[:limit_bytes]


def _read_json_text(line: bytes, *, place: str) -> bytes:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"--corpus {place}: this is not JSON ({error}); give one JSON value a line") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UsageError(f'--corpus {place}: no text in it; give {{"text": "..."}} or "..." in each line')
    return text.replace(DOCUMENT_END.decode(), "").encode("utf-8", errors="replace")


def _explain_no_text(source: Path, *, named: bool) -> str:
    """Say why nothing was found to train on, and what to give instead."""
    if not named:
        return f"no source of the standard library in {source}; give --corpus a text file or a folder of text files"
    if source.is_file():
        what = "file is binary, not UTF-8 text"
        if source.stat().st_size == 0:
            what = "file is empty"
        elif source.suffix == JSON_LINES:
            what = "texts in it are empty"
    else:
        what = "folder holds no UTF-8 text"
    return f"--corpus {source}: the {what}; give a text file or a folder of text files"
