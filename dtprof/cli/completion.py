"""`dtprof completion`: the script by which a shell completes commands, options and paths of dtprof."""

import argparse

EPILOG = """\
examples:
  dtprof completion bash > ~/.local/share/bash-completion/completions/dtprof
  dtprof completion zsh > ~/.zfunc/_dtprof       with `fpath+=~/.zfunc` before compinit in ~/.zshrc
  eval "$(dtprof completion bash)"               in this shell only

exit status: 0
"""
SHELLS = ("bash", "zsh", "tcsh")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print the completion script of a shell",
        description="Print the script by which a shell completes commands, options and paths of dtprof.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from dtprof.cli.main import build_parser

    parser = build_parser()
    _complete_paths(parser)
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Let every argument that is a path complete to files and folders."""
    from pathlib import Path

    import shtab

    from dtprof.cli.parsers import output_path

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
        elif action.type in (Path, output_path):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab reads it
