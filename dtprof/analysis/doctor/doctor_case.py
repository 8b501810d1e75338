"""What a check of a launch is given, and what it finds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from dtprof.records.rank_probes import JointProbe, RankProbe

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, kw_only=True)
class LaunchFinding:
    """One thing that is wrong with a launch, or that a user should know of it."""

    kind: str
    severity: str
    summary: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelineFigures:
    """Figures of the program, as its arguments or the user give them; None where neither does."""

    stages: int | None = None
    microbatches: int | None = None
    samples: int | None = None
    batch: int | None = None  # of a rank


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address at which hosts of a launch meet, as its command or environment names it, seen from this host."""

    host: str
    port: int | None
    is_local: bool = False
    error: str | None = None  # why it cannot be resolved
    taken_by: str | None = None  # who listens at it already, where it is of this host


@dataclass(frozen=True, kw_only=True)
class DoctorCase:
    """The documents of the ranks, and what the launch itself shows."""

    joint: JointProbe
    command: tuple[str, ...] = ()
    seconds: float = 60.0
    exit_status: int | None = 0  # of the command; None: it was stopped when the time was up
    endpoint: Endpoint | None = None
    pipeline: PipelineFigures = field(default_factory=PipelineFigures)
    max_log_bytes: int = 256 << 20

    @property
    def probes(self) -> list[RankProbe]:
        """The documents of ranks, one a process."""
        return self.joint.probes

    @cached_property
    def world_size(self) -> int:
        """The largest size that a rank was given."""
        return max((probe.world_size for probe in self.probes), default=0)

    @cached_property
    def hosts(self) -> dict[str, list[RankProbe]]:
        """The documents by host."""
        hosts: dict[str, list[RankProbe]] = {}
        for probe in self.probes:
            hosts.setdefault(probe.host, []).append(probe)
        return hosts

    @cached_property
    def firsts(self) -> list[RankProbe]:
        """One document of each host: of the rank that looked at disk and devices."""
        return [min(probes, key=lambda probe: (probe.local_rank or 0, probe.rank)) for probes in self.hosts.values()]

    @cached_property
    def missing(self) -> list[int]:
        """The ranks that left no document."""
        seen = {probe.rank for probe in self.probes}
        return [rank for rank in range(self.world_size) if rank not in seen]


def finding(
    severity: str,
    kind: str,
    summary: str,
    *advice: str,
    of: Iterable[RankProbe] = (),
    hosts: Iterable[str] = (),
    ranks: Iterable[int] = (),
) -> LaunchFinding:
    """Return a finding on these ranks and their hosts; or on `hosts` and `ranks`, where it is not of just those."""
    probes = tuple(of)
    return LaunchFinding(
        kind=kind,
        severity=severity,
        summary=summary,
        hosts=hosts_of(probes) or tuple(hosts),
        ranks=ranks_of(probes) or tuple(ranks),
        advice=advice,
    )


def ranks_of(probes: Iterable[RankProbe]) -> tuple[int, ...]:
    """Return the ranks of documents, in order."""
    return tuple(sorted({probe.rank for probe in probes}))


def hosts_of(probes: Iterable[RankProbe]) -> tuple[str, ...]:
    """Return the hosts of documents, in order."""
    return tuple(sorted({probe.host for probe in probes}))


def listed(words: Iterable[object], most: int = 6) -> str:
    """Return words with commas, the first of many."""
    shown = [str(word) for word in words]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
