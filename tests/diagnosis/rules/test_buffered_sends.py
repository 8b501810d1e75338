"""Sends that went well because the backend kept them are replayed as if each waited for its receive."""

import pytest

from dtprof.diagnosis.job_state import JobState
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by

Calls = list[tuple[str, int]]
"""Of a rank in order: function, peer."""


def exchanged(*programs: Calls) -> JobState:
    """Return a job in which each rank makes these calls, and all of them end well."""
    ranks = []
    for number, calls in enumerate(programs):
        rank = RankBuilder(number, len(programs))
        for i, (function, peer) in enumerate(calls):
            site = rank.site(function, line=10 + i, function="exchange")
            t = 100 * (i + 1)
            op = "send" if "send" in function else "recv"
            rank.op(op, t, t + 9, returned=t + 9, peer=peer, site=site, nbytes=8, is_async=function.startswith("i"))
        ranks.append(rank)
    return build_job(ranks, exit_status=0, stalled=False)


def two_that_send_first() -> JobState:
    return exchanged([("send", 1), ("recv", 1)], [("send", 0), ("recv", 0)])


def two_that_take_turns() -> JobState:
    return exchanged([("send", 1), ("recv", 1)], [("recv", 0), ("send", 0)])


FAULTY = {"p2p-deadlock-cycle": two_that_send_first}
SOUND = two_that_take_turns


def test_two_that_send_first_are_warned_of_with_both_lines() -> None:
    (finding,) = found_by("buffered_sends", two_that_send_first())
    assert (finding.kind, finding.severity, finding.culprit_ranks) == ("p2p-deadlock-cycle", "warning", (0, 1))
    assert {site.line for site in finding.culprit_call_sites.values()} == {10}


def test_a_ring_and_a_pipeline_that_sends_ahead_are_cycles_too() -> None:
    ring = exchanged(*([("send", (r + 1) % 3), ("recv", (r - 1) % 3)] for r in range(3)))
    assert found_by("buffered_sends", ring)[0].culprit_ranks == (0, 1, 2)
    # Rank 0 sends twice before it receives; rank 1 answers the first at once: its answer waits behind the second.
    ahead = exchanged([("send", 1)] * 2 + [("recv", 1)] * 2, [("recv", 0), ("send", 0)] * 2)
    assert found_by("buffered_sends", ahead)[0].culprit_ranks == (0, 1)


@pytest.mark.parametrize(
    "programs",
    [
        [[("isend", 1), ("recv", 1)], [("isend", 0), ("recv", 0)]],
        [[("isend", 1), ("recv", 1)], [("send", 0), ("recv", 0)]],
        [[("batch_isend_irecv", 1), ("irecv", 1)], [("batch_isend_irecv", 0), ("irecv", 0)]],
        [[("send", 1)] * 3 + [("recv", 1)] * 3, [("recv", 0)] * 3 + [("send", 0)] * 3],
        [[("send", 1), ("recv", 2)], [("recv", 0), ("send", 2)], [("recv", 1), ("send", 0)]],
    ],
)
def test_messages_that_no_buffer_has_to_keep_are_no_cycle(programs: list[Calls]) -> None:
    assert found_by("buffered_sends", exchanged(*programs)) == []
