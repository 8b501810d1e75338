"""Tables as files, against the tables of the Python API."""

import csv
import json
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from dtprof import api
from dtprof.errors import MissingDependencyError
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import Run
from dtprof.session.run_exports import write_export

TABLES = (*api.RECORDS, *api.RESULTS)


@pytest.fixture(scope="module")
def opened(run: Run) -> api.Run:
    return api.open_run(run.path)


@pytest.mark.parametrize("name", TABLES)
def test_parquet_gives_back_every_value_with_its_unit_and_meaning(name: str, parquet: Path, opened: api.Run) -> None:
    table, ours = pyarrow.parquet.read_table(parquet / f"{name}.parquet"), opened.table(name)
    assert table.num_rows == len(ours)
    for column in ours.columns:
        expected = [row[column.name] for row in ours]
        assert table[column.name].to_pylist() == expected, column.name
        metadata = table.schema.field(column.name).metadata
        assert (metadata[b"unit"].decode(), metadata[b"meaning"].decode()) == (column.unit, column.meaning)


@pytest.fixture(scope="module")
def parquet(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "parquet"
    assert write_export(run, "parquet", folder, None, executor=THIS_PROCESS) == []
    return folder


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.reader(file)]


def test_csv_is_the_same_with_and_without_pyarrow(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: api.Run
) -> None:
    write_export(run, "csv", tmp_path / "fast", None, executor=THIS_PROCESS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_export(run, "csv", tmp_path / "slow", None, executor=THIS_PROCESS)
    for name in TABLES:
        columns = opened.table(name).columns
        fast, slow = rows_of(tmp_path / "fast" / f"{name}.csv"), rows_of(tmp_path / "slow" / f"{name}.csv")
        assert slow[0] == fast[0] == [column.name for column in columns]
        assert len(slow) == len(fast) == len(opened.table(name)) + 1
        if not any(column.dtype == "float64" for column in columns):
            assert slow == fast


def test_the_schema_says_what_each_column_is(run: Run, tmp_path: Path) -> None:
    write_export(run, "csv", tmp_path / "out", None, executor=THIS_PROCESS)
    document = json.loads((tmp_path / "out" / "schema.json").read_text(encoding="utf-8"))
    assert set(document["tables"]) == set(TABLES)
    for name, columns in document["tables"].items():
        assert [(column["name"], column["type"]) for column in columns] == [(c.name, c.dtype) for c in api.schema(name)]


def test_parquet_without_pyarrow_names_the_extra(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"dtprof\[parquet\].*--format csv"):
        write_export(run, "parquet", tmp_path / "out", None, executor=THIS_PROCESS)
