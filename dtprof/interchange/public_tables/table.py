"""Tables with declared columns, as the Python API gives them out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.errors import MissingDependencyError, UsageError
from dtprof.formatting import plural
from dtprof.interchange.public_tables.arrow_columns import arrow_array

MAX_SHOWN = 20
DTYPES = {"int64": np.int64, "float64": np.float64, "bool": np.bool_, "str": object}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its name, type, unit and meaning."""

    name: str
    dtype: str  # int64, float64, bool, str
    meaning: str
    unit: str = ""  # ns, bytes, GB/s, fraction; empty: none


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of one length: columns are numpy arrays, masked where a value is not known."""

    name: str
    columns: tuple[Column, ...]
    data: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.data[self.columns[0].name])

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return a column.

        Raises:
            UsageError: there is no such column.
        """
        if name not in self.data:
            known = ", ".join(column.name for column in self.columns)
            raise UsageError(f"table {self.name!r} has no column {name!r}; expected one of {known}")
        return self.data[name]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows as plain values by column; None where one is not known."""
        lists = [self.data[column.name].tolist() for column in self.columns]
        names = [column.name for column in self.columns]
        for row in zip(*lists, strict=True):
            yield dict(zip(names, row, strict=True))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame; whole numbers that are not known are `NA` in columns of type Int64.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        pd = _load("pandas")
        columns = {}
        for column in self.columns:
            values = self.data[column.name]
            if isinstance(values, np.ma.MaskedArray) and column.dtype == "int64":
                columns[column.name] = pd.array(values.tolist(), dtype="Int64")
            elif isinstance(values, np.ma.MaskedArray):
                columns[column.name] = values.filled(np.nan if column.dtype == "float64" else None)
            else:
                columns[column.name] = values
        return pd.DataFrame(columns)

    def to_arrow(self) -> Any:
        """Return a pyarrow Table with the units and meanings of the columns as metadata of its fields.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        pa, schema = _load("pyarrow"), self.arrow_schema()
        columns = zip(schema, (self.data[column.name] for column in self.columns), strict=True)
        return pa.Table.from_arrays([arrow_array(pa, field.type, values) for field, values in columns], schema=schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Give the table to a library of Arrow: `polars.DataFrame(table)`, `pyarrow.table(table)`, DuckDB.

        Columns of numbers are passed on without a copy. Source: the Arrow PyCapsule interface.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def arrow_schema(self) -> Any:
        """Return the schema of that Table.

        Raises:
            MissingDependencyError: pyarrow is not installed.
        """
        pa = _load("pyarrow")
        types = {"int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
        fields = [
            pa.field(column.name, types[column.dtype], metadata={"unit": column.unit, "meaning": column.meaning})
            for column in self.columns
        ]
        return pa.schema(fields)

    def __repr__(self) -> str:
        """Return the name, the length and the columns."""
        columns = ", ".join(column.name for column in self.columns)
        return f"<dtprof table {self.name!r}: {plural(len(self), 'row')}, columns {columns}>"

    def _repr_html_(self) -> str:
        """Return the first rows for a notebook, units in the head and meanings where the mouse rests."""
        head = "".join(
            f'<th title="{escape(column.meaning)}">{escape(column.name)}'
            f"{f' [{escape(column.unit)}]' if column.unit and not column.name.endswith(column.unit) else ''}</th>"
            for column in self.columns
        )
        first = Table(
            name=self.name, columns=self.columns, data={name: values[:MAX_SHOWN] for name, values in self.data.items()}
        )
        body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in first)
        more = f", the first {MAX_SHOWN} shown" if len(self) > MAX_SHOWN else ""
        caption = f"<caption>{escape(self.name)}: {plural(len(self), 'row')}{more}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return f"<td>{escape('-' if value is None else str(value))}</td>"


def _load(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{package} is not installed, and is needed to convert the table; pip install {package}, or use the "
            "columns as numpy arrays: table['step']"
        ) from error


def build_table(name: str, columns: Sequence[Column], rows: Mapping[str, Sequence[Any] | npt.NDArray[Any]]) -> Table:
    """Return a table of these columns; None in a sequence, and masked values, are unknown."""
    return Table(
        name=name, columns=tuple(columns), data={column.name: _array(column, rows[column.name]) for column in columns}
    )


def _array(column: Column, values: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    dtype = DTYPES[column.dtype]
    if isinstance(values, np.ndarray):
        return values.astype(dtype, copy=False)
    mask = [value is None for value in values]
    if column.dtype == "str":
        return np.array(list(values), object) if not any(mask) else np.ma.array(list(values), dtype=object, mask=mask)
    filled: npt.NDArray[Any] = np.array([0 if value is None else value for value in values], dtype)
    return np.ma.array(filled, mask=mask) if any(mask) else filled
