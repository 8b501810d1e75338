"""Judge a launch: every check, worst first, and what the probe could not tell."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dtprof.analysis.doctor import host_checks, launch_checks, link_checks, rendezvous_checks
from dtprof.analysis.doctor.doctor_case import SEVERITIES, DoctorCase, LaunchFinding, listed
from dtprof.analysis.doctor.link_checks import CollectiveRate, PairRate

CHECKS: tuple[Callable[[DoctorCase], Iterator[LaunchFinding]], ...] = (
    # Causes come before what follows from them.
    *(
        rendezvous_checks.unresolved_name,
        rendezvous_checks.taken_port,
        rendezvous_checks.no_address,
        rendezvous_checks.loopback_address,
    ),
    *(host_checks.interfaces, rendezvous_checks.unreachable_hosts, launch_checks.world_size),
    *(
        launch_checks.mixed_launchers,
        rendezvous_checks.no_rank,
        rendezvous_checks.missing_ranks,
        rendezvous_checks.stuck_ranks,
    ),
    *(rendezvous_checks.version_mismatch, rendezvous_checks.setting_mismatch, launch_checks.uneven_hosts),
    *(host_checks.devices, host_checks.gpus, host_checks.cores, host_checks.memory, host_checks.shared_memory),
    *(host_checks.limits, host_checks.disk, host_checks.clocks, host_checks.interface_speeds, link_checks.slow_links),
    *(launch_checks.microbatches, launch_checks.uneven_data, launch_checks.own_start),
)
KINDS = (
    *(
        "no-rank",
        "missing-rank",
        "rendezvous",
        "name-resolution",
        "no-address",
        "loopback-address",
        "port-taken",
        "unreachable-host",
    ),
    *("interface", "interface-speed", "version-mismatch", "environment-mismatch", "world-size", "uneven-hosts"),
    *("mixed-launchers", "single-rank", "device-mapping", "gpu-health", "oversubscribed-cores", "memory"),
    *("shared-memory", "open-files", "locked-memory", "process-limit", "disk", "clock-offset", "clock-drift"),
    *("clock-error", "slow-host", "slow-link", "slower-than-before", "few-microbatches", "uneven-data"),
)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Earlier measurements of the same cluster: best rates by back end, sending and receiving host."""

    gb_per_s: Mapping[tuple[str, str, str], float]
    count: int


@dataclass(frozen=True, kw_only=True)
class DoctorResult:
    """What `dtprof doctor` says of a launch."""

    findings: tuple[LaunchFinding, ...]
    pairs: tuple[PairRate, ...]
    bandwidth: tuple[CollectiveRate, ...]
    hosts: tuple[str, ...]
    world_size: int
    ranks_seen: int
    clock_error_ns: float | None
    cannot_tell: tuple[str, ...]

    @property
    def faults(self) -> tuple[LaunchFinding, ...]:
        """The findings that are errors or warnings."""
        return tuple(finding for finding in self.findings if finding.severity != "info")


def judge(case: DoctorCase, earlier: Earlier | None = None) -> DoctorResult:
    """Return the findings, errors first, with the measured rates."""
    found = [finding for check in CHECKS for finding in check(case)]
    pairs = link_checks.pair_rates(case)
    if earlier is not None and earlier.count:
        times = f"{earlier.count} earlier measurement{'s' if earlier.count > 1 else ''}"
        found += link_checks.slower_than_earlier(pairs, dict(earlier.gb_per_s), times)
    errors = [probe.clock_error_ns for probe in case.firsts]
    known = [error for error in errors if error is not None]
    return DoctorResult(
        findings=tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
        pairs=tuple(pairs),
        bandwidth=tuple(link_checks.collective_rates(case)),
        hosts=tuple(sorted(case.hosts)),
        world_size=case.world_size,
        ranks_seen=case.world_size - len(case.missing),
        clock_error_ns=max(known) if known and len(known) == len(errors) else None,
        cannot_tell=tuple(_cannot_tell(case, pairs)),
    )


def _cannot_tell(case: DoctorCase, pairs: list[PairRate]) -> Iterator[str]:
    yield from case.joint.unmeasured
    if case.world_size > 1 and not pairs:
        yield "bandwidth: the ranks did not join a group"
    between = {tuple(sorted((rate.sender_host, rate.receiver_host))) for rate in pairs if rate.is_between_hosts}
    if len(between) in (1, 2):
        yield (
            "slow links between hosts: fewer than three pairs of hosts cannot be compared with each "
            "other, only with earlier "
            "measurements"
        )
    for probe in case.firsts:
        if probe.clock_reason is not None:
            yield f"clock of {probe.host}: {probe.clock_reason}"
        if probe.gpu_error is not None and probe.devices:
            yield f"GPU health of {probe.host}: {probe.gpu_error}"
    unread = [probe.host for probe in case.firsts if probe.stage == "started"]
    if unread:
        yield f"limits, memory, disk and interfaces of {listed(unread)}: the time was up before they were read"
    if case.pipeline.stages is not None and case.pipeline.microbatches is None and case.pipeline.stages > 1:
        yield "microbatches: the command does not name them; give --microbatches N"
