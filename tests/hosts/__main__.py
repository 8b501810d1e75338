"""Measure jobs of several hosts, which are namespaces on this machine: `python -m tests.hosts WHAT [options]`.

faults: how often, and how soon, a fault of a host is named. One job: its second host is cut off, and frozen, N times
in turn, each until the verdict names it and again until no verdict does any more; in the end it loses its power. Then
N jobs each whose second host has a small share of a core, has a slow link, or starts nothing.
launchers: what is recorded of a sound job, and of one in which a rank fails, under each launcher.
clocks: how far the clocks of hosts are known, where the run is collected and where it is gathered.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from dtprof.diagnosis.sources.recorded_run import SILENT_AFTER_S
from tests.hosts import launcher_checks
from tests.hosts.collected_jobs import HANG_AFTER_S, CollectedJob, collected, is_training
from tests.hosts.machines import Host, why_not
from tests.jobs import DTPROF

LINK_KBIT_PER_S = 2000
SLOW_SHARE = 0.03
"""Of a core, of a slow host: a tenth is what each host gets where twenty others wait for two cores."""
FAULTS = ("silent", "killed", "slow", "slow-link", "absent")


class Rates:
    """How often a fault was named, and after how long."""

    def __init__(self) -> None:
        """Begin."""
        self.after_s: dict[str, list[float]] = {}
        self.missed: dict[str, int] = {}

    def add(self, fault: str, job: CollectedJob, kind: str, *hosts: str) -> None:
        """Wait for the verdict of a fault that has begun."""
        try:
            named, (_, after_s) = True, job.wait_for(kind, *hosts)
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


def measure_faults(folder: Path, repetitions: int, num_hosts: int, num_ranks: int, only: list[str]) -> None:
    """Run the jobs."""
    rates = Rates()
    print(f"a host counts as silent after {SILENT_AFTER_S:.0f} s, a rendezvous as stuck after {HANG_AFTER_S} s")

    def job_of(name: str, **options: int) -> AbstractContextManager[CollectedJob]:
        return collected(folder / name, num_hosts=num_hosts, num_ranks=num_ranks, **options)

    if "silent" in only:
        with job_of("silent") as job:
            job.wait_until(lambda: is_training(job))
            host = job.workers[1]
            faults: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
                "link cut": (host.cut_link, host.mend_link),
                "host frozen": (host.freeze, host.thaw),
            }
            for _ in range(repetitions):
                for name, (begin, mend) in faults.items():
                    begin()
                    rates.add(name, job, "host-silent", "b")
                    mend()
                    job.wait_until_gone("host-silent")
    slowed: dict[str, tuple[str, Callable[[Host], AbstractContextManager[None]]]] = {
        "slow": ("host slow", lambda host: host.slowed(SLOW_SHARE)),
        "slow-link": ("link slow", lambda host: host.link_slowed(LINK_KBIT_PER_S)),
    }
    for number in range(repetitions):
        if "killed" in only:
            with job_of(f"killed-{number}") as job:
                job.wait_until(lambda: is_training(job))
                job.workers[1].kill()
                rates.add("host killed", job, "host-silent", "b")
        for key, (name, slow) in slowed.items():
            if key in only:
                with job_of(f"{key}-{number}") as job:
                    job.wait_until(lambda: is_training(job))
                    with slow(job.workers[1]):
                        rates.add(name, job, "slow-rank" if key == "slow" else "slow-link", "b")
        if "absent" in only:
            with job_of(f"absent-{number}", absent=1) as job:
                rates.add("rendezvous not complete", job, "rank-never-joined")
    rates.show()


def measure_launchers(folder: Path, num_hosts: int, only: list[str]) -> None:
    """Run a job under each launcher."""
    for name in only or launcher_checks.WAYS:
        found = launcher_checks.check(name, folder / name.replace(" ", "-"), num_hosts=num_hosts)
        print(f"{name}: {'as the job was' if not found else ''}", *found, sep="\n  ", flush=True)


def measure_clocks(folder: Path, repetitions: int, num_hosts: int, num_ranks: int) -> None:
    """Run jobs that are collected, and jobs that are gathered."""
    for number in range(repetitions):
        for collects in (True, False):
            with collected(
                folder / f"{number}-{collects}",
                num_hosts=num_hosts,
                num_ranks=num_ranks,
                program=("steady_training.py", str(launcher_checks.NUM_STEPS)),
                collects=collects,
            ) as job:
                statuses = job.wait_until_ended()
                run = job.run
                if not collects:
                    run = folder / f"{number}-gathered"
                    parts = [str(host.folder / "job") for host in job.workers]
                    subprocess.run([*DTPROF, "gather", *parts, "-o", str(run)], check=True, capture_output=True)
                wrong = list(launcher_checks.compare(job, run))
                said = job.said
            how = "collected" if collects else "gathered"
            print(f"{num_hosts} x {num_ranks} {how}: {launcher_checks.describe_clocks(run)}", flush=True)
            for text in (*wrong, *([f"statuses {statuses}", said] if any(statuses) else [])):
                print(f"  {text}", flush=True)


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("faults", "launchers", "clocks"), default="faults")
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="of each fault, or of each job")
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of each host")
    parser.add_argument("--only", action="append", metavar="NAME", help="one fault or launcher; several times")
    given = parser.parse_args()
    if why_not():
        print(why_not(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "faults":
            measure_faults(folder, given.repetitions, given.hosts, given.ranks, given.only or list(FAULTS))
        elif given.what == "launchers":
            measure_launchers(folder, given.hosts, given.only or [])
        else:
            measure_clocks(folder, given.repetitions, given.hosts, given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
