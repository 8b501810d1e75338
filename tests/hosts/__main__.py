"""Measure how often, and how soon, a fault of a host is named: `python -m tests.hosts [--repetitions N]`.

One job of two hosts: its second host is cut off, and frozen, N times in turn, each until the verdict names it and
again until no verdict does any more; in the end it loses its power. Then a job whose second host has a tenth of a core.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dtprof.diagnosis.sources.recorded_run import SILENT_AFTER_S
from tests.hosts.collected_jobs import CollectedJob, collected, is_training
from tests.hosts.machines import why_not


class Rates:
    """How often a fault was named, and after how long."""

    def __init__(self) -> None:
        """Begin."""
        self.after_s: dict[str, list[float]] = {}
        self.missed: dict[str, int] = {}

    def add(self, fault: str, job: CollectedJob, kind: str) -> None:
        """Wait for the verdict of a fault that has begun."""
        try:
            named, (_, after_s) = True, job.wait_for(kind, "b")
        except AssertionError as error:
            print(error, file=sys.stderr)
            named, after_s = False, 0.0
        if named:
            self.after_s.setdefault(fault, []).append(after_s)
        else:
            self.missed[fault] = self.missed.get(fault, 0) + 1
        print(f"{fault}: {'named' if named else 'not named'} after {after_s:.1f} s", flush=True)

    def show(self) -> None:
        """Print a line for each fault."""
        for fault in dict.fromkeys([*self.after_s, *self.missed]):
            times = self.after_s.get(fault, [])
            total = len(times) + self.missed.get(fault, 0)
            spread = f"{statistics.median(times):.1f} s ({min(times):.1f} to {max(times):.1f})" if times else "-"
            print(f"{fault}: host named in {len(times)} of {total}, after {spread}")


def measure(folder: Path, repetitions: int) -> None:
    """Run the jobs."""
    rates = Rates()
    print(f"a host counts as silent after {SILENT_AFTER_S:.0f} s")
    with collected(folder / "silent") as job:
        job.wait_until(lambda: is_training(job))
        host = job.workers[1]
        faults: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "link cut": (host.cut_link, host.mend_link),
            "host frozen": (host.freeze, host.thaw),
        }
        for _ in range(repetitions):
            for name, (begin, mend) in faults.items():
                begin()
                rates.add(name, job, "host-silent")
                mend()
                job.wait_until_gone("host-silent")
        host.kill()
        rates.add("host killed", job, "host-silent")
    with collected(folder / "slow") as job:
        job.wait_until(lambda: is_training(job))
        with job.workers[1].slowed(0.1):
            rates.add("host slow", job, "slow-rank")
    rates.show()


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="of each fault that can be mended")
    if why_not():
        print(why_not(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), parser.parse_args().repetitions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
