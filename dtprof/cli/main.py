"""The `dtprof` command: finds the subcommand, prints errors as one sentence."""

import argparse
import errno
import importlib
import sys
from collections.abc import Sequence

from dtprof import __version__
from dtprof.cli import run_argument
from dtprof.cli.parsers import CommandParser
from dtprof.errors import DtprofError, OutputError

COMMAND_GROUPS = {
    "record a job": ("run", "demo", "overhead", "inject", "collect", "gather", "import"),
    "look at a run": ("runs", "summary", "report", "dashboard", "top", "tensorboard", "trace"),
    "diagnose a job": ("doctor", "diagnose", "stacks", "lint"),
    "predict": ("whatif", "plan"),
    "compare runs": ("compare", "check"),
    "export a run": ("export",),
    "set up a shell": ("completion",),
}
"""Commands by the question of the user; `dtprof --help` lists them so."""
COMMANDS = tuple(command for commands in COMMAND_GROUPS.values() for command in commands)
EPILOG = """\
start here:
  dtprof run -- torchrun --nproc-per-node 4 train.py    record a job, no code change
  dtprof summary                                        where the time of the newest run goes
  dtprof report                                         the same as an interactive page
  dtprof diagnose                                       which rank, which collective, which line
  dtprof demo                                           all of it on the built-in example
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = CommandParser(
        prog="dtprof",
        description="Profile and diagnose distributed PyTorch training, with no code change.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dtprof {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=CommandParser)
    for name in COMMANDS:
        module = importlib.import_module(f"dtprof.cli.{name}")
        module.add_parser(subparsers)
        command = subparsers.choices[name]
        command.name_variables(name)
        command.set_defaults(run=module.run, refuse=command.refuse)
    _group_commands(parser, subparsers)
    return parser


def _group_commands(parser: argparse.ArgumentParser, subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """List the commands in help by COMMAND_GROUPS; argparse itself has one flat list for subcommands."""
    listed = {action.dest: action for action in subparsers._get_subactions()}
    parser._positionals._group_actions.remove(subparsers)  # the flat list; parsing does not read the help groups
    for title, commands in COMMAND_GROUPS.items():
        parser.add_argument_group(title)._group_actions.extend(listed[command] for command in commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nothing is wrong.
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        return 130


def _run(given: list[str]) -> int:
    # What follows the first `--` belongs to the job and is not ours to look at; nor is what follows its first word.
    cut = given.index("--") if "--" in given else len(given)
    parsed, left = build_parser().parse_known_args(given[:cut])
    if left:
        parsed.refuse(left)  # of the command, with its usage
    if cut < len(given):
        begun = getattr(parsed, "job", [])
        parsed.job = [*begun, *given[cut if begun else cut + 1 :]]
    try:
        run_argument.fill_in(parsed)
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except DtprofError as error:
        origins = [
            f"{option} is from {name}" for option, name in parsed.from_environment.items() if option in str(error)
        ]
        print(f"dtprof {parsed.command}: {'; '.join([str(error), *origins])}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        sys.stdout = None  # what it still holds cannot be written either
        print(
            f"dtprof {parsed.command}: stdout cannot be written to ({error.strerror}); send it where there is room",
            file=sys.stderr,
        )
        return OutputError.exit_status
    return status


if __name__ == "__main__":
    sys.exit(main())
