"""python -m tests.stress [--trials 200] [--only KIND] [--seed S]: end jobs in every bad way; nothing may be lost.

After a stop, `--first N` goes on with trial N: a trial is drawn from seed, kind and number alone.

Exit status 1 where something was lost, a status or output changed, or a program hung that does not hang without dtprof.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import torch

from tests.stress.pairs import Tally, Trial, run_trials
from tests.stress.program import KINDS

COLUMNS = (
    "kind",
    "trials",
    "operations",
    "lost",
    "changed ends",
    "hangs bare / recorded",
    "aborts bare / recorded",
    "seconds bare / recorded",
)


def table(tallies: dict[str, Tally]) -> str:
    """Return the tallies as a table in Markdown."""
    rows = [
        [
            kind,
            f"{tally.trials}",
            f"{tally.operations:,}",
            f"{tally.lost}",
            f"{tally.changed}",
            f"{tally.hangs_bare} / {tally.hangs_recorded}",
            f"{tally.aborts_bare} / {tally.aborts_recorded}",
            f"{tally.seconds_bare:.0f} / {tally.seconds_recorded:.0f}",
        ]
        for kind, tally in tallies.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [COLUMNS, ["---"] * len(COLUMNS), *rows])


def main() -> int:
    """Run the trials, print the table on stdout and what is wrong on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--trials", type=int, default=200, help="of all kinds together (default: 200)")
    parser.add_argument(
        "--first", type=int, default=0, help="go on with this trial, where a call was stopped (default: 0)"
    )
    parser.add_argument("--only", choices=sorted(KINDS), help="trials of this kind only")
    parser.add_argument("--seed", type=int, default=1, help="draws what the programs do (default: 1)")
    parser.add_argument("--keep", type=Path, help="keep what the trials wrote in this new folder")
    arguments = parser.parse_args()
    started = time.monotonic()

    def tell(trial: Trial, tally: Tally) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {trial}", file=sys.stderr, flush=True)
        for finding in tally.findings:
            if finding.startswith(str(trial)):
                print(f"  WRONG {finding.removeprefix(str(trial))}", file=sys.stderr, flush=True)

    kinds = [arguments.only] if arguments.only else list(KINDS)
    tallies = run_trials(kinds, arguments.trials, arguments.seed, first=arguments.first, keep=arguments.keep, tell=tell)
    findings = [finding for tally in tallies.values() for finding in tally.findings]
    print("\n".join(findings), file=sys.stderr)
    print(
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}, seed {arguments.seed}"
    )
    print(f"{time.monotonic() - started:.0f} s in all\n")
    print(table(tallies))
    return 0 if all(tally.clean for tally in tallies.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
