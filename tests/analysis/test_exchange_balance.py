"""Exchanges whose members send and receive different amounts, as experts on several ranks do."""

from dataclasses import replace

import pytest

from dtprof.analysis.results import ExchangeMember
from dtprof.analysis.run_summary import summarise
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
WIDTH = 64  # bytes of a token
Splits = list[list[int]]


def training(
    routes: list[Splits], *, back: bool = True, dropped: int | None = None, unrecorded: int | None = None
) -> MemoryRun:
    """Return ranks that exchange tokens once a step, and once back; `routes[k][i][j]` of step k go from i to j.

    Rank `dropped` has no exchanges in its records, and the splits of rank `unrecorded` were more than a log declares.
    """
    size = len(routes[0])
    ranks = []
    for i in range(size):
        rank = RankBuilder(i, world_size=size)
        ranks.append(rank)
        experts = rank.group("experts", range(size), "mesh_ep")
        for step, route in enumerate([routes[0], *routes]):  # the first is not measured
            t = 100 * MS * step
            rank.span("backward", t, t + 40 * MS)
            ways = [(tuple(route[i]), tuple(row[i] for row in route))]
            ways += [(ways[0][1], ways[0][0])] if back else []
            for at, (sent, received) in enumerate(ways):
                uneven = len({*sent}) > 1 or len({*received}) > 1
                tag = len(rank.sizes) + 1 if uneven else 0
                if uneven and i != unrecorded:
                    rank.sizes[tag] = sent, received
                nbytes = WIDTH * (sum(sent) or sum(received))
                if i != dropped:
                    begin = t + (41 + 10 * at) * MS
                    tag = -7 if i == unrecorded else tag
                    rank.op("all_to_all", begin, begin + MS, group=experts, nbytes=nbytes, tag=tag)
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
    return MemoryRun(ranks)


HOT = [[10, 30], [10, 30]]
"""Each rank has 40 tokens, and sends 30 to the experts of rank 1: it gets 60 of 80, 1.5 times the mean of 40."""
COLD = [[20, 20], [20, 20]]


@pytest.mark.parametrize("back", [False, True])
def test_load_of_experts_is_that_of_the_uneven_side(back: bool) -> None:
    (found,) = summarise(training([HOT] * 6, back=back)).exchanges
    ways = 1 + back
    assert (found.axis, found.count, found.imbalance) == ("ep", 6 * ways, 1.5)
    assert (found.busiest_rank, found.busiest_share) == (1, 0.75)
    to_experts = [(40, 20), (40, 60)]  # sent and received by each rank
    expected = [(sent + back * received, received + back * sent) for sent, received in to_experts]
    assert [(member.sent_bytes_per_step, member.received_bytes_per_step) for member in found.members] == [
        (WIDTH * sent, WIDTH * received) for sent, received in expected
    ]
    assert [member.load for member in found.members] == [0.5, 1.5]


def test_experts_in_turn_are_uneven_in_each_exchange_though_not_over_the_run() -> None:
    other = [[30, 10], [30, 10]]
    (found,) = summarise(training([HOT, other] * 3)).exchanges
    assert found.imbalance == 1.5
    assert {member.load for member in found.members} == {1.0}


def test_even_steps_count_as_such() -> None:
    # Half of the exchanges at 1.5 times the mean, half at the mean: all of one size.
    (found,) = summarise(training([HOT, COLD] * 3)).exchanges
    assert found.imbalance == 1.25


def test_who_sends_nothing_still_receives() -> None:
    (found,) = summarise(training([[[0, 0], [40, 20]]] * 6, back=False)).exchanges
    assert found.members[0] == ExchangeMember(
        rank=0, sent_bytes_per_step=0, received_bytes_per_step=40 * WIDTH, load=0.0
    )
    assert found.imbalance == 2.0  # rank 1 sends all 60: that side is more uneven than 40 and 20


@pytest.mark.parametrize(
    "run",
    [training([COLD] * 6), training([HOT] * 6, dropped=0), training([HOT] * 6, unrecorded=1)],
    ids=["even", "member without records", "splits not recorded"],
)
def test_nothing_is_said_of(run: MemoryRun) -> None:
    assert summarise(run).exchanges == ()


def test_text_and_json_tell_of_it() -> None:
    summary = summarise(training([HOT] * 6))
    assert (
        "over ep, the busiest rank of an all_to_all has 1.50x the mean bytes; rank 1 has 75.0 % of the bytes of all 12"
    ) in " ".join(summary_text(summary).split())
    assert summary_json(summary)["exchanges"][0]["imbalance"] == 1.5
    assert "exchanges" not in summary_text(replace(summary, exchanges=()))
    even = replace(summary, exchanges=(replace(summary.exchanges[0], imbalance=1.04),))
    assert "exchanges" not in summary_text(even)
