"""Bandwidth and latency between ranks and of collectives, and which links and hosts are slow.

A pair is judged by its best repetition: load on a host makes some slow, a slow link all.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dtprof.analysis.communication.bus_bandwidth import bus_factor
from dtprof.analysis.doctor.doctor_case import DoctorCase, LaunchFinding, finding, listed

SLOW_SHARE = 0.5
"""Of the rate of the others, below which a link or host is slow."""
SLOW_LATENCY, LATENCY_BEYOND_US = 4.0, 200.0
LEAST_PAIRS = 3
EARLIER_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class PairRate:
    """One direction of one pair: best bandwidth, median latency, and how far repetitions spread."""

    sender: int
    receiver: int
    sender_host: str
    receiver_host: str
    gb_per_s: float | None
    latency_us: float | None
    spread: float | None  # of the bandwidth: (best - worst) / best
    backend: str

    @property
    def is_between_hosts(self) -> bool:
        """Say whether it crosses the network."""
        return self.sender_host != self.receiver_host


@dataclass(frozen=True, kw_only=True)
class CollectiveRate:
    """Bus bandwidth of one collective of one size, by nccl-tests."""

    group: str
    op: str
    nbytes: int
    ranks: tuple[int, ...]
    hosts: int
    time_ns: float
    busbw_gb_per_s: float
    backend: str


def pair_rates(case: DoctorCase) -> list[PairRate]:
    """Return the rates of all pairs that were measured."""
    hosts = {probe.rank: probe.host for probe in case.probes}
    return [
        PairRate(
            sender=link.sender,
            receiver=link.receiver,
            sender_host=hosts.get(link.sender, "?"),
            receiver_host=hosts.get(link.receiver, "?"),
            gb_per_s=max(link.gb_per_s) if link.gb_per_s else None,
            latency_us=statistics.median(link.latency_ns) / 1e3 if link.latency_ns else None,
            spread=(1 - min(link.gb_per_s) / max(link.gb_per_s)) if link.gb_per_s else None,
            backend=link.backend,
        )
        for link in sorted(case.joint.links, key=lambda link: (link.backend, link.sender, link.receiver))
    ]


def collective_rates(case: DoctorCase) -> list[CollectiveRate]:
    """Return the bus bandwidth of every collective and size that has one, t the median of the repetitions."""
    hosts = {probe.rank: probe.host for probe in case.probes}
    return [
        CollectiveRate(
            group=row.group,
            op=row.op,
            nbytes=row.nbytes,
            ranks=tuple(row.ranks),
            hosts=len({hosts.get(rank) for rank in row.ranks}),
            time_ns=statistics.median(row.times_ns),
            busbw_gb_per_s=row.nbytes / statistics.median(row.times_ns) * factor,
            backend=row.backend,
        )
        for row in case.joint.collectives
        if row.times_ns and (factor := bus_factor(row.op, len(row.ranks))) is not None
    ]


def slow_links(case: DoctorCase) -> Iterator[LaunchFinding]:
    """Find hosts that are slow towards all others, and else single pairs."""
    rates = pair_rates(case)
    for backend in sorted({rate.backend for rate in rates}):
        of_backend = [rate for rate in rates if rate.backend == backend and rate.gb_per_s is not None]
        between = [rate for rate in of_backend if rate.is_between_hosts]
        slow = _slow_hosts(between)
        for host, own, usual in slow:
            yield finding(
                "warning",
                "slow-host",
                f"{host} sends and receives {_rate(own)} at best ({backend}), pairs of the other hosts {_rate(usual)}.",
                "Look at that host's interface, its cable and port, and at what else runs there.",
                hosts=(host,),
                ranks=tuple(probe.rank for probe in case.probes if probe.host == host),
            )
        named = {host for host, _, _ in slow}
        rest = [rate for rate in between if not named & {rate.sender_host, rate.receiver_host}]
        within = [rate for rate in of_backend if not rate.is_between_hosts]
        yield from _slow_pairs(rest, "between hosts")
        yield from _slow_pairs(within, "within a host")


def _slow_hosts(rates: Sequence[PairRate]) -> list[tuple[str, float, float]]:
    """Return hosts all of whose pairs are slow against the pairs that they are not part of: host, "
    "its rate, the rate."""
    hosts = sorted({host for rate in rates for host in (rate.sender_host, rate.receiver_host)})
    found = []
    for host in hosts:
        own = _best_by_pair(rate for rate in rates if host in (rate.sender_host, rate.receiver_host))
        others = _best_by_pair(rate for rate in rates if host not in (rate.sender_host, rate.receiver_host))
        if len(own) > 1 and others and max(own) < SLOW_SHARE * statistics.median(others):
            found.append((host, max(own), statistics.median(others)))
    return found


def _best_by_pair(rates: Iterable[PairRate]) -> list[float]:
    """Return for each pair of hosts the rate of its slower direction, at the best of its ranks."""
    best: dict[tuple[str, str], float] = {}
    for rate in rates:
        key = (rate.sender_host, rate.receiver_host)
        best[key] = max(best.get(key, 0.0), rate.gb_per_s or 0.0)
    slower: dict[tuple[str, ...], float] = {}
    for key, value in best.items():
        pair = tuple(sorted(key))
        slower[pair] = min(slower.get(pair, value), value)
    return list(slower.values())


def _slow_pairs(rates: Sequence[PairRate], where: str) -> Iterator[LaunchFinding]:
    """Find pairs that are slow, or late, against the median of their kind."""
    if len(rates) < LEAST_PAIRS:
        return
    usual = statistics.median(rate.gb_per_s or 0.0 for rate in rates)
    usual_us = statistics.median(rate.latency_us or 0.0 for rate in rates)
    pairs: dict[tuple[int, int], list[PairRate]] = {}
    for rate in rates:
        is_slow = (rate.gb_per_s or 0.0) < SLOW_SHARE * usual
        late = rate.latency_us or 0.0
        if is_slow or (late > SLOW_LATENCY * usual_us and late > usual_us + LATENCY_BEYOND_US):
            pairs.setdefault((min(rate.sender, rate.receiver), max(rate.sender, rate.receiver)), []).append(rate)
    for (first, second), slow in sorted(pairs.items()):
        worst = min(slow, key=lambda rate: rate.gb_per_s or 0.0)
        one_way = f"from {worst.sender} to {worst.receiver} only, " if len(slow) == 1 else ""
        hosts = tuple(sorted({worst.sender_host, worst.receiver_host}))
        yield finding(
            "warning",
            "slow-link",
            f"Between ranks {first} and {second} ({' and '.join(hosts)}) pass {_rate(worst.gb_per_s)} at best, "
            f"{one_way}latency {worst.latency_us:.0f} us; the median {where} is {_rate(usual)}, {usual_us:.0f} us.",
            "Look at the path between the two: cable, port, route, and processes pinned to the same core.",
            hosts=hosts,
            ranks=(first, second),
        )


def _rate(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return "an unknown rate"
    return f"{gb_per_s:.3g} GB/s" if gb_per_s >= 0.1 else f"{gb_per_s * 1e3:.3g} MB/s"


def slower_than_earlier(
    rates: Sequence[PairRate], earlier: dict[tuple[str, str, str], float], when: str
) -> Iterator[LaunchFinding]:
    """Find pairs of hosts that are slower than the same cluster's earlier measurements.

    Parameters:
        rates: of this time.
        earlier: median of the best rates in GB/s, by back end, sending and receiving host.
        when: how many measurements, in words.
    """
    best: dict[tuple[str, str, str], float] = {}
    for rate in rates:
        key = (rate.backend, rate.sender_host, rate.receiver_host)
        best[key] = max(best.get(key, 0.0), rate.gb_per_s or 0.0)
    slower = {key: now for key, now in best.items() if key in earlier and now < EARLIER_SHARE * earlier[key]}
    if not slower:
        return
    key, now = min(slower.items(), key=lambda item: item[1] / earlier[item[0]])
    hosts = tuple(sorted({host for _, *pair in slower for host in pair}))
    yield finding(
        "warning",
        "slower-than-before",
        f"From {key[1]} to {key[2]} pass {_rate(now)} at best, {_rate(earlier[key])} in {when}"
        + (
            f"; the same is true of {len(slower) - 1} more of {len(best)} directions ({listed(hosts)})."
            if len(slower) > 1
            else "."
        ),
        "Look at what changed since: other jobs on the network or the hosts, cables, settings.",
        hosts=hosts,
    )
