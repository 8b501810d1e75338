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


def diagnose(paths: Iterable[Path], engine: Engine = IN_THIS_PROCESS) -> "Verdict":
    """Return one verdict on everything given.

    Raises:
        NotARunError, NotADumpError: what was given cannot be read.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
        UsageError: it is not of one job.
    """
    from dtprof.diagnosis.source_merging import join
    from dtprof.session.diagnosis_inputs import sort_inputs

    inputs = sort_inputs(paths)
    verdicts = []
    if len(inputs.runs) > 1:
        verdicts.append(_diagnose_nodes(inputs.runs, engine))
    elif inputs.runs:
        from dtprof.session.run_diagnosis import diagnose_run

        verdicts.append(diagnose_run(inputs.runs[0], engine))
    if inputs.dumps:
        from dtprof.diagnosis.sources.flight_recorder.dump_files import read_dumps
        from dtprof.diagnosis.sources.flight_recorder.dump_tables import Labels
        from dtprof.diagnosis.sources.flight_recorder.dumped_ranks import gather_dumps
        from dtprof.diagnosis.verdict import decide

        dumps = gather_dumps(*read_dumps(inputs.dumps, labels := Labels()), labels)
        verdicts.append(decide(dumps, ("flight_recorder",)))
    if inputs.logs:
        from dtprof.diagnosis.sources.logs.log_reader import diagnose_logs

        verdicts.append(diagnose_logs(inputs.logs))
    verdict = join(verdicts)
    return replace(verdict, cannot_tell=(*verdict.cannot_tell, *inputs.problems))


def _diagnose_nodes(folders: Sequence[Path], engine: Engine) -> "Verdict":
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
        verdict = diagnose_run(Path(scratch) / "run", engine)
    return replace(verdict, cannot_tell=(*verdict.cannot_tell, *gathered.remarks))
