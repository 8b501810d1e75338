"""Record a job under each launcher over hosts, and compare the run with the job: ranks, hosts, world size, verdict."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.diagnosis.findings import Verdict
from dtprof.records.reader import open_run
from dtprof.session.engines import IN_THIS_PROCESS
from dtprof.session.run_diagnosis import diagnose_run
from tests.hosts import launchers
from tests.hosts.collected_jobs import CollectedJob, collected
from tests.hosts.launchers import Launcher

NUM_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to start a job under dtprof."""

    launcher: Launcher
    options: tuple[str, ...] = ("--join",)
    num_ranks: int = 2  # of each host
    is_ssh: bool = False
    recorded_hosts: int | None = None  # of those of the job; None: all


WAYS: Mapping[str, Way] = {
    "torchrun, c10d": Way(launcher=launchers.torchrun, options=()),
    "srun, torchrun on each node": Way(launcher=launchers.slurm_torchrun, options=()),
    "srun, each rank": Way(launcher=launchers.slurm_ranks, options=()),
    "PyTorchJob, torchrun in each pod": Way(launcher=launchers.kubernetes_torchrun, options=()),
    "PyTorchJob, a rank in each pod": Way(launcher=launchers.kubernetes_ranks, options=(), num_ranks=1),
    "accelerate launch on each host": Way(launcher=launchers.accelerate, options=()),
    "deepspeed on each host": Way(launcher=launchers.deepspeed),
    "deepspeed dtprof run, by pdsh": Way(launcher=launchers.deepspeed_around, is_ssh=True, options=()),
    "mpirun dtprof run": Way(launcher=launchers.mpirun, is_ssh=True, options=()),
    "dtprof run mpirun": Way(launcher=launchers.mpirun_within, is_ssh=True, recorded_hosts=1),
    "dtprof run deepspeed, by pdsh": Way(launcher=launchers.deepspeed_within, is_ssh=True, recorded_hosts=0),
}


def check(name: str, folder: Path, *, num_hosts: int) -> list[str]:
    """Run a sound job and one in which a rank of the second host raises; return what is wrong with the runs."""
    way = WAYS[name]
    wrong = []
    culprit = way.num_ranks  # the first rank of the second host
    for arguments in ((str(NUM_STEPS),), (str(NUM_STEPS), str(culprit))):
        with collected(
            folder / f"{len(arguments)}",
            num_hosts=num_hosts,
            num_ranks=way.num_ranks,
            launcher=way.launcher,
            options=way.options,
            program=("steady_training.py", *arguments),
            is_ssh=way.is_ssh,
        ) as job:
            job.wait_until_ended()
            runs = [path for path in (job.keeper.folder / "store").iterdir() if not path.name.startswith(".")]
            found = [f"{len(runs)} runs: {', '.join(path.name for path in runs)}"]
            if len(runs) == 1:
                raising = culprit if arguments[1:] else None
                found = list(compare(job, runs[0], num_hosts=way.recorded_hosts, culprit=raising))
            wrong += [f"{' '.join(arguments)}: {text}" for text in found]
            if found:
                wrong += [line for line in job.said.splitlines() if line.startswith(("-- ", "dtprof:"))][:40]
                wrong += job.said.splitlines()[-12:]
    return wrong


def compare(
    job: CollectedJob, path: Path, *, num_hosts: int | None = None, culprit: int | None = None
) -> Iterator[str]:
    """Yield what a run says that is not as the job was.

    Parameters:
        num_hosts: of which there are records; None: all.
        culprit: the rank that raised; None: the job was sound.
    """
    run = open_run(path)
    summary = summarise(run)
    seen = {rank: run.load(rank).host for rank in run.ranks}
    hosts = [host.name for host in job.workers][:num_hosts]
    expected = {rank: hosts[rank // job.num_ranks] for rank in range(len(hosts) * job.num_ranks)}
    if seen != expected:
        yield f"ranks on hosts: {seen}"
    if summary.world_size != job.world_size:
        yield f"world size {summary.world_size}"
    yield from _compare_clocks(job, summary)
    yield from _compare_verdict(diagnose_run(path, IN_THIS_PROCESS), culprit)


def describe_clocks(path: Path) -> str:
    """Return how well the clocks of the hosts of a run are known."""
    summary = summarise(open_run(path))
    errors = [clock.error_ns for clock in summary.clocks if clock.error_ns]
    ways = sorted({clock.by for clock in summary.clocks if clock.by})
    return f"stated error of a clock {max(errors, default=0) / 1e3:,.0f} us at most, by {', '.join(ways) or 'nothing'}"


def _compare_verdict(verdict: Verdict, culprit: int | None) -> Iterator[str]:
    found = [(finding.kind, finding.culprit_ranks, finding.culprit_hosts) for finding in verdict.findings]
    if culprit is None and verdict.outcome != "healthy":
        yield f"{verdict.outcome}: {found}; {verdict.cannot_tell}"
    if culprit is not None and found[:1] != [("rank-crashed", (culprit,), ("b",))]:
        yield f"{verdict.outcome}: {found}; {verdict.cannot_tell}"


def _compare_clocks(job: CollectedJob, summary: Summary) -> Iterator[str]:
    """Compare the offsets of the clocks with those that the hosts were made with."""
    offsets_s = {host.name: offset for host, offset in zip(job.workers, job.clock_offsets_s, strict=True)}
    reference = next((clock.host for clock in summary.clocks if clock.by is None and clock.offset_ns == 0), None)
    if len(summary.hosts) > 1 and (reference is None or summary.clock_error_ns is None):
        yield f"clocks not aligned: {summary.clocks}"
        return
    for clock in summary.clocks:
        if reference is None or clock.offset_ns is None or clock.error_ns is None:
            continue
        truth_ns = (offsets_s[reference] - offsets_s[clock.host]) * 10**9
        if abs(clock.offset_ns - truth_ns) > clock.error_ns:
            off_ns = clock.offset_ns - truth_ns
            yield f"clock of {clock.host}: {off_ns:,} ns off, stated {clock.error_ns:,} ({clock.by})"
