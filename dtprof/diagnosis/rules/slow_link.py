"""The network between two hosts, or to one host, is slow: against other links of the job, or against its own past."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.job_state import LinkRate
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import format_bytes, format_fraction, list_ranks

SLOW_SHARE = 1 / 3
"""Of the rate of the other links, or of its own before, below which a link is slow."""
MIN_COST = 1 - 1 / 1.2
"""Share of the time that the job would save with links as fast as they should be: that of `slow-rank`."""
STANDING_QUEUE = 3.0
"""Times the shortest round trip, of one whose packets wait behind others."""
FULL_SEGMENT_BYTES = 1000
"""On average: mostly data, and not messages of a few bytes."""
QUEUED_SHARE, UNQUEUED_SHARE = 0.5, 0.2
MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class _SlowLink:
    rate: LinkRate
    expected_bytes_per_s: float
    is_by_past: bool  # expected is what it did before; else what others do


def find_slow_links(case: Case) -> Iterator[Finding]:
    """Give the finding for links that hold the job up, with the host that they have in common."""
    job = case.job
    if job.find_links is None or len({rank.host for rank in job.ranks.values() if rank.host}) < 2:
        return
    links = [link for link in job.find_links() if not {link.sender, link.receiver} & job.silent_s.keys()]
    slow = [found for link in links if (found := _judge(link, links)) is not None]
    if not slow:
        return
    pairs = {frozenset((link.rate.sender, link.rate.receiver)) for link in slow}
    common = sorted(frozenset.intersection(*pairs))
    if not common:
        return  # the whole network, or several parts of it: no host and no link is to blame
    culprits = _choose_end(common, links)
    yield _finding(case, slow, culprits)


def _judge(link: LinkRate, links: Sequence[LinkRate]) -> _SlowLink | None:
    """Return how slow a link is, where it is and costs the job much."""
    candidates = []
    usual = link.usual_bytes_per_s
    # Against its own past, only a rate that messages which wait for answers do not have: a program may change them.
    if usual is not None and link.is_below_round_trips:
        candidates.append(_SlowLink(rate=link, expected_bytes_per_s=usual, is_by_past=True))
    others = [
        other.bytes_per_s
        for other in links
        if {other.sender, other.receiver} != {link.sender, link.receiver} or (len(links) == 2 and other is not link)
    ]
    queues = link.rtt_s > STANDING_QUEUE * link.min_rtt_s and link.segment_bytes >= FULL_SEGMENT_BYTES
    if others and (link.is_below_round_trips or queues):
        expected = statistics.median(others) if len(others) < 3 else statistics.quantiles(others, n=4)[2]
        candidates.append(_SlowLink(rate=link, expected_bytes_per_s=expected, is_by_past=False))
    slow = [
        candidate
        for candidate in candidates
        if link.bytes_per_s < SLOW_SHARE * candidate.expected_bytes_per_s
        and link.busy_share * (1 - link.bytes_per_s / candidate.expected_bytes_per_s) >= MIN_COST
    ]
    return max(slow, key=lambda link: link.expected_bytes_per_s, default=None)


def _choose_end(common: Sequence[str], links: Sequence[LinkRate]) -> tuple[str, ...]:
    """Return the hosts to name: one where other links or queues tell which end it is, else both.

    Where all data that a host sends waits in the queue of its own interface, it is that which is slow.
    """
    if len(common) == 1:
        return tuple(common)
    queued = {
        host: max((link.queued_share or 0.0 for link in links if link.sender == host), default=0.0) for host in common
    }
    full = [host for host in common if queued[host] >= QUEUED_SHARE]
    if len(full) == 1 and all(queued[host] <= UNQUEUED_SHARE for host in common if host not in full):
        return tuple(full)
    return tuple(common)


def _finding(case: Case, slow: Sequence[_SlowLink], culprits: tuple[str, ...]) -> Finding:
    job = case.job
    ranks = tuple(sorted(rank.rank for rank in job.ranks.values() if rank.host in culprits))
    worst = min(slow, key=lambda link: link.rate.bytes_per_s / link.expected_bytes_per_s)
    rate, expected = worst.rate, worst.expected_bytes_per_s
    before = "before" if worst.is_by_past else "on other links of the job"
    subject = (
        f"The network of host {culprits[0]} ({list_ranks(ranks)}) is slow"
        if len(culprits) == 1
        else f"The link between hosts {' and '.join(culprits)} is slow"
    )
    waiting = {r.rank: o for r in job.ranks.values() if job.stalled and (o := r.first_blocking) is not None}
    one_end = len(culprits) == 1
    return Finding(
        kind="slow-link",
        severity="warning",
        summary=f"{subject}: {rate.sender} sends {rate.receiver} {_per_s(rate.bytes_per_s)}, and {_per_s(expected)} "
        f"passed {before}.",
        culprit_ranks=ranks,
        waiting_ranks=tuple(r for r in sorted(job.ranks) if r not in ranks),
        grade=0.85 if one_end else 0.8,
        call_sites=call_sites(waiting),
        evidence=(
            *(_seen(link) for link in sorted(slow, key=lambda link: link.rate.bytes_per_s)[:MOST_SHOWN]),
            *_queue_words(culprits, slow),
        ),
        advice=(
            f"Look at {culprits[0]}'s interface, its cable and port, and at what else sends there."
            if one_end
            else f"Look at the path between {' and '.join(culprits)}: cables, ports, routes, and what else uses it.",
            "`dtprof doctor` on these hosts measures every pair without the job.",
        ),
        leaves_open=()
        if one_end
        else (f"which end of the link between {' and '.join(culprits)} is slow: no other link of theirs shows it",),
    )


def _seen(link: _SlowLink) -> str:
    rate = link.rate
    before = "before" if link.is_by_past else "elsewhere"
    again = (
        f", {format_fraction(rate.retransmitted_share, 0)} of segments sent again"
        if rate.retransmitted_share >= 0.01
        else ""
    )
    return (
        f"{rate.sender} to {rate.receiver}: {_per_s(rate.bytes_per_s)} while data was under way, which it was for "
        f"{format_fraction(min(1.0, rate.busy_share), 0)} of {rate.window_s:.0f} s; {before} "
        f"{_per_s(link.expected_bytes_per_s)}{again}"
    )


def _queue_words(culprits: tuple[str, ...], slow: Sequence[_SlowLink]) -> Iterator[str]:
    for host in culprits:
        share = max((link.rate.queued_share or 0.0 for link in slow if link.rate.sender == host), default=0.0)
        if share >= QUEUED_SHARE:
            yield f"data waited in the queue of {host}'s own interface at {format_fraction(share, 0)} of the samples"


def _per_s(bytes_per_s: float) -> str:
    return f"{format_bytes(bytes_per_s)}/s"


RULES: Declared = (Rule(kinds=("slow-link",), stages=(Stage.STALL, Stage.RISK), find=find_slow_links),)
