"""Ranks wait for the messages of one another in a ring."""

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from tests.diagnosis.judging import build_job, found_by, judge, message, pair


def ring(*, receives_first: int) -> JobState:
    """Return ranks in a ring of which the first `receives_first` are in a receive, the others in a send."""
    ranks = pair(3)
    for rank in ranks:
        if rank.rank < receives_first:
            message(rank, "recv", (rank.rank - 1) % 3, 100, line=8)
        else:
            message(rank, "send", (rank.rank + 1) % 3, 100, line=9)
    return build_job(ranks, exit_status=None)


def all_that_receive_first() -> JobState:
    return ring(receives_first=3)


def one_that_sends_first() -> JobState:
    return ring(receives_first=2)


FAULTY = {"p2p-deadlock-cycle": all_that_receive_first}
SOUND = one_that_sends_first


def test_ranks_that_all_receive_before_they_send_are_a_cycle_of_messages() -> None:
    ranks = pair(3)
    for rank in ranks:
        message(rank, "recv", (rank.rank - 1) % 3, 100, line=8)
    finding = found_by("p2p_deadlock_cycle", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-deadlock-cycle", (0, 1, 2), ())
    assert {site.line for site in finding.culprit_call_sites.values()} == {8}


def test_messages_in_a_ring_that_met_are_healthy() -> None:
    ranks = pair(3)
    for rank in ranks:
        rank.op("send", 100, 190, is_async=True, waits=(110, 190), peer=(rank.rank + 1) % 3, nbytes=8)
        rank.op("recv", 101, 180, is_async=True, waits=(102, 110), peer=(rank.rank - 1) % 3, nbytes=8)
    assert judge(ranks, exit_status=0, stalled=False).findings == ()


def facing_each_other() -> JobState:
    """Return ranks in a ring that go on round after round; two then send to each other, at a line of their own."""
    ranks = pair(4)
    for rank in ranks:
        after, before = (rank.rank + 1) % 4, (rank.rank - 1) % 4
        for i in range(3):
            rank.op(
                "send", 100 * i, 100 * i + 50, is_async=True, peer=after, site=rank.site("isend", line=5), seq=2 * i
            )
            rank.op("recv", 100 * i + 1, 100 * i + 60, peer=before, site=rank.site("recv", line=6), seq=2 * i + 1)
        if rank.rank in (1, 2):
            rank.op("send", 400, peer=3 - rank.rank, site=rank.site("send", line=40), seq=6, tag=3)
        else:  # the next round
            rank.op("send", 400, 410, is_async=True, peer=after, site=rank.site("isend", line=5), seq=6)
            rank.op("recv", 401, peer=before, site=rank.site("recv", line=6), seq=7)
    return build_job(ranks, exit_status=None)


def test_two_ranks_that_wait_for_each_other_are_a_cycle_though_others_wait_for_them() -> None:
    finding = decide(facing_each_other()).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-deadlock-cycle", (1, 2))


def test_partners_that_both_receive_first_are_a_cycle_despite_an_earlier_receive_at_that_line() -> None:
    ranks = pair(4)
    for i, ways in enumerate((1, 3, 1)):
        for rank in ranks:
            partner, t = rank.rank ^ ways, 100 * i
            order = (("recv", 8), ("send", 9)) if rank.rank < partner else (("send", 3), ("recv", 4))
            for later, (op, line) in enumerate(order):
                message(rank, op, partner, t + 10 * later, t + 10 * later + 9, line=line)
    for rank in ranks:
        message(rank, "recv", rank.rank ^ 3, 400, line=8)
    place = SourcePlace(in_loop=True, following=frozenset({("send", 9)}))
    verdict = judge(ranks, exit_status=None, find_place=lambda _, line: place if line == 8 else None)
    found = [(finding.kind, finding.culprit_ranks) for finding in verdict.findings]
    assert found == [("p2p-deadlock-cycle", (0, 3)), ("p2p-deadlock-cycle", (1, 2))]
