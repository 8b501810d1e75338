"""`dtprof doctor`: check a launch, its hosts and its network before the job."""

import argparse
import json
import os
import sys
from pathlib import Path

from dtprof.cli import job_command
from dtprof.cli.next_command import say_next
from dtprof.cli.parsers import output_path
from dtprof.typed_quantities import parse_whole

EPILOG = """\
examples:
  dtprof doctor -- torchrun --nproc-per-node 4 train.py
  dtprof doctor --time 120 -- torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 train.py
  dtprof doctor --matrix cluster.json --json -- srun python train.py

Start it on every host on which you start the job. The program is not run: each rank looks at its host, meets the
others and measures its links instead. docs/reference/doctor.md lists what is found.
exit status: 0 nothing found, 1 an error or a warning, 2 it could not be done (127: no such command)
"""
LEAST_S, MOST_S = 5, 3600


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a launch, its hosts and its network before the job",
        description="Start the ranks of a job as its command does, with a check of hosts and links in their place.",
        usage="dtprof doctor [options] -- COMMAND [ARGUMENT ...]",
        epilog=EPILOG,
    )
    parser.add_argument("--time", metavar="S", default="60", help="seconds that the ranks may take (default: 60)")
    parser.add_argument(
        "-o",
        "--output",
        type=output_path,
        metavar="DIR",
        help="where the ranks leave what they find, and whose disk is tried (default: "
        "dtprof-runs/DATE-TIME-NAME-doctor)",
    )
    parser.add_argument("--force", action="store_true", help="replace what an earlier doctor left there")
    parser.add_argument(
        "--matrix",
        type=output_path,
        metavar="FILE",
        help="bandwidths of the cluster, to compare with and add to (default: in the user's data "
        "directory, by host names)",
    )
    program = parser.add_argument_group("the program, where its arguments do not say it")
    program.add_argument("--stages", metavar="N", help="stages of its pipeline")
    program.add_argument("--microbatches", metavar="N", help="microbatches of a step")
    program.add_argument("--samples", metavar="N", help="samples of its data set")
    program.add_argument("--batch-size", metavar="N", help="samples of a batch of one rank")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")
    job_command.add_job(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict."""
    command = job_command.job_of(arguments)
    from dtprof.analysis.doctor.doctor_case import PipelineFigures
    from dtprof.report.documents.doctor_json import doctor_json
    from dtprof.report.text.doctor_text import doctor_text
    from dtprof.session.launch_doctor import DoctorRequest, check_launch

    names = ("stages", "microbatches", "samples", "batch-size")
    request = DoctorRequest(
        command=tuple(command),
        seconds=parse_whole("--time", arguments.time, LEAST_S, MOST_S),
        output=arguments.output,
        force=arguments.force,
        matrix=arguments.matrix,
        given=PipelineFigures(
            **{
                name.partition("-")[0]: parse_whole(f"--{name}", text, 1, 1 << 40)
                for name in names
                if (text := getattr(arguments, name.replace("-", "_"))) is not None
            }
        ),
    )
    print(
        f"dtprof: checking `{' '.join(request.command)}` for up to {request.seconds:g} s", file=sys.stderr, flush=True
    )
    end = check_launch(request)
    if arguments.json:
        print(json.dumps(doctor_json(end.result), indent=1))
    else:
        print(doctor_text(end.result))
    print(f"dtprof: measurements of the ranks are kept in {_short(end.folder)}", file=sys.stderr)
    if end.matrix is not None:
        print(f"dtprof: bandwidths are kept in {_short(end.matrix)}, for dtprof plan --from", file=sys.stderr)
    if not arguments.json and not end.result.faults:
        say_next("run", "--", *request.command)
    return 1 if end.result.faults else 0


def _short(path: Path) -> str:
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown
