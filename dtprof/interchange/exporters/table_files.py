"""The tables of the Python API as Parquet or CSV files, a table a file, with their declared columns.

Records are written rank by rank, so that no table need fit into memory. A folder holds all files and `schema.json`,
which says of every column what it holds, in which unit, and what it means.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from dtprof.errors import MissingDependencyError
from dtprof.interchange.public_tables.table import Table

SCHEMA = "schema.json"
FORMATS = ("parquet", "csv")


Append = Callable[[Table], None]


def write_tables(pieces: Iterable[tuple[str, Table]], folder: Path, kind: str) -> None:
    """Write tables, given piece by piece in any order, and the schema.

    Raises:
        MissingDependencyError: Parquet is asked for and pyarrow is not installed.
    """
    if kind == "parquet" and not _has_pyarrow():
        raise MissingDependencyError(
            "pyarrow is not installed, and is needed to write Parquet; pip install 'dtprof[parquet]', or use "
            "--format csv"
        )
    folder.mkdir(parents=True, exist_ok=True)
    csv_writer = _arrow_csv_file if _has_pyarrow() else _csv_file
    writer = _parquet_file if kind == "parquet" else csv_writer
    append: dict[str, Append] = {}
    schema = {}
    with ExitStack() as files:
        for name, piece in pieces:
            if name not in append:
                append[name] = files.enter_context(writer(piece, folder / f"{name}.{kind}"))
                schema[name] = [
                    {"name": column.name, "type": column.dtype, "unit": column.unit, "meaning": column.meaning}
                    for column in piece.columns
                ]
            append[name](piece)
    document = {"schema": 1, "tables": schema}
    (folder / SCHEMA).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _has_pyarrow() -> bool:
    try:
        import_module("pyarrow")
    except ImportError:
        return False
    return True


@contextmanager
def _parquet_file(first: Table, path: Path) -> Iterator[Append]:
    parquet = import_module("pyarrow.parquet")
    # Times and positions hardly repeat and hardly jump: differences take half the time and half the bytes.
    texts = [column.name for column in first.columns if column.dtype == "str"]
    numbers = {column.name: "DELTA_BINARY_PACKED" for column in first.columns if column.dtype == "int64"}
    schema = first.arrow_schema()
    with parquet.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=texts, column_encoding=numbers
    ) as writer:
        yield lambda piece: writer.write_table(piece.to_arrow())


@contextmanager
def _csv_file(first: Table, path: Path) -> Iterator[Append]:
    """Give a file of a header and rows; unknown values are empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in first.columns])
        yield lambda piece: writer.writerows(map(_plain, row.values()) for row in piece)


@contextmanager
def _arrow_csv_file(first: Table, path: Path) -> Iterator[Append]:
    """Give the same file, written by pyarrow, twenty times as fast."""
    arrow_csv = import_module("pyarrow.csv")
    options = arrow_csv.WriteOptions(include_header=False, quoting_style="needed")
    with path.open("wb") as file:
        file.write((",".join(column.name for column in first.columns) + "\n").encode())
        yield lambda piece: arrow_csv.write_csv(piece.to_arrow(), file, options)


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
