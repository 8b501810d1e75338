"""`dtprof diagnose`: which rank, which collective, which line, and what to do."""

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.cli.next_command import say_next
from dtprof.errors import UsageError
from dtprof.session import engines

if TYPE_CHECKING:
    from dtprof.diagnosis.findings import Verdict

EPILOG = """\
examples:
  dtprof diagnose dtprof-runs/20261121-101500-train
  dtprof diagnose /tmp/nccl_trace_rank_*     Flight Recorder dumps, one for each rank
  dtprof diagnose slurm-4711.out             what the job printed
  dtprof diagnose node-a/run node-b/run      a job whose nodes have written a run each

exit status: 0 no error or warning found, 1 something found, 2 the input cannot be read
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "diagnose",
        help="name the rank, collective and line behind a hang or a crash",
        description="Read what a finished, running or killed job left behind, and name the cause of a hang or a crash.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths",
        type=Path,
        metavar="PATH",
        nargs="+",
        help="run directory (or those of the nodes of one job), Flight Recorder dumps (pickle or JSON), job logs, or a "
        "directory of those; several belong to one job",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, schema 1")
    engines.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict."""
    from dtprof.report.documents.verdict_json import verdict_json
    from dtprof.report.text.verdict_text import verdict_text

    verdict = diagnose(arguments.paths, engines.chosen_engine(arguments))
    if arguments.json:
        print(json.dumps(verdict_json(verdict), indent=1))
    else:
        print(verdict_text(verdict))
        if len(arguments.paths) == 1 and "run" in verdict.source:
            say_next("report" if verdict.faults else "summary", *arguments.paths)
    return 1 if verdict.faults else 0


def diagnose(paths: Iterable[Path], engine: engines.Engine = engines.IN_THIS_PROCESS) -> "Verdict":
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
        from dtprof.diagnosis.sources.flight_recorder.dump_verdict import diagnose_dumps

        verdicts.append(diagnose_dumps(*read_dumps(inputs.dumps, labels := Labels()), labels))
    if inputs.logs:
        from dtprof.diagnosis.sources.logs.log_reader import diagnose_logs

        verdicts.append(diagnose_logs(inputs.logs))
    verdict = join(verdicts)
    return replace(verdict, cannot_tell=(*verdict.cannot_tell, *inputs.problems))


def _diagnose_nodes(folders: Sequence[Path], engine: engines.Engine) -> "Verdict":
    """Return the verdict on a job whose launchers have written a run each: joined for as long as it is read."""
    from dtprof.launch import run_gathering
    from dtprof.records.reader import open_run
    from dtprof.session.process_liveness import is_recorded
    from dtprof.session.run_diagnosis import diagnose_run

    opened = [open_run(folder) for folder in folders]
    for one in opened:
        if is_recorded(one):
            raise UsageError(
                f"{len(folders)} run directories were given, and {one.name} is still recorded; expected those of the "
                f"nodes of a job that has ended, or one: dtprof diagnose {shlex.quote(str(one.path))}"
            )
    nodes = [run_gathering.read_node_run(one.name, one.path, one.job_facts, one.folders) for one in opened]
    beside = opened[0].path.absolute().parent  # where files can be linked
    with tempfile.TemporaryDirectory(prefix=".dtprof-", dir=beside if os.access(beside, os.W_OK) else None) as scratch:
        gathered = run_gathering.gather(nodes, Path(scratch) / "run", force=False)
        verdict = diagnose_run(Path(scratch) / "run", engine)
    return replace(verdict, cannot_tell=(*verdict.cannot_tell, *gathered.remarks))
