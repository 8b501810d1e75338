"""The Python API: open a run, and get the results of the commands as typed objects and tables.

`import dtprof` loads nothing of this before `dtprof.open_run` is used.
"""

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprof.api.notebook import as_html, show_results_as_text
from dtprof.errors import NothingToShowError, UsageError
from dtprof.formatting import plural
from dtprof.interchange.public_tables import record_tables, result_tables, window_tables
from dtprof.session import report_data, run_measurement
from dtprof.session.engines import Engine, make_engine
from dtprof.session.engines import open_run as open_with

if TYPE_CHECKING:
    from dtprof.analysis.comparison.comparison_series import RunFigures
    from dtprof.analysis.comparison.run_comparison import Comparison
    from dtprof.analysis.results import Summary
    from dtprof.analysis.whatif.prediction import Prediction
    from dtprof.diagnosis.findings import Verdict
    from dtprof.interchange.public_tables.table import Column, Table
    from dtprof.report.figures.figure_source import Source

    FIGURES: tuple[str, ...]

RECORDS = tuple(record_tables.RECORDS)
TRACES = tuple(window_tables.TRACES)
RESULTS = tuple(result_tables.RESULTS)


if not TYPE_CHECKING:  # for mypy, every attribute would exist

    def __getattr__(name: str) -> Any:
        """Derive FIGURES, the names of all figures, from the registry when first asked for: it loads Plotly."""
        if name != "FIGURES":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dtprof.report.figures import figure_registry

        return tuple(figure_registry.FIGURES)


class Run:
    """A run on disk. Everything is computed when it is asked for first, and kept but for tables of records."""

    def __init__(self, path: Path, engine: Engine) -> None:
        """Open the run directory; use `dtprof.open_run`."""
        self._given = path
        self._engine = engine
        self._opened = open_with(path, engine)

    @property
    def path(self) -> Path:
        """The run directory; of a run at a URL that of the copy."""
        return self._opened.path

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that left a log, ascending."""
        return tuple(self._opened.ranks)

    def summary(self) -> "Summary":
        """Return the result of `dtprof summary`; docs/reference/metrics.md defines its figures."""
        return self._summary

    @cached_property
    def _summary(self) -> "Summary":
        return run_measurement.summarise_opened(self._opened, self._engine)

    def diagnose(self) -> "Verdict":
        """Return the result of `dtprof diagnose`. Each call reads the run again: the job may be running."""
        from dtprof.session.run_diagnosis import diagnose_run

        return diagnose_run(self._given, self._engine)

    def compare(self, other: "Run", *, at_least: float = 0.01) -> "Comparison":
        """Return the result of `dtprof compare` of this run, A, with another, B.

        Raises:
            UsageError: `other` is no run, or `at_least` lies outside 0 to 1.
        """
        from dtprof.analysis.comparison.run_comparison import compare_runs

        if not isinstance(other, Run):
            raise UsageError(f"other is {other!r}; expected a run as dtprof.open_run returns it")
        if not 0 <= at_least <= 1:
            raise UsageError(f"at_least is {at_least!r}; expected a share from 0 to 1, for example 0.01")
        return compare_runs(self._figures, other._figures, at_least=at_least)

    def whatif(self, *fixes: str, **options: object) -> "Prediction":
        """Return the result of `dtprof whatif`: the step after changes, or without changes the gain of each single one.

        Parameters:
            fixes: as behind `--fix`, such as "rank=3".
            options: by the names of the command's options, such as network="2x" or reduce_dtype="bf16".

        Raises:
            UsageError: a change is none, or names what the run does not have.
        """
        from dtprof.analysis.whatif.whatif_changes import OPTIONS, parse_fixes
        from dtprof.session.whatif_prediction import predict

        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UsageError(f"there is no change {unknown[0]!r}; expected one of {', '.join(OPTIONS)}")
        given = {name: str(value) for name, value in options.items()}
        return predict(self._opened, self._engine, parse_fixes(fixes, given))

    @cached_property
    def _figures(self) -> "RunFigures":
        (figures,) = run_measurement.measure([self._opened], self._engine)
        return figures

    def table(self, name: str, *, ranks: Iterable[int] | None = None) -> "Table":
        """Return a table: records as they are ("operations", "spans", "samples"), profiler windows, or results.

        Records of all ranks are read into memory unless `ranks` names some: about 200 bytes an operation.

        Raises:
            UsageError: there is no such table or rank, or `ranks` is given for results.
        """
        if name in RESULTS:
            if ranks is not None:
                raise UsageError(f"table {name!r} is a result of all ranks; expected `ranks` with records only")
            return result_tables.tabulate_results(name, self._summary)
        if name not in (*RECORDS, *TRACES):
            raise UsageError(f"there is no table {name!r}; expected one of {', '.join((*RECORDS, *RESULTS, *TRACES))}")
        chosen = list(self.ranks) if ranks is None else list(ranks)
        missing = sorted(set(chosen) - set(self.ranks))
        if missing:
            raise UsageError(f"rank {missing[0]} left no log; expected ranks of {list(self.ranks)}")
        if name in TRACES:
            return window_tables.read_traces(name, self._opened, chosen)
        return record_tables.read_records(name, (self._opened.load(rank) for rank in chosen))

    def figure(self, name: str) -> Any:
        """Return a Plotly figure of the report, such as "step_times" or "pipeline"; api.FIGURES has all names.

        Raises:
            UsageError: there is no such figure.
            NothingToShowError: the run holds nothing to draw.
        """
        from dtprof.report.figures.drawing import Nothing
        from dtprof.report.figures.figure_registry import FIGURES

        if name not in FIGURES:
            raise UsageError(f"there is no figure {name!r}; expected one of {', '.join(FIGURES)}")
        drawn = FIGURES[name](self._source)
        if isinstance(drawn, Nothing):
            raise NothingToShowError(f"{drawn.why} {drawn.remedy}")
        return drawn.figure

    @cached_property
    def _source(self) -> "Source":
        return report_data.read_figure_source(self._opened, self._engine)

    def __repr__(self) -> str:
        """Return where it lies and how many ranks left a log."""
        return f"<dtprof run {self._opened.name!r}: {plural(len(self.ranks), 'rank')}>"

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        from dtprof.report.text.summary_text import summary_text

        return as_html(summary_text(self._summary))


def open_run(
    path: str | os.PathLike[str], *, engine: str = "local", scheduler: str = "", jobs: int | None = None
) -> Run:
    """Open a run directory, or the run at a URL that fsspec can open.

    Parameters:
        engine: where what takes long is computed: "local", this host, or "dask".
        scheduler: of Dask, its address; empty: a cluster on this host is made each time.
        jobs: worker processes on this host, 1 for none; None: as many as pay.

    Raises:
        NotARunError: the path does not exist, or holds nothing that dtprof wrote.
        NewerFormatError: it was written by a newer dtprof.
        MissingDependencyError: a package that the URL needs is not installed.
        UsageError: there is no such engine, or the parameters contradict each other.
    """
    show_results_as_text()
    return Run(Path(path), make_engine(engine, scheduler=scheduler, jobs="" if jobs is None else str(jobs)))


def schema(table: str) -> "tuple[Column, ...]":
    """Return the columns of a table without a run.

    Raises:
        UsageError: there is no such table.
    """
    if table in RECORDS:
        return record_tables.RECORDS[table][0]
    if table in RESULTS:
        return result_tables.RESULTS[table][0]
    if table in TRACES:
        return window_tables.TRACES[table]
    raise UsageError(f"there is no table {table!r}; expected one of {', '.join((*RECORDS, *RESULTS, *TRACES))}")
