"""The argument that is the command of a job, behind `--`."""

import argparse

from dtprof.errors import UsageError

EXAMPLE = "torchrun --nproc-per-node 4 train.py"


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add COMMAND and its arguments to a command, which finds them by `job_of`."""
    parser.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments, best after `--`"
    )


def job_of(arguments: argparse.Namespace, *, example: str = EXAMPLE) -> list[str]:
    """Return the command of the job.

    Raises:
        UsageError: none was given.
    """
    job: list[str] = arguments.job
    if not job:
        raise UsageError(
            f"no command was given; expected one after `--`, for example: dtprof {arguments.command} -- {example}"
        )
    return job
