"""The tables of the Python API as Parquet or CSV files, a table a file, with their declared columns.

Records are written rank by rank, so that no table need fit into memory. A folder holds all files and `schema.json`,
which says of every column what it holds, in which unit, and what it means.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dtprof.errors import MissingDependencyError

SCHEMA = "schema.json"
FORMATS = ("parquet", "csv")


class Column(Protocol):
    """One declared column; dtprof.api.table.Column is one."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def dtype(self) -> str:
        """Of what type its values are."""

    @property
    def unit(self) -> str:
        """In which unit they are; empty where in none."""

    @property
    def meaning(self) -> str:
        """What they mean."""


class Table(Protocol):
    """A table; dtprof.api.table.Table is one."""

    @property
    def columns(self) -> tuple[Any, ...]:
        """The columns."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield its rows."""

    def to_arrow(self) -> Any:
        """Return it as a pyarrow Table."""


def write_tables(tables: Mapping[str, Iterator[Table]], folder: Path, kind: str) -> None:
    """Write each table, given piece by piece, and the schema.

    Raises:
        MissingDependencyError: Parquet is asked for and pyarrow is not installed.
    """
    if kind == "parquet" and not _has_pyarrow():
        raise MissingDependencyError(
            "pyarrow is not installed, and is needed to write Parquet; pip install 'dtprof[parquet]', or use "
            "--format csv"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write = _write_parquet if kind == "parquet" else _write_csv
    schema = {}
    for name, pieces in tables.items():
        columns = write(pieces, folder / f"{name}.{kind}")
        schema[name] = [
            {"name": one.name, "type": one.dtype, "unit": one.unit, "meaning": one.meaning} for one in columns
        ]
    document = {"schema": 1, "tables": schema}
    (folder / SCHEMA).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _has_pyarrow() -> bool:
    try:
        import_module("pyarrow")
    except ImportError:
        return False
    return True


def _write_parquet(pieces: Iterator[Table], path: Path) -> tuple[Column, ...]:
    parquet = import_module("pyarrow.parquet")
    first = next(pieces)
    rows = first.to_arrow()
    with parquet.ParquetWriter(path, rows.schema, compression="zstd") as writer:
        writer.write_table(rows)
        for piece in pieces:
            writer.write_table(piece.to_arrow())
    return first.columns


def _write_csv(pieces: Iterator[Table], path: Path) -> tuple[Column, ...]:
    """Write a head and the rows; what is not known is empty. pyarrow writes the same, twenty times as fast."""
    first = next(pieces)
    if _has_pyarrow():
        _write_csv_by_arrow(first, pieces, path)
        return first.columns
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in first.columns])
        for piece in (first, *pieces):
            writer.writerows(map(_plain, row.values()) for row in piece)
    return first.columns


def _write_csv_by_arrow(first: Table, pieces: Iterator[Table], path: Path) -> None:
    arrow_csv = import_module("pyarrow.csv")
    with path.open("wb") as file:
        file.write((",".join(column.name for column in first.columns) + "\n").encode())
        options = arrow_csv.WriteOptions(include_header=False, quoting_style="needed")
        for piece in (first, *pieces):
            arrow_csv.write_csv(piece.to_arrow(), file, options)


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
