"""Pitfalls of launching: rank numbers and sizes, their launchers, and the figures of the program."""

import re
from collections.abc import Iterator, Sequence

from dtprof.analysis.doctor.doctor_case import (
    DoctorCase,
    LaunchFinding,
    PipelineFigures,
    finding,
    hosts_of,
    listed,
    ranks_of,
)
from dtprof.formatting import list_ranks, plural
from dtprof.launchers import RANK_VARIABLES, find_option, option_pattern
from dtprof.records.rank_probes import RankProbe

MICROBATCHES_PER_STAGE = 4
"""Narayanan et al. and torch's own advice: with fewer the bubble of 1F1B, (p-1)/(m+p-1), takes a fifth and more."""
STAGE_OPTIONS = option_pattern(
    r"pp|pipeline[-_]parallel[-_]size|pipeline[-_]model[-_]parallel[-_]size|parallelism\.pipeline_parallel_degree"
)
MICROBATCH_OPTIONS = option_pattern(r"(?:num[-_])?micro[-_]?batches|n[-_]microbatches")
SAMPLE_OPTIONS = option_pattern(r"(?:num[-_])?samples|dataset[-_]size")
BATCH_OPTIONS = option_pattern(r"(?:per[-_]device[-_]train[-_])?batch[-_]size|micro[-_]batch[-_]size")


def read_pipeline(command: Sequence[str]) -> PipelineFigures:
    """Return what the arguments of a program say of stages, microbatches and data, where they go by a usual name."""
    return PipelineFigures(
        stages=_argument(command, STAGE_OPTIONS),
        microbatches=_argument(command, MICROBATCH_OPTIONS),
        samples=_argument(command, SAMPLE_OPTIONS),
        batch=_argument(command, BATCH_OPTIONS),
    )


def _argument(command: Sequence[str], options: re.Pattern[str]) -> int | None:
    text = find_option(command, options) or ""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def world_size(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find ranks that were given different sizes, the same number, or a number beyond the size."""
    sizes: dict[int, list[RankProbe]] = {}
    by_rank: dict[int, list[RankProbe]] = {}
    for probe in case.probes:
        sizes.setdefault(probe.world_size, []).append(probe)
        by_rank.setdefault(probe.rank, []).append(probe)
    if len(sizes) > 1:
        texts = [
            f"{size} on {list_ranks(ranks_of(probes))} ({listed(hosts_of(probes), 3)})"
            for size, probes in sizes.items()
        ]
        few = min(sizes.values(), key=len)
        yield finding(
            "error",
            "world-size",
            f"WORLD_SIZE is {listed(texts)}: those ranks never meet.",
            "Give every host the same number of hosts and of ranks a host.",
            of=few,
        )
    twice = {rank: probes for rank, probes in by_rank.items() if len(probes) > 1}
    if twice:
        same = [probe for probes in twice.values() for probe in probes]
        yield finding(
            "error",
            "world-size",
            f"Several processes are {list_ranks(sorted(twice))}: {plural(len(same), 'process')} on "
            f"{listed(hosts_of(same))}.".replace("processs", "processes"),
            "Give every host its own --node-rank, and start the command once a host.",
            of=same,
        )
    beyond = [probe for probe in case.probes if probe.rank >= probe.world_size]
    if beyond:
        yield finding(
            "error",
            "world-size",
            f"{list_ranks(ranks_of(beyond)).capitalize()} of {listed(hosts_of(beyond))} lie beyond a WORLD_SIZE of "
            f"{beyond[0].world_size}.",
            "Ranks count from 0 to WORLD_SIZE - 1: look at RANK in the launch command.",
            of=beyond,
        )


def uneven_hosts(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts that start another number of ranks than most."""
    if case.missing or len(case.hosts) < 2:
        return
    counts = {host: len(probes) for host, probes in case.hosts.items()}
    usual = max(set(counts.values()), key=lambda count: (list(counts.values()).count(count), count))
    odd = tuple(sorted(host for host, count in counts.items() if count != usual))
    if odd:
        yield finding(
            "warning",
            "uneven-hosts",
            f"{listed(odd)} starts {plural(counts[odd[0]], 'rank')}, other hosts {usual}.",
            "See that this is meant: groups of a host are of different sizes.",
            hosts=odd,
        )


def mixed_launchers(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find two launchers at work: each believes that it gives the ranks."""
    for host, probes in case.hosts.items():
        agents = {probe.launcher_pid for probe in probes if probe.launcher == "torchrun"}
        tasks = max((_int(probe.variables, "OMPI_COMM_WORLD_LOCAL_SIZE") or 0 for probe in probes), default=0)
        slurm = max((_int(probe.variables, "SLURM_NTASKS_PER_NODE") or 0 for probe in probes), default=0)
        if len(agents) > 1 or (agents and max(tasks, slurm) > 1):
            by = "mpirun" if tasks > 1 else "srun" if slurm > 1 else "some launcher"
            yield finding(
                "error",
                "mixed-launchers",
                f"{by} starts several torchrun on {host} ({max(len(agents), tasks, slurm)}), and each starts ranks of "
                "its own.",
                "Start torchrun once a host (srun --ntasks-per-node=1), or the program itself without torchrun.",
                of=probes,
            )
    # In reverse: where a launcher has several sets of variables, the first stays.
    by_launcher = {names.launcher: names.rank for names in reversed(RANK_VARIABLES) if names.rank != "RANK"}
    for launcher, variable in by_launcher.items():
        other = [
            probe
            for probe in case.probes
            if probe.launcher == "env"
            and (number := _int(probe.variables, variable)) is not None
            and (_int(probe.variables, "SLURM_NTASKS") or 2) > 1
            and number != probe.rank
        ]
        if other:
            yield finding(
                "error",
                "mixed-launchers",
                f"RANK is {other[0].rank} where {launcher} says {other[0].variables[variable]} ({variable}), on "
                f"{list_ranks(ranks_of(other))}.",
                f"Set RANK from {variable} in each task, not once for all of them.",
                of=other,
            )


def _int(variables: dict[str, str], name: str) -> int | None:
    match = re.match(r"\d{1,9}", variables.get(name, ""))
    return int(match[0]) if match else None


def own_start(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Say that the launch shows one rank only."""
    if len(case.probes) == 1 and case.probes[0].launcher == "none":
        yield finding(
            "info",
            "single-rank",
            "The command started one process without RANK and WORLD_SIZE: nothing between ranks was tried.",
            "A program that starts its ranks itself (mp.spawn) is not run here: try torchrun with as many ranks.",
            hosts=hosts_of(case.probes),
            ranks=(0,),
        )


def microbatches(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find a pipeline with few microbatches."""
    stages, number = case.pipeline.stages, case.pipeline.microbatches
    if stages is None or number is None or stages < 2 or number >= MICROBATCHES_PER_STAGE * stages:
        return
    bubble = (stages - 1) / (number + stages - 1)
    yield finding(
        "warning",
        "few-microbatches",
        f"{plural(number, 'microbatch')} on {plural(stages, 'stage')}: the bubble of GPipe and 1F1B takes "
        f"{100 * bubble:.0f} % of a step, with {MICROBATCHES_PER_STAGE * stages} it is "
        f"{100 * (stages - 1) / (5 * stages - 1):.0f} %.",
        f"Use at least {MICROBATCHES_PER_STAGE * stages} microbatches, or an interleaved schedule.",
    )


def uneven_data(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find data that does not divide into equal shards of whole batches."""
    samples, ranks = case.pipeline.samples, case.world_size
    if samples is None or ranks < 2 or (samples % ranks == 0 and samples // ranks % (case.pipeline.batch or 1) == 0):
        return
    batch = case.pipeline.batch or 1
    longest, shortest = -(-samples // ranks), samples // ranks
    unequal = -(-longest // batch) != -(-shortest // batch)
    yield finding(
        "warning" if unequal else "info",
        "uneven-data",
        f"{samples:,} samples do not divide into whole batches of {batch} on {ranks} ranks: some ranks "
        + (
            f"may have {plural(-(-longest // batch), 'step')} and others {-(-shortest // batch)}, and the last "
            "collective waits for ever."
            if unequal
            else "have a smaller last batch."
        ),
        "Use DistributedSampler with drop_last=True, or the Join context of torch.distributed.",
    )
