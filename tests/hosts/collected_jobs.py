"""A job on hosts of its own that sends its records to a host that keeps them, and what a diagnosis there says."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.records import paths
from dtprof.records.reader import open_run
from dtprof.session.engines import IN_THIS_PROCESS
from dtprof.session.run_diagnosis import diagnose_run
from tests.hosts.launchers import EVERYWHERE, Launcher, Place, torchrun, write_files
from tests.hosts.machines import Host, hosts
from tests.jobs import DTPROF

PROGRAMS = Path(__file__).parent / "programs"
HANG_AFTER_S = 10
STEPS = 50
"""Of a job that is on its way."""
PATIENCE_S = 240.0
"""For a job of two ranks: machines that test may be slow."""
PATIENCE_PER_RANK_S = 30.0
"""More, for each further rank: they start on the same cores."""


@dataclass(kw_only=True)
class CollectedJob:
    """A job that runs on the first hosts; the last one keeps its run."""

    workers: list[Host]
    keeper: Host
    num_ranks: int  # a host
    num_absent: int = 0  # workers that start nothing
    is_behind: bool = False  # ranks never start, though all workers have a launcher
    clock_offsets_s: tuple[int, ...] = ()  # by which the clock since boot of each worker is ahead of this machine's

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.workers) * self.num_ranks

    @property
    def patience_s(self) -> float:
        """How long to wait for the job to come to something."""
        return PATIENCE_S + PATIENCE_PER_RANK_S * max(0, self.world_size - 2)

    @property
    def run(self) -> Path:
        """The run at the keeper."""
        return self.keeper.folder / "store" / "job"

    @property
    def said(self) -> str:
        """What the launchers have said."""
        logs = ((host.name, file) for host in self.workers for file in sorted(host.folder.glob("job-*.log")))
        return "".join(f"-- {name}\n{file.read_text(errors='replace')}" for name, file in logs)

    def wait_until_ended(self) -> list[int]:
        """Return the exit statuses of what the workers have started, once all of it has ended."""
        return [process.wait(self.patience_s) for host in self.workers for process in host.started]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds."""
        deadline_s = time.monotonic() + self.patience_s
        while not condition():
            assert time.monotonic() < deadline_s, self.said
            time.sleep(0.2)

    def diagnose(self) -> Verdict | None:
        """Diagnose what the keeper has; None before each rank has sent something, or a launcher where none starts."""
        if self.num_absent or self.is_behind:
            return diagnose_run(self.run, IN_THIS_PROCESS) if (self.run / paths.MANIFEST).exists() else None
        if len({file.parent for file in self.run.glob("rank-*/events.*")}) < self.world_size:
            return None
        return diagnose_run(self.run, IN_THIS_PROCESS)

    def wait_for(self, kind: str, *hosts: str, patience_s: float | None = None) -> tuple[Finding, float]:
        """Return the finding of a kind that names these hosts once there is one, and after how many seconds."""
        began_s = time.monotonic()
        deadline_s = began_s + (self.patience_s if patience_s is None else patience_s)
        verdict = None
        while time.monotonic() < deadline_s:
            verdict = self.diagnose()
            found = (
                [finding for finding in verdict.findings if (finding.kind, finding.culprit_hosts) == (kind, hosts)]
                if verdict
                else []
            )
            if found:
                return found[0], time.monotonic() - began_s
            time.sleep(0.2)
        raise AssertionError(
            f"{kind} is not found: {verdict and verdict.findings} {verdict and verdict.cannot_tell}\n{self.said}"
        )

    def wait_until_gone(self, kind: str) -> None:
        """Return once there is no finding of a kind any more."""
        self.wait_until(
            lambda: (
                (verdict := self.diagnose()) is not None and all(finding.kind != kind for finding in verdict.findings)
            )
        )


@contextmanager
def collected(
    folder: Path,
    *,
    num_hosts: int = 2,
    num_ranks: int = 1,
    absent: int = 0,
    is_behind: bool = False,
    env: Mapping[str, Mapping[str, str]] | None = None,
    program: Sequence[str] = ("steady_training.py",),
    launcher: Launcher = torchrun,
    options: Sequence[str] = ("--join",),
    collects: bool = True,
    is_ssh: bool = False,
    link_kbit_per_s: int | None = None,
) -> Iterator[CollectedJob]:
    """Start a job, with ranks on each host, that is collected by a host of its own.

    Parameters:
        num_ranks: of each host.
        absent: so many hosts, the last ones, start nothing.
        is_behind: the launcher does not start the ranks.
        env: variables of the environment by name of the host.
        program: its file in `programs`, and its arguments.
        launcher: what is started on each host.
        options: of `dtprof run`, beside the output and the collector.
        collects: or each host keeps its own part, in /tmp/job.
        is_ssh: hosts reach each other by ssh.
        link_kbit_per_s: the links of all hosts with ranks are as slow from the start.
    """
    names = [*"abcdefgh"[:num_hosts], "keeper"]
    common = {**EVERYWHERE, "PYTHONUNBUFFERED": ""}
    offsets_s = tuple(1000 * number + 7 * number**2 for number in range(1, num_hosts + 2))
    to_keeper = ("--collect", "http://keeper:8266") if collects else ()
    with hosts(folder, names, clock_offsets_s=offsets_s, is_ssh=is_ssh) as made, ExitStack() as stack:
        *workers, keeper = made
        for host in workers if link_kbit_per_s else ():
            stack.enter_context(host.link_slowed(link_kbit_per_s))
        job = CollectedJob(
            workers=workers,
            keeper=keeper,
            num_ranks=num_ranks,
            num_absent=absent,
            is_behind=is_behind,
            clock_offsets_s=offsets_s[:num_hosts],
        )
        if collects:
            keeper.start(
                [*DTPROF, "collect", "-o", "/tmp/store", "--listen", "0.0.0.0:8266", "--plain"],
                env=common,
                log="collect.log",
            )
            job.wait_until(lambda: "http" in keeper.said("collect.log"))
        for number, host in enumerate(workers[: num_hosts - absent]):
            write_files(host.folder, names[:num_hosts], num_ranks)
            place = Place(
                number=number,
                hosts=tuple(names[:num_hosts]),
                num_ranks=num_ranks,
                record=(
                    *(*DTPROF, "run", *options, "-o", "/tmp/job", *to_keeper),
                    *("--hang-after", str(HANG_AFTER_S), "--"),
                ),
                program=(str(PROGRAMS / program[0]), *program[1:]),
            )
            for task, start in enumerate(launcher(place)):
                host.start(
                    start.command,
                    env={**common, **start.env, **dict((env or {}).get(host.name, {}))},
                    log=f"job-{task}.log",
                )
        yield job


def is_training(job: CollectedJob) -> bool:
    """Say whether the keeper has many operations of every rank, and samples of every host."""
    if any(not list(job.run.glob(f"node-{host.name}/samples.jsonl")) for host in job.workers):
        return False
    verdict = job.diagnose()
    if verdict is None or verdict.ranks_seen != tuple(range(job.world_size)):
        return False
    run = open_run(job.run)
    return all(len(run.load(rank).operations) > STEPS for rank in verdict.ranks_seen)
