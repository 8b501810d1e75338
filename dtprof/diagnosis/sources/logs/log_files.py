"""Which files are logs, without loading their reader."""

import gzip
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

MAX_FILES = 100_000


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files, those of directories in order of their names, at most MAX_FILES of each."""
    for path in paths:
        if path.is_dir():
            found = (one for one in sorted(path.rglob("*")) if one.is_file() and not one.name.startswith("."))
            yield from islice(found, MAX_FILES)
        else:
            yield path


def looks_like_a_log(path: Path) -> bool:
    """Say whether the file is text: most of its first bytes are printable, none is NUL."""
    try:
        with opened(path) as file:
            head = file.read(4096)
    except (OSError, EOFError):
        return False
    if b"\0" in head:
        return False
    odd = sum(byte < 32 and byte not in b"\t\n\r\x1b\b\f" for byte in head)
    return odd * 20 <= len(head)


def opened(path: Path) -> BinaryIO:
    """Open a log, compressed or not."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")
