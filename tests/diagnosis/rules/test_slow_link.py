"""Links between hosts: slow against others of the job, against their own past, and as fast as they ever are."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dtprof.diagnosis.job_state import JobState, LinkRate
from dtprof.diagnosis.sources.link_rates import find_link_rates
from dtprof.diagnosis.verdict import decide
from dtprof.records import paths
from dtprof.records.nodes import node_samples
from dtprof.records.nodes.node_samples import Sample, SampleFile
from tests.diagnosis.judging import build_job, found_by, ranks_in_step

FAST, SLOW = 400e6, 0.25e6
"""Bytes a second."""
SECOND = 1_000_000_000


def link(sender: str, receiver: str, bytes_per_s: float, **others: object) -> LinkRate:
    """Return a link that the job waits for; it was fast before."""
    facts: dict[str, object] = {
        "busy_share": 0.9,
        "window_s": 10.0,
        "usual_bytes_per_s": FAST,
        "is_below_round_trips": bytes_per_s < 1e6,
        "segment_bytes": 1400.0,
        "rtt_s": 1e-4,
        "min_rtt_s": 5e-5,
        "queued_share": 0.0,
    }
    return LinkRate(sender=sender, receiver=receiver, bytes_per_s=bytes_per_s, **(facts | others))  # type: ignore[arg-type]


def job_of(links: Iterable[LinkRate], hosts: str = "abc", *, stalled: bool = False) -> JobState:
    """Return a job of one rank a host."""
    ranks = ranks_in_step(len(hosts), 3)
    for rank, name in zip(ranks, hosts, strict=True):
        rank.host = name
    found = tuple(links)
    return build_job(ranks, exit_status=None, stalled=stalled, find_links=lambda: found)


def ring(slow: str = "", rate: float = SLOW, **others: object) -> list[LinkRate]:
    """Return the links of a ring a, b, c in both directions; those of one host are slow."""
    pairs = [(one, two) for one in "abc" for two in "abc" if one != two]
    return [link(*pair, rate if slow and slow in pair else FAST, **others) for pair in pairs]


FAULTY = {"slow-link": lambda: job_of(ring("b"))}


def SOUND() -> JobState:  # noqa: N802 - the name that every file of rules has
    """Return a job whose links are all slow, and always were."""
    return job_of(ring("abc", usual_bytes_per_s=SLOW) or [])


def test_the_host_that_slow_links_have_in_common_is_named() -> None:
    verdict = decide(job_of(ring("b")))
    assert verdict.outcome == "slow"
    finding = verdict.findings[0]
    assert (finding.kind, finding.severity) == ("slow-link", "warning")
    assert (finding.culprit_ranks, finding.culprit_hosts) == ((1,), ("b",))
    assert finding.summary == (
        "The network of host b (rank 1) is slow: a sends b 244 KiB/s, and 381 MiB/s passed before."
    )


def test_links_that_are_all_equally_slow_are_no_finding() -> None:
    slow = [replace(one, bytes_per_s=SLOW, is_below_round_trips=True, usual_bytes_per_s=SLOW) for one in ring()]
    assert found_by("slow_link", job_of(slow)) == []


def test_a_slow_network_names_no_host() -> None:
    slow = [replace(one, bytes_per_s=SLOW, is_below_round_trips=True) for one in ring()]
    assert found_by("slow_link", job_of(slow)) == []


def test_a_link_that_was_always_slow_is_named_beside_others() -> None:
    links = [replace(one, usual_bytes_per_s=one.bytes_per_s) for one in ring("b")]
    assert decide(job_of(links)).findings[0].culprit_hosts == ("b",)


def test_of_two_hosts_the_one_whose_queue_is_full_is_named_and_else_both() -> None:
    both = [link("a", "b", SLOW), link("b", "a", SLOW, queued_share=0.9)]
    assert decide(job_of(both, "ab")).findings[0].culprit_hosts == ("b",)
    unknown = [link("a", "b", SLOW), link("b", "a", SLOW)]
    verdict = decide(job_of(unknown, "ab"))
    assert verdict.findings[0].culprit_hosts == ("a", "b")
    assert verdict.findings[0].summary.startswith("The link between hosts a and b is slow")
    assert "which end of the link" in verdict.cannot_tell[0]


def test_a_slow_link_explains_operations_that_do_not_complete() -> None:
    verdict = decide(job_of([link("a", "b", SLOW), link("b", "a", SLOW, queued_share=0.9)], "ab", stalled=True))
    assert verdict.findings[0].kind == "slow-link"


@pytest.mark.parametrize(
    "changed",
    [
        {"busy_share": 0.1},  # the job does not wait for it
        {"is_below_round_trips": False},  # the program sends small messages now, and waits for each answer
        {"bytes_per_s": 0.5 * FAST},
    ],
)
def test_links_that_cost_little_or_are_used_otherwise_are_no_finding(changed: dict[str, float]) -> None:
    links = [replace(one, **changed) for one in (link("a", "b", SLOW), link("b", "a", SLOW))]  # type: ignore[arg-type]
    assert found_by("slow_link", job_of(links, "ab")) == []


def write_samples(run: Path, host: str, address: str, to: str, rates: Iterable[float]) -> None:
    """Write a sample a second of a host that sends at these rates for half of each, by 100 segments of 1,000 bytes."""
    node = run / paths.node_folder_name(host)
    node.mkdir(parents=True)
    file = SampleFile(node, {"boot_id": host, "addresses": [address, "172.17.0.1"]})
    unknown = [None] * (len(node_samples.HOST) - 1)
    total = 0.0
    for second, rate in enumerate(rates):
        total += 0.5 * rate
        values = [total, 0.5 * second, total / 1000, 0, 2e-4, 1e-4]
        links = {to: values, "172.17.0.1": values, "10.0.0.99": values}
        queued = 512.0 if rate < FAST else 0.0
        file.append(Sample(t_ns=second * SECOND, host=[*unknown, queued], cores=[], gpus={}, processes={}, links=links))


def test_rates_are_of_the_newest_seconds_and_of_the_run(tmp_path: Path) -> None:
    write_samples(tmp_path, "host-a", "10.0.0.1", "10.0.0.2", [FAST] * 30)
    write_samples(tmp_path, "host-b", "10.0.0.2", "10.0.0.1", [FAST] * 30 + [SLOW] * 20)
    there, back = find_link_rates(tmp_path, ["host-a", "host-b", "host-c"])
    assert (there.sender, there.receiver, back.sender) == ("host-a", "host-b", "host-b")
    assert there.bytes_per_s == pytest.approx(FAST)
    assert there.queued_share == 0
    assert not there.is_below_round_trips
    assert back.bytes_per_s == pytest.approx(SLOW)
    assert back.usual_bytes_per_s == pytest.approx(FAST)
    assert (back.busy_share, back.queued_share) == (0.5, 1.0)
    assert back.is_below_round_trips  # 250 kB/s are 25 bytes in 0.1 ms


def test_hosts_without_statistics_of_links_have_no_rates(tmp_path: Path) -> None:
    node = tmp_path / "node-a"
    node.mkdir()
    SampleFile(node, {"boot_id": "a"}).append(Sample(t_ns=SECOND, host=[1.0] * 15, cores=[], gpus={}, processes={}))
    assert find_link_rates(tmp_path, ["a", "b"]) == ()
