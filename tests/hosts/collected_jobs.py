"""A job on hosts of its own that sends its records to a host that keeps them, and what a diagnosis there says."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.records.reader import open_run
from dtprof.session.engines import IN_THIS_PROCESS
from dtprof.session.run_diagnosis import diagnose_run
from tests.hosts.machines import Host, hosts
from tests.jobs import DTPROF

PROGRAMS = Path(__file__).parent / "programs"
TOKEN = "of-the-hosts"
HANG_AFTER_S = 10
STEPS = 50
"""Of a job that is on its way."""
PATIENCE_S = 240.0
"""Machines that test may be slow."""


@dataclass(kw_only=True)
class CollectedJob:
    """A job that runs on the first hosts; the last one keeps its run."""

    workers: list[Host]
    keeper: Host

    @property
    def run(self) -> Path:
        """The run at the keeper."""
        return self.keeper.folder / "store" / "job"

    @property
    def said(self) -> str:
        """What the launchers have said."""
        return "".join(f"-- {host.name}\n{host.said('job.log')}" for host in self.workers)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.said
            time.sleep(0.2)

    def diagnose(self) -> Verdict | None:
        """Diagnose what the keeper has; None before a rank of each host has sent something."""
        if len(list(self.run.glob("rank-*/events.*"))) < len(self.workers):
            return None
        return diagnose_run(self.run, IN_THIS_PROCESS)

    def wait_for(self, kind: str, host: str) -> tuple[Finding, float]:
        """Return the finding of a kind that names a host once there is one, and after how many seconds that was."""
        began_s, deadline_s = time.monotonic(), time.monotonic() + PATIENCE_S
        verdict = None
        while time.monotonic() < deadline_s:
            verdict = self.diagnose()
            found = (
                [finding for finding in verdict.findings if (finding.kind, finding.culprit_hosts) == (kind, (host,))]
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
            lambda: (verdict := self.diagnose()) is not None and all(one.kind != kind for one in verdict.findings)
        )


def torchrun(program: str, num_hosts: int, *arguments: str) -> list[str]:
    """Return the command that every host starts: one rank each, which meet at host a."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_hosts), "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29400", "--rdzv-id", "7", str(PROGRAMS / program)),
        *arguments,
    ]


@contextmanager
def collected(
    folder: Path,
    *,
    num_hosts: int = 2,
    absent: int = 0,
    env: Mapping[str, Mapping[str, str]] | None = None,
    program: str = "steady_training.py",
) -> Iterator[CollectedJob]:
    """Start a job, with a rank on each host, that is collected by a host of its own.

    Parameters:
        absent: so many hosts, the last ones, start nothing.
        env: variables of the environment by name of the host.
    """
    names = [*"abcdefgh"[:num_hosts], "keeper"]
    # What every image holds: the hook, compiled once.
    common = {"DTPROF_COLLECT_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": ""}
    with hosts(folder, names) as made:
        *workers, keeper = made
        keeper.start(
            [*DTPROF, "collect", "-o", "/tmp/store", "--listen", "0.0.0.0:8266", "--plain"],
            env=common,
            log="collect.log",
        )
        job = CollectedJob(workers=workers, keeper=keeper)
        job.wait_until(lambda: "http" in keeper.said("collect.log"))
        for host in workers[: num_hosts - absent]:
            host.start(
                [
                    *(*DTPROF, "run", "--join", "-o", "/tmp/job", "--collect", "http://keeper:8266"),
                    *("--hang-after", str(HANG_AFTER_S), "--", *torchrun(program, num_hosts)),
                ],
                env={**common, **dict((env or {}).get(host.name, {}))},
                log="job.log",
            )
        yield job


def is_training(job: CollectedJob) -> bool:
    """Say whether the keeper has many operations of every rank, and samples of every host."""
    if any(not list(job.run.glob(f"node-{host.name}/samples.jsonl")) for host in job.workers):
        return False
    verdict = job.diagnose()
    if verdict is None or verdict.ranks_seen != tuple(range(len(job.workers))):
        return False
    run = open_run(job.run)
    return all(len(run.load(rank).operations) > STEPS for rank in verdict.ranks_seen)
