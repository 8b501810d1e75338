"""Parquet tables made of bytes: most bytes of a parquet file are checked by pyarrow, so values are chosen instead."""

from pathlib import Path
from typing import Any

from dtprof.interchange.importers.straggler_analysis import COLLECTIVES, COLUMNS, COMPUTE, MESSAGES, OPTIMIZER, PAUSE

OPERATIONS = (*COMPUTE, *OPTIMIZER, PAUSE, *MESSAGES, *COLLECTIVES, "", "other", "\0")
NUMBERS = (0, 1, 2, 3, -1, 7, 2**31, 2**62, 10**9, 1.5, -0.5, 1e300, float("nan"), float("inf"), 1e9, 100)
MAX_ROWS = 12


class TableInput:
    """Takes choices from bytes, one after the other; zeros where they end."""

    def __init__(self, data: bytes) -> None:
        """Begin at the first byte."""
        self._data = data
        self._at = 0

    def _next(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def _column(self, name: str, rows: int) -> list[Any]:
        if name == "optype":
            return [OPERATIONS[self._next() % len(OPERATIONS)] for _ in range(rows)]
        kind = self._next() % 8
        if kind == 6:
            return [None if self._next() % 3 == 0 else 1 for _ in range(rows)]
        if kind == 7:
            return [str(self._next()) for _ in range(rows)]
        if kind == 5:
            return [float(NUMBERS[self._next() % len(NUMBERS)]) for _ in range(rows)]
        return [self._next() % 4 if kind else self._next() for _ in range(rows)]

    def file_bytes(self, folder: Path) -> bytes:
        """Return the file of a table with a few rows of these values."""
        import pyarrow
        from pyarrow import parquet

        rows = self._next() % MAX_ROWS
        columns = {name: self._column(name, rows) for name in COLUMNS}
        path = folder / "made.parquet"
        parquet.write_table(pyarrow.table(columns), path, compression="none", use_dictionary=False)
        return path.read_bytes()
