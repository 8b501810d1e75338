"""Measure jobs of several hosts, which are namespaces on this machine: `python -m tests.hosts WHAT [options]`.

faults: how often, and how soon, a fault of a host is named. One job: its second host is cut off, and frozen, N times
in turn, each until the verdict names it and again until no verdict does any more; another whose second host has a slow
link N times; two whose second host has 10 or 30 % more work N times. Then N jobs each whose second host loses its
power, has a small share of a core, starts nothing (under Slurm), or starts a script that does not come to torchrun;
N sound ones, whose links are all as slow; and N whose second host has another torch. The time of a rendezvous begins
where torchrun listens for it, that of another torch where every rank has sent something.
launchers: what is recorded of a sound job, and of one in which a rank fails, under each launcher.
clocks: how far the clocks of hosts are known, where the run is collected and where it is gathered.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dtprof.diagnosis.sources.recorded_run import SILENT_AFTER_S
from tests.hosts import launcher_checks
from tests.hosts.collected_jobs import HANG_AFTER_S, CollectedJob, collected, is_training
from tests.hosts.launchers import PORT, slurm_torchrun, torchrun_behind_a_script
from tests.hosts.machines import REPOSITORY, why_not
from tests.jobs import DTPROF

LINK_KBIT_PER_S = 2000
SLOW_SHARE = 0.03
"""Of a core, of a slow host: a tenth is what each host gets where twenty others wait for two cores."""
FAST_S = 15.0
"""Between two times at which a link is slow: what is usual is what it does in a quarter of the run."""
SOUND_S = 30.0
"""For so long a sound job is diagnosed again and again."""
ROUNDS = 100
"""Of work in a step, of jobs whose second host is a little slower: a tenth of it is beyond the noise of short steps."""
SLOWER_S = 90.0
"""For so long a host that is a little slower may go unnamed."""
FAULTS = (
    *("silent", "killed", "slow", "slower-by-10", "slower-by-30", "slow-link", "links-equal"),
    *("absent", "behind", "versions"),
)


class Rates:
    """How often a fault was named, and after how long."""

    def __init__(self) -> None:
        """Begin."""
        self.after_s: dict[str, list[float]] = {}
        self.missed: dict[str, int] = {}
        self.sound: dict[str, list[bool]] = {}

    def add(self, fault: str, job: CollectedJob, kind: str, *hosts: str, patience_s: float | None = None) -> None:
        """Wait for the verdict of a fault that has begun."""
        try:
            named, (_, after_s) = True, job.wait_for(kind, *hosts, patience_s=patience_s)
        except AssertionError as error:
            print(error, file=sys.stderr)
            named, after_s = False, 0.0
        if named:
            self.after_s.setdefault(fault, []).append(after_s)
        else:
            self.missed[fault] = self.missed.get(fault, 0) + 1
        print(f"{fault}: {'named' if named else 'not named'} after {after_s:.1f} s", flush=True)

    def add_sound(self, name: str, job: CollectedJob) -> None:
        """Diagnose a sound job for a while; what is found is a mistake."""
        found: dict[str, str] = {}
        deadline_s = time.monotonic() + SOUND_S
        while time.monotonic() < deadline_s:
            verdict = job.diagnose()
            found |= {one.kind: one.summary for one in (verdict.faults if verdict else ())}
            time.sleep(0.2)
        self.sound.setdefault(name, []).append(bool(found))
        print(f"{name}: {found or 'nothing found'}", flush=True)

    def show(self) -> None:
        """Print a line for each fault."""
        for fault in dict.fromkeys([*self.after_s, *self.missed]):
            times = self.after_s.get(fault, [])
            total = len(times) + self.missed.get(fault, 0)
            spread = f"{statistics.median(times):.1f} s ({min(times):.1f} to {max(times):.1f})" if times else "-"
            print(f"{fault}: host named in {len(times)} of {total}, after {spread}")
        for name, mistakes in self.sound.items():
            print(f"{name}: something found in {sum(mistakes)} of {len(mistakes)}, which are sound")


def measure_faults(
    folder: Path, repetitions: int, num_hosts: int, num_ranks: int, only: list[str], other_torch: Path | None
) -> None:
    """Run the jobs; `other_torch` is a folder of packages with another version of torch."""
    rates = Rates()
    print(f"a host counts as silent after {SILENT_AFTER_S:.0f} s, a rendezvous as stuck after {HANG_AFTER_S} s")

    def job_of(name: str, **options: Any) -> AbstractContextManager[CollectedJob]:
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
    if "slow-link" in only:
        with job_of("slow-link") as job:
            job.wait_until(lambda: is_training(job))
            time.sleep(FAST_S)
            for _ in range(repetitions):
                with job.workers[1].link_slowed(LINK_KBIT_PER_S):
                    rates.add("link slow", job, "slow-link", "b")
                job.wait_until_gone("slow-link")
                time.sleep(FAST_S)
    for percent in (10, 30):
        if f"slower-by-{percent}" in only:
            with job_of(f"slower-by-{percent}", program=("steady_training.py", "0", "0", str(ROUNDS))) as job:
                job.wait_until(lambda: is_training(job))
                more_work = job.workers[1].folder / "more-work"
                for _ in range(repetitions):
                    more_work.write_text(str(ROUNDS * percent // 100))
                    rates.add(f"host slower by {percent} %", job, "slow-rank", "b", patience_s=SLOWER_S)
                    more_work.unlink()
                    job.wait_until_gone("slow-rank")
    for number in range(repetitions):
        if "killed" in only:
            with job_of(f"killed-{number}") as job:
                job.wait_until(lambda: is_training(job))
                job.workers[1].kill()
                rates.add("host killed", job, "host-silent", "b")
        if "slow" in only:
            with job_of(f"slow-{number}") as job:
                job.wait_until(lambda: is_training(job))
                with job.workers[1].slowed(SLOW_SHARE):
                    rates.add("host slow", job, "slow-rank", "b")
        if "links-equal" in only:
            with job_of(f"links-equal-{number}", link_kbit_per_s=LINK_KBIT_PER_S) as job:
                job.wait_until(lambda: is_training(job))
                rates.add_sound("links all as slow", job)
        if "versions" in only:
            where = {"PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(other_torch)))}
            with job_of(f"versions-{number}", env={"b": where}) as job:
                job.wait_until(lambda: job.diagnose() is not None)
                rates.add("other versions", job, "version-mismatch", "b")
        if "absent" in only:
            with job_of(f"absent-{number}", absent=1, launcher=slurm_torchrun) as job:
                job.wait_until(lambda: job.workers[0].listens(PORT))
                rates.add("rendezvous, host absent", job, "rank-never-joined", "b")
        if "behind" in only:
            with job_of(f"behind-{number}", is_behind=True, launcher=torchrun_behind_a_script) as job:
                job.wait_until(lambda: job.workers[0].listens(PORT))
                rates.add("rendezvous, script before it", job, "rank-never-joined", "b")
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
    parser.add_argument(
        "--other-torch",
        type=Path,
        metavar="FOLDER",
        help="site-packages with another torch, for the second host; not below /tmp, which each host has of its own",
    )
    given = parser.parse_args()
    if why_not():
        print(why_not(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "faults":
            only = given.only or list(FAULTS)
            if "versions" in only and not given.other_torch:
                print("no host with other versions: --other-torch says where they are", file=sys.stderr)
                only = [name for name in only if name != "versions"]
            measure_faults(folder, given.repetitions, given.hosts, given.ranks, only, given.other_torch)
        elif given.what == "launchers":
            measure_launchers(folder, given.hosts, given.only or [])
        else:
            measure_clocks(folder, given.repetitions, given.hosts, given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
