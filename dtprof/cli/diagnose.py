"""`dtprof diagnose`: which rank, which collective, which line, and what to do."""

import argparse
import json

from dtprof.cli import engine_options, run_argument
from dtprof.cli.next_command import say_next

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
    )
    run_argument.add_paths(
        parser,
        words="run directory (or those of the nodes of one job), Flight Recorder dumps (pickle or JSON), job logs, or "
        "a directory of those; several belong to one job",
    )
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON, schema 1")
    engine_options.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict."""
    from dtprof.report.documents.verdict_json import verdict_json
    from dtprof.report.text.verdict_text import verdict_text
    from dtprof.session.job_diagnosis import diagnose
    from dtprof.session.stored_runs import keep_verdict

    verdict = diagnose(arguments.paths, engine_options.chosen_engine(arguments))
    if arguments.json:
        print(json.dumps(verdict_json(verdict), indent=1))
    else:
        print(verdict_text(verdict))
    if len(arguments.paths) == 1 and verdict.source == ("run",):
        keep_verdict(arguments.paths[0], verdict)
    if not arguments.json and len(arguments.paths) == 1 and "run" in verdict.source:
        say_next("report" if verdict.faults else "summary", *arguments.paths)
    return 1 if verdict.faults else 0
