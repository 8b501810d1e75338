"""Did the ranks come, find each other, and with what did they start?"""

import functools
from collections.abc import Callable, Iterator

from dtprof.analysis.doctor.doctor_case import (
    DoctorCase,
    LaunchFinding,
    finding,
    hosts_of,
    listed,
    ranks_of,
)
from dtprof.formatting import list_ranks, plural
from dtprof.records.rank_probes import RankProbe

VERSION_ERRORS = ("torch", "nccl", "cuda")
"""Differences by which ranks do not understand each other; others are warned of."""
AT_STAGE = {
    "started": "read its host",
    "facts": "began to look for the others",
    "rendezvous": "met the others in the store of the launch",
    "joining": "joined the process group",
    "measuring": "measured its links",
}


def no_rank(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find that no rank came to the probe at all."""
    if case.probes:
        return
    ended = f"ended with status {case.exit_status}" if case.exit_status is not None else "was stopped"
    endpoint = case.endpoint
    where = f" at {endpoint.host}:{endpoint.port}" if endpoint is not None and endpoint.port is not None else ""
    if case.exit_status is None:
        yield finding(
            "error",
            "no-rank",
            f"No rank imported torch within {case.seconds:.0f} s: the launcher still waited, most likely for other "
            f"hosts to come to the rendezvous{where}.",
            "Start the same command on every host (--nnodes of them) within this time, with the same rendezvous id.",
            "See from each host that the address answers, for example with: nc -vz HOST PORT",
        )
        return
    yield finding(
        "error",
        "no-rank",
        f"No rank imported torch: the command {ended} before one did.",
        "Run the command by itself and read its messages; Python with -E, -I or -S is reached by dtprof inject.",
    )


def missing_ranks(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find ranks that never came, where others did."""
    missing = case.missing
    if not missing or not case.probes:
        return
    seen = hosts_of(case.probes)
    yield finding(
        "error",
        "missing-rank",
        f"{list_ranks(missing).capitalize()} of {case.world_size} did not come within the time; those that came are "
        f"on {listed(seen)}.",
        "See that the command was started on every host, and that it starts as many ranks there as it says.",
        "Look at the hosts that are not named here first.",
        ranks=tuple(missing),
    )


def stuck_ranks(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find ranks that came and got no further, by the stage and the error at which they stand."""
    if case.missing:
        return  # the others wait for those
    groups: dict[tuple[str, str], list[RankProbe]] = {}
    for probe in case.probes:
        if probe.stage != "done":
            groups.setdefault((probe.stage, probe.error or "it was ended"), []).append(probe)
    for (stage, error), probes in groups.items():
        yield finding(
            "error",
            "rendezvous",
            f"{list_ranks(ranks_of(probes)).capitalize()} on {listed(hosts_of(probes))} never "
            f"{AT_STAGE.get(stage, 'ended')}: {error}.",
            "See the findings on names, addresses and interfaces, and the firewall between these hosts.",
            of=probes,
        )


def unreachable_hosts(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts whose connections to others are not answered."""
    pairs = {(probe.host, host): address for probe in case.probes for host, address in probe.unreachable.items()}
    if not pairs:
        return
    counts: dict[str, int] = {}
    for pair in pairs:
        for host in pair:
            counts[host] = counts.get(host, 0) + 1
    most = max(counts.values())
    worst = tuple(sorted(host for host, count in counts.items() if count == most))
    (source, target), address = next(iter(pairs.items()))
    yield finding(
        "error",
        "unreachable-host",
        f"{plural(len(pairs), 'connection')} between hosts failed: {source} cannot reach {target} at {address}"
        + (f"; {listed(worst)} {'is' if len(worst) == 1 else 'are'} in most of them." if len(pairs) > 1 else "."),
        "Open all TCP ports between the hosts of a job; gloo and NCCL listen on ports of their own choice.",
        "Where the address is of the wrong network, name the interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.",
        hosts=worst,
        ranks=ranks_of(probe for probe in case.probes if probe.host in worst),
    )


def unresolved_name(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts on which the address of the rendezvous does not resolve."""
    failing = [probe for probe in case.probes if probe.master_error is not None]
    endpoint = case.endpoint
    if failing:
        yield finding(
            "error",
            "name-resolution",
            f"MASTER_ADDR is {failing[0].master!r}, which does not resolve on {listed(hosts_of(failing))}: "
            f"{failing[0].master_error}.",
            "Use an address, or add the name to DNS or /etc/hosts of those hosts.",
            of=failing,
        )
    elif endpoint is not None and endpoint.error is not None:
        yield finding(
            "error",
            "name-resolution",
            f"The command names {endpoint.host!r} to meet at, which does not resolve on this host: {endpoint.error}.",
            "Use an address, or add the name to DNS or /etc/hosts.",
        )


def no_address(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find that the launcher gave the ranks no address to meet at; the probe met at one of its own on each host."""
    without = [probe for probe in case.probes if probe.master is None and probe.world_size > 1]
    if not without:
        return
    is_apart = len(case.hosts) > 1 or bool(case.missing)
    yield finding(
        "error" if is_apart else "info",
        "no-address",
        f"{without[0].launcher} gave {list_ranks(ranks_of(without))} no MASTER_ADDR: "
        + ("ranks of several hosts could not meet." if is_apart else "they met at an address of this host instead."),
        "Set MASTER_ADDR and MASTER_PORT in the launch, where the program does not find them by itself.",
        of=without,
    )


def loopback_address(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts that others reach by an address that is only their own."""
    if len(case.hosts) < 2:
        return
    masters = [probe for probe in case.firsts if any(map(_is_loopback, probe.master_addresses))]
    away = [probe for probe in masters if probe.rank != 0]
    if away:
        yield finding(
            "error",
            "loopback-address",
            f"MASTER_ADDR ({away[0].master}) is {away[0].master_addresses[0]} on {listed(hosts_of(away))}: the ranks "
            "there look for rank 0 on their own host.",
            "Give the address of rank 0's host that others see; `localhost` works on one host only.",
            hosts=hosts_of(away),
        )
    own = [
        probe
        for probe in case.firsts
        if "GLOO_SOCKET_IFNAME" not in probe.settings
        and probe.own_addresses
        and all(map(_is_loopback, probe.own_addresses))
    ]
    if own:
        yield finding(
            "error",
            "loopback-address",
            f"On {listed(hosts_of(own))} the host's own name resolves to {own[0].own_addresses[0]} only: gloo gives "
            "that address to the other hosts, which cannot reach it.",
            "Set GLOO_SOCKET_IFNAME to the interface of the network, or correct the name in /etc/hosts.",
            hosts=hosts_of(own),
            ranks=ranks_of(probe for probe in case.probes if probe.host in hosts_of(own)),
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def taken_port(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find that somebody listened at the port of the rendezvous before the launch, or nobody where one should."""
    endpoint = case.endpoint
    if endpoint is None:
        return
    if endpoint.taken_by is not None:
        yield finding(
            "error",
            "port-taken",
            f"Port {endpoint.port} of this host, at which the ranks are to meet, was taken before the launch "
            f"({endpoint.taken_by}).",
            "End the job that holds it (an earlier one?), or give another --master-port or endpoint.",
        )


def version_mismatch(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find versions that differ between ranks."""
    names = sorted({name for probe in case.probes for name in probe.versions})
    for name in names:
        yield from _differing(
            [probe for probe in case.probes if probe.versions],
            functools.partial(_version, name),
            kind="version-mismatch",
            severity="error" if name in VERSION_ERRORS else "warning",
            what=f"{name} is",
            advice="Install the same versions on all hosts, or start all ranks from one image.",
        )


def setting_mismatch(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find variables of NCCL, gloo, OpenMP and torch that differ between ranks."""
    names = sorted({name for probe in case.probes for name in probe.settings})
    for name in names:
        yield from _differing(
            case.probes,
            functools.partial(_setting, name),
            kind="environment-mismatch",
            severity="warning",
            what=f"{name} is",
            advice=f"Give all ranks the same {name}, or say in the launch command why they differ.",
        )


def _version(name: str, probe: RankProbe) -> str:
    return probe.versions.get(name, "none")


def _setting(name: str, probe: RankProbe) -> str:
    return repr(probe.settings[name]) if name in probe.settings else "not set"


def _differing(
    probes: list[RankProbe], value: Callable[[RankProbe], str], *, kind: str, severity: str, what: str, advice: str
) -> Iterator[LaunchFinding]:
    by_value: dict[str, list[RankProbe]] = {}
    for probe in probes:
        by_value.setdefault(value(probe), []).append(probe)
    if len(by_value) < 2:
        return
    ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
    (usual, most), *others = ordered
    odd = [probe for _, few in others for probe in few]
    texts = [f"{text} on {_places(few)}" for text, few in others]
    yield finding(
        severity,
        kind,
        f"{what} {usual} on {_places(most)}, {listed(texts, 3)}.",
        advice,
        of=odd,
    )


def _places(probes: list[RankProbe]) -> str:
    return f"{list_ranks(ranks_of(probes))} ({listed(hosts_of(probes), 3)})"
