"""Measure runs: the summary as every command states it, the steps of one, the differences of two."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.session.engines import Engine, at_hand, executor_for, open_run

if TYPE_CHECKING:
    from dtprof.analysis.comparison.comparison_series import RunFigures
    from dtprof.analysis.comparison.run_comparison import Comparison
    from dtprof.analysis.map_reduce.survey import Surveys
    from dtprof.analysis.results import Summary
    from dtprof.job.rank_executor import Executor
    from dtprof.records.reader import Run


def summarise_opened(run: "Run", engine: Engine) -> "Summary":
    """Summarise a run by an engine.

    Raises:
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    with executor_for(engine, run) as executor:
        return summarise_fully(at_hand(run, executor), executor)


def summarise_fully(run: "Run", executor: "Executor", *, surveys: "Surveys | None" = None) -> "Summary":
    """Summarise a run, with advice, with its newest windows, and with what this host knows of its processes.

    Parameters:
        surveys: of the ranks of the newest attempt, where they are known already.
    """
    from dtprof.analysis.whatif.advice import summarise_advised

    return complete(summarise_advised(run, executor, surveys=surveys), run)


def complete(summary: "Summary", run: "Run") -> "Summary":
    """Return the summary of the records with the newest windows, and with what this host knows of its processes."""
    from dtprof.session.process_liveness import confirm_running
    from dtprof.session.window_summaries import add_windows

    return add_windows(confirm_running(summary, run), run)


def measure(runs: "Sequence[Run]", engine: Engine) -> "list[RunFigures]":
    """Measure runs step by step, as a comparison needs them; raise as `summarise_opened` does."""
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
