"""Diagnose a job from all that is left of it: runs of its nodes, Flight Recorder dumps, logs, in any mixture."""

import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.errors import UsageError
from dtprof.session.engines import IN_THIS_PROCESS, Engine, open_run

if TYPE_CHECKING:
    from dtprof.diagnosis.findings import Verdict
    from dtprof.diagnosis.job_state import JobState


def diagnose(paths: Iterable[Path], engine: Engine = IN_THIS_PROCESS) -> "Verdict":
    """Return one verdict on everything given.

    Raises:
        NotARunError, NotADumpError: what was given cannot be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
        UsageError: it is not of one job.
    """
    from dtprof.session.diagnosis_inputs import sort_inputs

    inputs = sort_inputs(paths)
    attempts = _read_logs(inputs.logs) if inputs.logs else []
    others = attempts[-1:]
    if inputs.dumps:
        others.insert(0, _read_dumps(inputs.dumps))
    if len(inputs.runs) > 1:
        verdict = _diagnose_nodes(inputs.runs, engine, others)
    elif inputs.runs:
        from dtprof.session.run_diagnosis import diagnose_run

        verdict = diagnose_run(inputs.runs[0], engine, beside=others)
    else:
        verdict = _diagnose_merged(attempts[:-1], others)
    return replace(verdict, cannot_tell=(*verdict.cannot_tell, *inputs.problems))


def _read_dumps(paths: Sequence[Path]) -> "JobState":
    from dtprof.diagnosis.sources.flight_recorder.dump_files import read_dumps
    from dtprof.diagnosis.sources.flight_recorder.dump_tables import ArgumentTable
    from dtprof.diagnosis.sources.flight_recorder.dumped_ranks import gather_dumps

    return gather_dumps(*read_dumps(paths, labels := ArgumentTable()), labels)


def _read_logs(paths: Iterable[Path]) -> "list[JobState]":
    from dtprof.diagnosis.sources.logs.log_reader import read_logs  # its grammar takes 20 ms to compile

    return read_logs(paths)


def diagnose_logs(paths: Iterable[Path]) -> "Verdict":
    """Return the verdict on files that are taken for logs whatever they hold.

    Raises:
        NotARunError: a file cannot be read, or there is none.
    """
    *earlier, last = _read_logs(paths)
    return _diagnose_merged(earlier, [last])


def _diagnose_merged(earlier: "Sequence[JobState]", sources: "Sequence[JobState]") -> "Verdict":
    """Return the verdict on the merged sources, with evidence from earlier attempts."""
    from dtprof.diagnosis.attempts import judge, remember
    from dtprof.diagnosis.source_merging import merge

    return remember(judge(merge(sources)), [judge(attempt) for attempt in earlier])


def _diagnose_nodes(folders: Sequence[Path], engine: Engine, others: "Sequence[JobState]") -> "Verdict":
    """Return the verdict on a job whose launchers have written a run each: joined for as long as it is read."""
    from dtprof.session.node_runs import gather_runs
    from dtprof.session.process_liveness import is_recorded
    from dtprof.session.run_diagnosis import diagnose_run

    runs = [open_run(folder, IN_THIS_PROCESS) for folder in folders]
    for run in runs:
        if is_recorded(run):
            raise UsageError(
                f"{len(folders)} run directories were given, and {run.name} is still recorded; expected those of the "
                f"nodes of a job that has ended, or one: dtprof diagnose {shlex.quote(str(run.path))}"
            )
    beside = runs[0].path.absolute().parent  # where files can be linked
    with tempfile.TemporaryDirectory(prefix=".dtprof-", dir=beside if os.access(beside, os.W_OK) else None) as scratch:
        gathered = gather_runs(runs, Path(scratch) / "run", force=False)
        verdict = diagnose_run(Path(scratch) / "run", engine, beside=others)
    return replace(verdict, cannot_tell=(*verdict.cannot_tell, *gathered.remarks))
