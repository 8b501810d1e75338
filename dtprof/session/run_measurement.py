"""Measure runs by an engine: the summary, the steps of one, the differences of two."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.session.engines import Engine, at_hand, executor_for, open_run

if TYPE_CHECKING:
    from dtprof.analysis.comparison.comparison_series import RunFigures
    from dtprof.analysis.comparison.run_comparison import Comparison
    from dtprof.analysis.results import Summary
    from dtprof.records.reader import Run


def summarise(run: "Run", engine: Engine) -> "Summary":
    """Summarise a run.

    Raises:
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    from dtprof.analysis.whatif.advice import summarise_advised
    from dtprof.session.process_liveness import confirm_running
    from dtprof.session.window_summaries import add_windows

    with executor_for(engine, run) as executor:
        return add_windows(confirm_running(summarise_advised(at_hand(run, executor), executor), run), run)


def measure(runs: "Sequence[Run]", engine: Engine) -> "list[RunFigures]":
    """Measure runs step by step, as a comparison needs them; raise as `summarise` does."""
    from dtprof.analysis.comparison.comparison_series import measure_run

    with executor_for(engine, *runs) as executor:
        return [measure_run(at_hand(run, executor), executor) for run in runs]


def compare(path_a: Path, path_b: Path, engine: Engine, *, at_least: float) -> "Comparison":
    """Compare two runs; differences below `at_least` do not count.

    Raises:
        NotARunError: a path holds no run that can be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    from dtprof.analysis.comparison.run_comparison import compare_runs

    a, b = measure([open_run(path, engine) for path in (path_a, path_b)], engine)
    return compare_runs(a, b, at_least=at_least)
