"""The Python API: what a run gives, in types that can be relied on."""

import sys
from contextlib import suppress
from html import escape
from pathlib import Path

import numpy as np
import pytest

import dtprof
from dtprof import api
from dtprof.errors import MissingDependencyError, NotARunError, NothingToShowError, UsageError
from dtprof.interchange.public_tables.table import Column, build_table
from dtprof.report.figures import figure_registry
from dtprof.report.text.summary_text import summary_text
from dtprof.report.text.verdict_text import verdict_text
from tests.analysis.noisy_runs import build_ranks
from tests.builders import RankBuilder, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    ranks = build_ranks(1, tokens=640)
    ranks[1].op("send", 900_000_000, is_async=True, peer=0, nbytes=8)
    write_run(runs / "run", ranks)
    write_run(runs / "slower", build_ranks(2, delay_us=5_000.0))
    write_run(runs / "stepless", [RankBuilder(0, world_size=1)])
    return runs


@pytest.fixture(scope="module")
def run(folder: Path) -> api.Run:
    return dtprof.open_run(folder / "run")


def test_a_run_gives_what_the_commands_say(run: api.Run, folder: Path) -> None:
    assert run.path == folder / "run"
    assert run.ranks == (0, 1)
    summary = run.summary()
    assert summary.world_size == 2
    assert summary is run.summary()
    assert run.diagnose().outcome == "healthy"
    step = run.compare(dtprof.open_run(str(folder / "slower"))).step
    assert step is not None
    assert step.verdict == "larger"
    assert repr(run).endswith("run': 2 ranks>")


@pytest.mark.parametrize("name", [*api.RECORDS, *api.RESULTS])
def test_every_table_has_the_columns_that_it_declares(run: api.Run, name: str) -> None:
    table = run.table(name)
    assert table.columns == api.schema(name)
    assert list(table.data) == [column.name for column in table.columns]
    kinds = {"int64": "i", "float64": "f", "bool": "b", "str": "O"}
    for column in table.columns:
        values = table[column.name]
        assert values.shape == (len(table),)
        assert values.dtype.kind == kinds[column.dtype], column
        assert column.meaning
    assert len(list(table)) == len(table)


def test_records_are_those_of_the_ranks(run: api.Run) -> None:
    operations = run.table("operations")
    assert operations["rank"].tolist() == [0] * 30 + [1] * 31
    (send,) = [row for row in operations if row["op"] == "send"]
    assert (send["kind"], send["state"], send["peer"], send["nbytes"]) == ("p2p", "returned", 0, 8)
    assert send["done_ns"] is None  # not known is not a number
    assert np.ma.is_masked(operations["done_ns"])
    first = next(iter(operations))
    assert (first["file"], first["api"]) == ("/home/me/train.py", "all_reduce")
    assert first["done_ns"] - first["issued_ns"] == first["wait_ns"]
    assert len(run.table("operations", ranks=[1])) == 31
    assert len(run.table("operations", ranks=[])) == 0
    spans = run.table("spans", ranks=[0])
    assert set(spans["phase"]) == {"data", "forward", "backward", "optimizer"}
    assert all(row["stage"] is None and row["microbatch"] is None for row in spans)
    assert len(run.table("samples")) == 124


def test_results_are_those_of_the_summary(run: api.Run) -> None:
    steps, ranks = run.table("steps"), run.table("ranks")
    assert steps["used"].sum() == 2 * 29
    parts = [column.name for column in ranks.columns if column.name.endswith("_ns") and column.name != "step_ns"]
    assert (sum(ranks[part] for part in parts) == ranks["step_ns"]).all()
    assert run.table("collectives")["count"].tolist()[0] == 29
    assert run.table("groups")["ranks"].tolist() == ["0 1"]
    throughput, durations = run.table("throughput"), steps["duration_ns"].reshape(2, -1).mean(axis=0)
    assert throughput["step"].tolist() == list(range(2, 31))
    assert throughput["tokens_per_s"] == pytest.approx(1280e9 / durations)
    assert throughput["samples_per_s"] == pytest.approx(20e9 / durations)


def test_what_is_not_known_is_masked_and_never_a_number(folder: Path) -> None:
    ranks = dtprof.open_run(folder / "stepless").table("ranks")
    (row,) = ranks
    assert row["step_ns"] is None
    assert row["compute_ns"] is None
    assert np.ma.getmaskarray(ranks["peak_bytes"]).all()
    assert len(dtprof.open_run(folder / "stepless").table("throughput")) == 0


def test_pandas_keeps_whole_numbers_whole(run: api.Run) -> None:
    pytest.importorskip("pandas")
    frame = run.table("operations").to_pandas()
    assert str(frame.dtypes["done_ns"]) == "Int64"
    assert frame["done_ns"].isna().sum() == 1
    assert str(frame.dtypes["issued_ns"]) == "int64"
    assert list(run.table("collectives").to_pandas().columns) == [c.name for c in api.schema("collectives")]


def test_arrow_carries_units_and_nulls(run: api.Run) -> None:
    pytest.importorskip("pyarrow")
    table = run.table("operations").to_arrow()
    assert table["done_ns"].null_count == 1
    assert table.schema.field("done_ns").metadata[b"unit"] == b"ns"
    assert run.table("groups").to_arrow()["axis"].null_count == 1
    assert run.table("ranks").to_arrow().num_rows == 2


def test_libraries_of_arrow_take_a_table_without_copying_its_numbers(run: api.Run) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = run.table("steps")
    taken = pyarrow.table(table)
    assert taken.to_pylist() == list(table)
    (_, memory) = taken["duration_ns"].chunk(0).buffers()
    assert memory.address == table["duration_ns"].ctypes.data


@pytest.mark.parametrize("package", ["pandas", "pyarrow"])
def test_a_package_that_is_missing_is_named(run: api.Run, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    table = run.table("groups")
    with pytest.raises(MissingDependencyError, match=f"{package} is not installed"):
        table.to_pandas() if package == "pandas" else table.to_arrow()


def test_notebooks_show_tables_and_summaries_as_text_that_cannot_act(run: api.Run) -> None:
    columns = (
        Column(name="what", dtype="str", meaning='a "thing"'),
        Column(name="t", dtype="int64", meaning="", unit="ns"),
    )
    table = build_table("<b>", columns, {"what": ["<script>", None, *["x"] * 30], "t": list(range(32))})
    shown = table._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<td>-</td>" in shown
    assert "32 rows, the first 20 shown" in shown
    assert shown.count("<tr>") == 21
    assert '<th title="">t [ns]</th>' in shown
    assert run._repr_html_().startswith("<pre>job")


def test_notebooks_show_results_as_the_commands_print_them(folder: Path) -> None:
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell.instance()
    try:
        opened = dtprof.open_run(folder / "run")
        for result, text in (
            (opened.summary(), summary_text(opened.summary())),
            (opened.diagnose(), verdict_text(opened.diagnose())),
        ):
            shown, _ = shell.display_formatter.format(result)
            assert shown["text/html"] == f"<pre>{escape(text)}</pre>"
    finally:
        interactiveshell.InteractiveShell.clear_instance()


def test_figures_are_those_of_the_report(run: api.Run, folder: Path) -> None:
    figure = run.figure("step_times")
    assert type(figure).__module__.startswith("plotly.")
    assert len(figure.data) > 0
    with pytest.raises(NothingToShowError, match="No step has both"):
        dtprof.open_run(folder / "stepless").figure("step_times")
    assert tuple(figure_registry.FIGURES) == api.FIGURES
    for name in api.FIGURES:
        with suppress(NothingToShowError):
            assert len(run.figure(name).data) > 0


def test_what_does_not_exist_is_refused_with_what_does(run: api.Run, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no table 'ops'; expected one of operations, spans"):
        run.table("ops")
    with pytest.raises(UsageError, match=r"no table 'ops'"):
        api.schema("ops")
    with pytest.raises(UsageError, match=r"no figure 'pie'; expected one of step_times"):
        run.figure("pie")
    with pytest.raises(UsageError, match=r"rank 7 left no log; expected ranks of \[0, 1\]"):
        run.table("spans", ranks=[0, 7])
    with pytest.raises(UsageError, match="result of all ranks"):
        run.table("steps", ranks=[0])
    with pytest.raises(UsageError, match="has no column 'bytes'"):
        run.table("operations")["bytes"]
    with pytest.raises(UsageError, match="at_least is 2"):
        run.compare(run, at_least=2)
    with pytest.raises(UsageError, match=r"other is .runs/b.; expected a run as dtprof.open_run returns it"):
        run.compare("runs/b")
    with pytest.raises(NotARunError):
        dtprof.open_run(folder / "nothing")


def test_results_are_the_same_wherever_they_are_computed(folder: Path) -> None:
    here, there = (dtprof.open_run(folder / "run", jobs=jobs) for jobs in (1, 2))
    assert repr(here.summary()) == repr(there.summary())
    assert dtprof.open_run(f"file://{folder / 'run'}").ranks == here.ranks
    with pytest.raises(UsageError, match="is 'spark'; expected local or dask"):
        dtprof.open_run(folder / "run", engine="spark")
    with pytest.raises(UsageError, match="is '0'"):
        dtprof.open_run(folder / "run", jobs=0)
    with pytest.raises(AttributeError, match="no attribute 'close_run'"):
        dtprof.close_run  # type: ignore[attr-defined]  # noqa: B018
