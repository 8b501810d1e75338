"""Read and analyse, by an engine, all that figures and pages of a report show of a run."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprof.session.engines import Engine, at_hand, executor_for, open_run

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary
    from dtprof.analysis.timeline.run_closeup import Closeup
    from dtprof.records.reader import Run
    from dtprof.report.figures.figure_source import Source


def read_figure_source(run: "Run", engine: Engine) -> "Source":
    """Read and analyse all that figures draw of a run."""
    from dtprof.analysis.timeline.run_closeup import examine
    from dtprof.session.process_liveness import confirm_running

    with executor_for(engine, run) as executor:
        summary, closeup = examine(at_hand(run, executor), executor)
        return _source(run, confirm_running(summary, run), closeup)


def read_report_source(path: Path, engine: Engine, *, against: Path | None = None) -> "Source":
    """Read and analyse all that the pages of a report show; the run is diagnosed while workers summarise it.

    Raises:
        NotARunError: a path holds no run that can be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    from concurrent.futures import Future, ThreadPoolExecutor

    from dtprof.analysis.comparison.comparison_series import measure_run
    from dtprof.analysis.comparison.run_comparison import AT_LEAST, compare_runs
    from dtprof.analysis.timeline.run_closeup import examine
    from dtprof.diagnosis.reported_mismatches import list_reported
    from dtprof.session.run_diagnosis import diagnose_opened, stragglers_of
    from dtprof.session.run_measurement import complete

    runs = [open_run(run_path, engine) for run_path in (against, path) if run_path is not None]
    summarised: Future[Summary] = Future()
    with executor_for(engine, *runs) as executor, ThreadPoolExecutor(1) as beside:
        runs = [at_hand(run, executor) for run in runs]
        run = runs[-1]
        # The pages load Plotly, which takes as long as the workers take to start.
        beside.submit(importlib.import_module, "dtprof.report.pages.html_file")
        diagnosed = beside.submit(diagnose_opened, run, lambda: stragglers_of(summarised.result()), executor)
        try:
            summary, closeup = examine(run, executor)
            summary = complete(summary, run)
            summarised.set_result(summary)
        finally:
            summarised.cancel()  # or the diagnosis would wait for ever where that failed
        figures = [measure_run(run, executor) for run in runs] if against is not None else []
        verdict = diagnosed.result()
    return _source(
        run,
        summary,
        closeup,
        verdict=verdict,
        comparison=compare_runs(*figures, at_least=AT_LEAST) if figures else None,
        reported=list_reported(run.mismatches, verdict, started_ns=run.manifest.started_realtime_ns),
    )


def _source(run: "Run", summary: "Summary", closeup: "Closeup", **more: Any) -> "Source":
    from dtprof.analysis.memory.device_series import follow_devices, samples_each
    from dtprof.report.figures.figure_source import Source

    nodes = run.node_samples(max_samples=samples_each(len(summary.hosts)))
    return Source(summary=summary, closeup=closeup, nodes=follow_devices(nodes.values()), **more)
