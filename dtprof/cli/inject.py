"""`dtprof inject`: let dtprof into Python processes that PYTHONPATH does not reach."""

import argparse
import json
import sys

EPILOG = """\
examples:
  dtprof inject install --python /opt/venv/bin/python
  dtprof run -- env -i /opt/venv/bin/python -I train.py
  dtprof inject remove --python /opt/venv/bin/python

What is installed does nothing outside jobs of dtprof run. exit status: 0; status: 1 where nothing is installed;
2 site-packages cannot be written to, or the interpreter not run
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inject",
        help="reach Python started with -E, -I or a cleared environment",
        description="Put a .pth file into the site-packages of an interpreter, or take it away. With it, dtprof run "
        "reaches processes that ignore or have lost PYTHONPATH: python -E, python -I, env -i.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "action",
        choices=("install", "remove", "status"),
        help="put it there, take it away, or print whether it is there",
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PYTHON", help="interpreter of the job (default: that of dtprof)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")


def run(arguments: argparse.Namespace) -> int:
    """Install, remove or inspect; print the state."""
    from dtprof.launch import injection

    if arguments.action == "install":
        found = injection.install(arguments.python)
    elif arguments.action == "remove":
        injection.remove(arguments.python)
        found = injection.inspect(arguments.python)
    else:
        found = injection.inspect(arguments.python)
    installed = found.start is not None
    if arguments.json:
        document = {
            "schema": 1,
            "site_packages": str(found.site_packages),
            "installed": installed,
            "start": found.start,
            "is_current": found.is_current,
        }
        print(json.dumps(document, indent=1))
    elif installed:
        of = "" if found.is_current else f", of another dtprof: {found.start}; `install` replaces it"
        print(f"installed in {found.site_packages}{of}")
    else:
        print(f"not installed in {found.site_packages}")
    return 1 if arguments.action == "status" and not installed else 0
