"""Hand-built jobs that go well, and what is noted of them: limits, threads."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.diagnosis.findings import Verdict
from dtprof.records.schema import FLAG
from tests.builders import RankBuilder
from tests.diagnosis.judging import judge


def good(ranks: Sequence[RankBuilder]) -> Verdict:
    return judge(ranks, exit_status=0, stalled=False)


def with_limits(limits_s: Sequence[float], *, own_s: float | None = None) -> list[RankBuilder]:
    ranks = [RankBuilder(rank, len(limits_s)) for rank in range(len(limits_s))]
    for rank, limit_s in zip(ranks, limits_s, strict=True):
        rank.groups[0] = replace(rank.groups[0], timeout_s=limit_s)
        if own_s is not None:
            number = rank.group("1", range(len(limits_s)), "tp")
            rank.groups[number] = replace(rank.groups[number], timeout_s=own_s)
    return ranks


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        (with_limits((600, 1800, 1800)), [(0,)]),
        (with_limits((7200, 7200), own_s=1800), [()]),
        (with_limits((7200, 7200), own_s=300), []),  # somebody's choice
        (with_limits((600, 600), own_s=1800), []),
        (with_limits((1800, 1800), own_s=1800), []),
    ],
)
def test_limits_that_differ_are_noted_and_do_no_harm(ranks: list[RankBuilder], culprits: list[tuple[int, ...]]) -> None:
    verdict = good(ranks)
    assert (verdict.outcome, verdict.faults) == ("healthy", ())
    assert [(f.kind, f.severity, f.culprit_ranks) for f in verdict.findings] == [
        ("unequal-timeouts", "info", expected) for expected in culprits
    ]


def with_threads(orders: Sequence[str], *, flags: int = FLAG["completion"]) -> list[RankBuilder]:
    """Return ranks whose threads a and b call at a line each, in the order told."""
    ranks = [RankBuilder(rank, len(orders)) for rank in range(len(orders))]
    for rank, order in zip(ranks, orders, strict=True):
        for i, name in enumerate(order):
            site = rank.site("all_reduce", line=10 if name == "a" else 20)
            thread = 1 if name == "a" else 2
            rank.op("all_reduce", 10 * i, 10 * i + 5, thread=thread, site=site, nbytes=8, flags=flags)
    return ranks


@pytest.mark.parametrize(
    ("orders", "found"),
    [
        (("ababab", "ababab"), [("shared-group", "info")]),
        (("aaabbb", "aaabbb"), []),  # handed over once
        (("abababab", "abbaabab"), [("step-mismatch", "error")]),
    ],
)
def test_threads_that_share_a_group_are_noted_and_an_error_where_their_calls_met(
    orders: Sequence[str], found: list[tuple[str, str]]
) -> None:
    verdict = good(with_threads(orders))
    assert [(finding.kind, finding.severity) for finding in verdict.findings] == found


def test_the_first_position_at_which_calls_of_two_threads_met_is_named() -> None:
    finding = good(with_threads(("abababab", "abbaabab"))).findings[0]
    assert (finding.seq, finding.culprit_ranks) == (2, (0, 1))
    assert {site.line for site in finding.culprit_call_sites.values()} == {10, 20}


def test_the_thread_of_autograd_does_not_count() -> None:
    assert good(with_threads(("ababab", "ababab"), flags=FLAG["inferred_site"])).findings == ()
