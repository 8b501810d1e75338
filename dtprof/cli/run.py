"""`dtprof run`: run a job with every rank recorded."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import settings
from dtprof.cli import job_command
from dtprof.cli.parsers import output_path
from dtprof.errors import CommandNotFoundError, DtprofError, UsageError
from dtprof.typed_quantities import parse_port

if TYPE_CHECKING:
    from dtprof.launch import job_launch
    from dtprof.launch.metrics_threads import MetricsSettings

EPILOG = """\
examples:
  dtprof run -- torchrun --nproc-per-node 4 train.py --epochs 3
  dtprof run --trace-steps 10:13 --trace-ranks 0,5 -- torchrun --nproc-per-node 8 train.py
  dtprof run --trace-every 10m -- torchrun --nproc-per-node 8 train.py
  dtprof run --check handles -- torchrun --nproc-per-node 4 train.py
  dtprof run -o runs/baseline --hang-after 30 --on-hang stop -- python -m torch.distributed.run train.py

exit status: the command's own; 3 when a hung job was stopped; 2 when dtprof could not start it (127: no such command)
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a job with every rank recorded",
        description="Run any launcher or program with every rank recorded. Nothing in the program changes.",
        usage="dtprof run [options] -- COMMAND [ARGUMENT ...]",
        epilog=EPILOG,
    )
    for setting in settings.RUN_SETTINGS:
        short = ["-o"] if setting is settings.OUTPUT else []
        if setting.metavar:
            parser.add_argument(*short, setting.option, metavar=setting.metavar, help=f"{setting.help} [{setting.env}]")
        else:
            parser.add_argument(setting.option, action="store_true", help=f"{setting.help} [{setting.env}=1]")
    parser.add_argument("--force", action="store_true", help="replace the run in the output directory")
    parser.add_argument(
        "--off", action="store_true", help="run the command as it is: nothing is recorded [DTPROF_OFF=1]"
    )
    job_command.add_job(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the job; see the epilog for the exit status."""
    command = job_command.job_of(arguments)
    if arguments.off or settings.is_switched_on(settings.ENV_OFF):
        return _run_bare(command)

    try:
        return _record(command, arguments)
    except DtprofError as error:
        if not os.environ.get(settings.ENV_ALWAYS) or isinstance(error, CommandNotFoundError):
            raise
        # Nobody asked for this recording: the job runs whatever comes.
        print(f"dtprof: {error}: the job is not recorded", file=sys.stderr, flush=True)
        os.environ[settings.ENV_OFF] = "1"
        return _run_bare(command)


def _record(command: list[str], arguments: argparse.Namespace) -> int:
    from dtprof.launch import child_process

    with child_process.signals_held():  # numpy starts threads where it is first imported
        from dtprof.session import job_recording

        if store := os.environ.get(settings.ENV_ALWAYS):
            job_recording.prune_beside(Path(store))
    return job_recording.record_job(command, _settings(arguments))


def _run_bare(command: list[str]) -> int:
    """Become the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise CommandNotFoundError(f"{command[0]!r} cannot be started ({error.strerror})") from error


def _settings(arguments: argparse.Namespace) -> "job_launch.JobSettings":
    from dtprof.launch import job_launch

    def given(setting: settings.Setting, value: str | None) -> str:
        return value if value is not None else settings.from_environment(setting)

    try:
        output = output_path(text) if (text := given(settings.OUTPUT, arguments.output)) else None
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{settings.OUTPUT.option} (or {settings.OUTPUT.env}): {error}") from None
    on_hang = given(settings.ON_HANG, arguments.on_hang)
    if on_hang not in ("report", "stop"):
        raise UsageError(f"--on-hang (or {settings.ON_HANG.env}) is {on_hang!r}; expected report or stop")
    max_log = given(settings.MAX_LOG_MB, arguments.max_log_mb)
    hang_after = given(settings.HANG_AFTER, arguments.hang_after)
    return job_launch.JobSettings(
        output=output,
        force=arguments.force,
        join=arguments.join or settings.is_switched_on(settings.JOIN.env),
        native=not (arguments.no_native or settings.is_switched_on(settings.NO_NATIVE.env)),
        max_log_mb=settings.parse_number(max_log, setting=settings.MAX_LOG_MB, minimum=16),
        hang_after_s=settings.parse_number(hang_after, setting=settings.HANG_AFTER, minimum=0),
        stop_on_hang=on_hang == "stop",
        metrics=_metrics(given, arguments),
        trace=_trace(given, arguments),
        collect=given(settings.COLLECT, arguments.collect),
        check=settings.parse_check(given(settings.CHECK, arguments.check)),
    )


def _trace(given: Callable[[settings.Setting, str | None], str], arguments: argparse.Namespace) -> dict[str, str]:
    """Return the settings of profiler windows for the environment of the ranks."""
    steps = given(settings.TRACE_STEPS, arguments.trace_steps)
    every = given(settings.TRACE_EVERY, arguments.trace_every)
    ranks = given(settings.TRACE_RANKS, arguments.trace_ranks)
    if steps:
        settings.parse_traced_steps(steps)
    if every:
        settings.parse_trace_every(every)
    if ranks and not steps and not every:
        raise UsageError(
            f"--trace-ranks (or {settings.TRACE_RANKS.env}) is {ranks!r} without steps; expected --trace-steps as "
            f"well, or --trace-every, for example --trace-steps 10:13 --trace-ranks {ranks}"
        )
    settings.parse_traced_ranks(ranks)
    limit = settings.parse_number(
        given(settings.MAX_TRACE_MB, arguments.max_trace_mb), setting=settings.MAX_TRACE_MB, minimum=1
    )
    return {
        settings.TRACE_STEPS.env: steps,
        settings.TRACE_EVERY.env: every,
        settings.TRACE_RANKS.env: ranks,
        settings.MAX_TRACE_MB.env: f"{limit:g}",
    }


def _metrics(given: Callable[[settings.Setting, str | None], str], arguments: argparse.Namespace) -> "MetricsSettings":
    from dtprof.launch.metrics_threads import MetricsSettings

    port, file = (
        given(settings.METRICS_PORT, arguments.metrics_port),
        given(settings.METRICS_FILE, arguments.metrics_file),
    )
    option = f"--metrics-port (or {settings.METRICS_PORT.env})"
    return MetricsSettings(
        port=parse_port(port, option=option, example=9400) if port else None,
        # Without this an empty one, of a variable that is not set, would open the port to all networks.
        address=given(settings.METRICS_ADDRESS, arguments.metrics_address) or settings.METRICS_ADDRESS.default,
        file=Path(file).absolute() if file else None,
    )
