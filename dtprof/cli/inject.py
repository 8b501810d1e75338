"""`dtprof inject`: let dtprof into Python processes that PYTHONPATH does not reach."""

import argparse
import json
import sys
from pathlib import Path

from dtprof.errors import UsageError
from dtprof.typed_quantities import parse_days, parse_number

DEFAULT_STORE = "/var/lib/dtprof"
MOST = 1e9

EPILOG = """\
examples:
  dtprof inject install --python /opt/venv/bin/python
  dtprof run -- env -i /opt/venv/bin/python -I train.py
  dtprof inject install --site --store /var/lib/dtprof --keep 14d  record every torch job of this machine
  dtprof inject remove --python /opt/venv/bin/python

What is installed does nothing outside jobs of dtprof run; with --site nothing outside launchers and ranks of torch.
DTPROF_OFF=1, or a file /var/lib/dtprof/off, turns that off.
exit status: 0; status: 1 where nothing is installed; 2 site-packages cannot be written to, or the interpreter not run
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
    site = parser.add_argument_group("every torch job (install --site)")
    site.add_argument("--site", action="store_true", help="record every torch job that this interpreter starts")
    site.add_argument(
        "--store", type=Path, metavar="FOLDER", help=f"folder of the runs of all users (default: {DEFAULT_STORE})"
    )
    site.add_argument(
        "--keep", metavar="TIME", help="keep runs for TIME; hung, slow and crashed ones four times as long"
    )
    site.add_argument("--max-mb-per-run", metavar="N", help="of runs of healthy jobs keep none above N MiB")
    site.add_argument("--max-gb-per-day", metavar="N", help="of each user and day keep N GiB, the newest")
    site.add_argument("--max-gb", metavar="N", help="of each user keep N GiB, the newest (default: 50)")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1, stable: additions only)")


def run(arguments: argparse.Namespace) -> int:
    """Install, remove or inspect; print the state."""
    from dtprof.launch import injection

    policy = _policy(arguments)
    if arguments.action == "install":
        store = ""
        if arguments.site:
            from dtprof.launch import always_on

            place = (arguments.store or Path(DEFAULT_STORE)).absolute()
            injection.inspect(arguments.python)
            always_on.make_store(place, policy)
            store = str(place)
        found = injection.install(arguments.python, store=store)
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
            "store": found.store or None,
        }
        print(json.dumps(document, indent=1))
    elif installed:
        of = "" if found.is_current else f", of another dtprof: {found.start}; `install` replaces it"
        every = f"; every torch job is recorded into {found.store}" if found.store else ""
        print(f"installed in {found.site_packages}{of}{every}")
    else:
        print(f"not installed in {found.site_packages}")
    return 1 if arguments.action == "status" and not installed else 0


def _policy(arguments: argparse.Namespace) -> dict[str, float]:
    """Return for how long runs of every job are kept."""
    from dtprof.launch import always_on

    given = {
        "--store": arguments.store,
        "--keep": arguments.keep,
        "--max-mb-per-run": arguments.max_mb_per_run,
        "--max-gb-per-day": arguments.max_gb_per_day,
        "--max-gb": arguments.max_gb,
    }
    stray = next((option for option, value in given.items() if value is not None), None)
    if stray is not None and not (arguments.site and arguments.action == "install"):
        raise UsageError(
            f"{stray} was given without install --site; expected both: dtprof inject install --site {stray}"
        )
    policy = dict(always_on.DEFAULT_POLICY)
    if arguments.keep is not None:
        policy["keep_days"] = parse_days("--keep", arguments.keep)
        policy["keep_notable_days"] = 4 * policy["keep_days"]
    for option, name in (
        ("--max-mb-per-run", "max_mb_per_run"),
        ("--max-gb-per-day", "max_gb_per_day"),
        ("--max-gb", "max_gb_per_user"),
    ):
        if given[option] is not None:
            policy[name] = parse_number(option, given[option], example="50", below=MOST)
    return policy
