"""The peer of a message never posts its other end."""

from dataclasses import replace

import pytest

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.rules.p2p_unmatched import find_omitted, find_other_partner
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records.sites import Site
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, message, pair


def receiving_from_a_rank_in(name: str) -> JobState:
    """Return a job in which rank 2 waits for a message of rank 0, which is in a barrier with rank 1 or sends it."""
    ranks = pair(3)
    message(ranks[2], "recv", 0, 100, line=4)
    for rank in ranks[: 2 if name == "barrier" else 0]:
        rank.op("barrier", 200, None, returned=201, site=rank.site("barrier", line=9))
    if name == "send":
        message(ranks[0], "send", 2, 100, line=5)
    return build_job(ranks, exit_status=None)


def one_that_nobody_sends() -> JobState:
    return receiving_from_a_rank_in("barrier")


def one_that_is_sent() -> JobState:
    return receiving_from_a_rank_in("send")


FAULTY = {"p2p-unmatched": one_that_nobody_sends}
SOUND = one_that_is_sent


def test_a_message_whose_peer_waits_in_a_barrier_is_unmatched() -> None:
    ranks = pair(3)
    message(ranks[2], "recv", 0, 100, line=4)
    for rank in ranks[:2]:
        rank.op("barrier", 200, None, returned=201, site=rank.site("barrier", line=9))
    finding = found_by("p2p_unmatched", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-unmatched", (0,), (1, 2))


@pytest.mark.parametrize(("more", "culprit"), [(True, 1), (False, 0)])
def test_a_rank_that_receives_once_more_than_in_its_rounds_is_blamed_and_not_its_peer(more: bool, culprit: int) -> None:
    ranks = pair(2)
    for step, t in enumerate((0, 100, 200)):
        is_last = step == 2
        sent = 2 if more or not is_last else 1
        for nth in range(3 if more and is_last else 2):
            at, arrives = t + 10 * nth, nth < sent
            if arrives:
                message(ranks[0], "send", 1, at, at + 5, line=4)
            message(ranks[1], "recv", 0, at, at + 5 if arrives else None, line=5)
        for rank in ranks[: 1 if is_last else 2]:
            done = None if is_last else t + 60
            rank.op("all_reduce", t + 50, done, returned=t + 51, step=step, site=rank.site("all_reduce", line=9))
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-unmatched", (culprit,))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_turns_to_another_peer_than_ever_is_blamed_and_not_that_peer(late: int) -> None:
    ranks = pair(3)
    for t in (0, 100, 200):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
    message(ranks[0], "send", 1, 300 + 5 * (late == 0), line=4)
    message(ranks[1], "recv", 2, 300 + 5 * (late == 1), line=5)
    ranks[2].op("barrier", 250)
    finding = found_by("p2p_unmatched", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-unmatched", (1,))


def test_a_message_to_a_new_peer_is_no_cycle_but_missed_by_the_usual_one() -> None:
    ranks = pair(3)
    for t in (0, 100):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
        message(ranks[1], "send", 2, t + 20, t + 29, line=6)
        message(ranks[2], "recv", 1, t + 20, t + 29, line=5)
    message(ranks[2], "recv", 1, 150, line=5)
    message(ranks[1], "recv", 0, 200, line=5)
    message(ranks[0], "send", 2, 210, line=4)
    finding = found_by("p2p_unmatched", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-unmatched", (0,), (1, 2))


@pytest.mark.parametrize(
    ("sent", "culprits", "kind"),
    [
        ((3, 2, 3), (2,), "p2p-unmatched"),
        ((3, 2), (2,), "p2p-unmatched"),
        ((3, 3, 3), (0,), "p2p-unmatched"),  # the receiver asks for one too many
        ((3, 2, 1), (), ""),
    ],
)
def test_a_receive_from_any_source_that_nobody_serves_names_who_sent_less_than_most(
    sent: tuple[int, ...], culprits: tuple[int, ...], kind: str
) -> None:
    ranks = pair(len(sent) + 1)
    times = iter(range(100, 1000, 10))
    for rank, count in enumerate(sent, 1):
        for _ in range(count):
            t = next(times)
            message(ranks[rank], "send", 0, t, t + 5, line=4)
            message(ranks[0], "recv", -1, t, t + 5, line=5)
        ranks[rank].op("barrier", 1000, returned=1001, site=ranks[rank].site("barrier", line=9))
    message(ranks[0], "recv", -1, 990, line=5)
    findings = decide(build_job(ranks, exit_status=None)).findings
    assert [(finding.kind, finding.culprit_ranks) for finding in findings] == ([(kind, culprits)] if kind else [])


@pytest.mark.parametrize(("ways", "line"), [(((3, "continue"),), 3), ((), 2)])
def test_a_line_past_a_message_comes_before_the_end_of_the_loop_that_its_rank_has_left(
    ways: tuple[tuple[int, str], ...], line: int
) -> None:
    # `work` of line 8 sends at line 4, in a loop of the lines 2 to 4; all meet at line 9. Rank 1 sends once less.
    ranks = pair(4)
    caller = Site(file="/home/me/train.py", line=8, function="main")
    for rank in ranks:
        for nth in range(3):
            if rank.rank and (rank.rank, nth) != (1, 1):
                message(rank, "send", 0, 10 * nth, 10 * nth + 5, line=4)
                message(ranks[0], "recv", -1, 10 * nth, 10 * nth + 5, line=5)
        rank.sites = {n: replace(s, function="work", callers=(caller,)) for n, s in rank.sites.items()}
        if rank.rank:
            rank.op("barrier", 100, site=rank.site("barrier", line=9))
    message(ranks[0], "recv", -1, 90, line=5)
    nothing = frozenset[tuple[str, int]]()
    places = {
        4: SourcePlace(in_loop=True, following=nothing, loops=((2, 4),), ways_past=ways),
        **dict.fromkeys((8, 9), SourcePlace(in_loop=False, following=nothing)),
    }
    job = build_job(ranks, exit_status=None, find_place=lambda _, at: places.get(at))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[1].line) == ("p2p-unmatched", (1,), line)


def exchanging(*, omits: bool) -> JobState:
    """Return ranks that send each other a message in each of three rounds; in the third, rank 1 may leave out its own.

    Both wait to receive then: rank 0 the message left out, rank 1 that of the round after.
    """
    ranks = pair(2)
    for t in (0, 100, 200):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
        is_left_out = omits and t == 200
        message(ranks[0], "recv", 1, t + 20, None if t == 200 else t + 29, line=6)
        if not is_left_out:
            message(ranks[1], "send", 0, t + 20, t + 29, line=7)
    message(ranks[1], "recv", 0, 300, line=5)
    return build_job(ranks, exit_status=None)


def test_of_two_ranks_that_both_receive_the_one_that_left_its_pattern_is_named() -> None:
    finding = decide(exchanging(omits=True)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("p2p-unmatched", (1,), "recv")
    assert finding.evidence[1].endswith("rank 1 made send to rank 0 in its round before")


def test_ranks_that_keep_to_their_patterns_skip_nothing() -> None:
    assert not [*find_omitted(Case(exchanging(omits=False)))]


def test_a_message_skipped_in_an_earlier_iteration_explains_the_wait_for_a_rank_that_exited() -> None:
    ranks = pair()
    for rank in ranks:
        for step in range(6):
            t = step * 100
            is_last = step == 5
            if rank.rank == 0:
                message(rank, "recv", 1, t, t + 9, line=4)
                if step != 3:
                    message(rank, "send", 1, t + 10, t + 19, line=5)
            else:
                message(rank, "send", 0, t, t + 9, line=6)
                message(rank, "recv", 0, t + 10, None if is_last else t + 19, line=7)
    ranks[0].closed = True
    finding = decide(build_job(ranks, exit_status=1)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-unmatched", (0,), (1,))
    assert "skipped a send" in finding.summary


@pytest.mark.parametrize(("following", "kind"), [("recv", "p2p-deadlock-cycle"), ("print", "p2p-unmatched")])
def test_a_message_that_follows_a_new_one_is_late_and_not_skipped(following: str, kind: str) -> None:
    ranks = pair(3)
    for t in (0, 100, 200):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
        message(ranks[1], "send", 2, t + 10, t + 19, line=6)
        message(ranks[2], "recv", 1, t + 10, t + 19, line=7)
        message(ranks[2], "send", 1, t + 20, t + 29, line=8)
        message(ranks[1], "recv", 2, t + 20, t + 29, line=9)
    message(ranks[0], "send", 1, 300, line=4)
    message(ranks[1], "recv", 2, 300, line=3)
    message(ranks[2], "recv", 1, 300, line=7)

    def place(_: str, line: int) -> SourcePlace:
        return SourcePlace(in_loop=True, following=frozenset({(following, 5)}) if line == 3 else frozenset())

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1, 2) if following == "recv" else (1,))


@pytest.mark.parametrize(("later", "kind"), [("give", "p2p-deadlock-cycle"), ("print", "p2p-unmatched")])
def test_a_message_sent_by_a_later_function_is_late_and_not_skipped(later: str, kind: str) -> None:
    # A ring of three: rank 0 sends first in two rounds, and is called in line 20, before `later` in line 21, now.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        ask, give = rank.site("recv", line=4, function="ask"), rank.site("send", line=7, function="give")
        after, before = (rank.rank + 1) % 3, (rank.rank - 1) % 3
        for t in (0, 100):
            to_send, to_receive = (t, t + 20) if rank.rank == 0 else (t + 20, t)
            rank.op("send", to_send, t + 40, returned=t + 41, peer=after, site=give, nbytes=8)
            rank.op("recv", to_receive, t + 40, returned=t + 41, peer=before, site=ask, nbytes=8)
        rank.op("recv", 200, None, returned=201, peer=before, site=ask, nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        return SourcePlace(in_loop=True, following=frozenset({(later, 21)}) if line == 20 else frozenset())

    frames = tuple(
        Site(file="/home/me/train.py", line=line, function=name) for line, name in ((4, "ask"), (20, "swap"))
    )
    stacks = dict.fromkeys(range(3), Stack(state="sleeping", cpu_share=0.0, frames=frames))
    finding = decide(build_job(ranks, exit_status=None, find_place=place, stacks=stacks)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0, 1, 2) if later == "give" else (0,))


@pytest.mark.parametrize(
    ("loops", "fixed", "kind"),
    [
        (((5, 9), (4, 10)), (), "p2p-unmatched"),
        (((5, 9), (4, 10)), (4, 5), "p2p-unmatched"),
        (((4, 10),), (4,), "p2p-unmatched"),
        (((4, 10),), (), "rank-exited"),
    ],
)
def test_a_rank_one_loop_iteration_short_skipped_a_message(
    loops: tuple[tuple[int, int], ...], fixed: tuple[int, ...], kind: str
) -> None:
    """Six messages from each rank to the next at line 7; rank 1 leaves one out by the `continue` of line 6.

    In one loop, whose rounds the source does not count, it may as well have left a round before the others.
    """
    ranks = pair(4)
    for rank in ranks:
        rank.closed = rank.rank in (1, 3)
        for i in range(5 if rank.rank == 1 else 6):
            for name, peer in (("send", (rank.rank + 1) % 4), ("recv", (rank.rank - 1) % 4)):
                is_met = i < 5 or (rank.rank, name) not in ((0, "send"), (2, "recv"))
                message(rank, name, peer, 10 * i, 10 * i + 5 if is_met else None, line=7)
    way = ((6, "continue"),)
    place = SourcePlace(in_loop=True, following=frozenset(), loops=loops, fixed_loops=fixed, ways_past=way)
    ended = dict.fromkeys((1, 3), (0, 100))
    finding = decide(
        build_job(ranks, statuses=ended, find_place=lambda _, line: place if line == 7 else None)
    ).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
    if kind == "p2p-unmatched":
        assert finding.culprit_call_sites[1].line == 6


def test_the_only_branch_past_a_message_is_the_line_of_the_culprit() -> None:
    place = SourcePlace(in_loop=True, following=frozenset(), loops=((2, 12),), ways_past=((6, "continue"),))
    job = exchanging(omits=True)
    read = replace(job, find_place=lambda _, line: place if line in (5, 7) else None)
    finding = next(iter(find_omitted(Case(read))))
    assert finding.culprit_call_sites[1].line == 6
    assert next(iter(find_omitted(Case(job)))).culprit_call_sites[1].line == 5


@pytest.mark.parametrize(("stages", "culprit"), [(3, 2), (2, 0)])
def test_who_leaves_the_microbatches_that_most_stages_go_on_with_is_blamed(stages: int, culprit: int) -> None:
    """Of two stages either may have counted wrongly: the one that goes on leaves its own pattern."""
    ranks = pair(stages)
    last = ranks[-1]
    for step, t in enumerate((0, 1000, 2000)):
        for nth in range(3 if step == 2 else 2):
            is_extra = nth == 2
            for rank in ranks:
                at = t + 100 * nth + 10 * rank.rank
                is_last_hop = rank.rank == stages - 2
                if rank.rank > 0 and not (is_extra and rank is last):
                    message(rank, "recv", rank.rank - 1, at, at + 5, line=4)
                if rank is not last:
                    message(rank, "send", rank.rank + 1, at + 6, None if is_extra and is_last_hop else at + 9, line=5)
                    if not is_extra:
                        message(rank, "recv", rank.rank + 1, at + 50, at + 60, line=6)
                    elif not is_last_hop:
                        message(rank, "recv", rank.rank + 1, at + 7, line=6)
                if rank.rank > 0 and not is_extra:
                    message(rank, "send", rank.rank - 1, at + 40, at + 60, line=7)
        for rank in ranks if step < 2 else [last]:
            done = t + 590 if step < 2 else None
            rank.op("all_reduce", t + 500, done, returned=t + 501, step=step, site=rank.site("all_reduce", line=9))
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-unmatched", (culprit,))


Exchange = tuple[int, int, int, bool]
"""Rank, partner, step, and whether it ended."""
MUTUAL: list[Exchange] = [(rank, (rank + 2) % 4, step, True) for step in range(3) for rank in range(4)]
RING: list[Exchange] = [(rank, (rank + 1) % 4, 3, False) for rank in range(4)]


def in_pairs(exchanges: list[Exchange], *, sends: bool = True) -> JobState:
    """Return four ranks that exchange messages with a partner in each step."""
    ranks = pair(4)
    for number, (rank, peer, step, ended) in enumerate(exchanges):
        at, own = 100 * number + 10, ranks[rank]
        done = at + 50 if ended else None
        if sends:
            site = own.site("isend", line=3)
            own.op("send", at, done, returned=at + 1, is_async=True, peer=peer, step=step, site=site)
        own.op("recv", at + 2, done, peer=peer, step=step, site=own.site("recv", line=4))
    return build_job(ranks, exit_status=None)


def test_who_exchanges_with_a_member_of_another_pair_chose_the_wrong_partner() -> None:
    """In step 3 ranks 0 and 2 exchange, rank 1 waits for rank 3, and that meets rank 2's message of step 4."""
    third: list[Exchange] = [(0, 2, 3, True), (2, 0, 3, True), (1, 3, 3, False), (3, 2, 3, True)]
    later: list[Exchange] = [(2, 3, 4, True), (0, 1, 4, False), (3, 2, 4, False), (2, 0, 5, False)]
    (finding,) = find_other_partner(Case(in_pairs([*MUTUAL, *third, *later])))
    assert (finding.kind, finding.culprit_ranks, finding.confidence) == ("p2p-unmatched", (3,), 0.8)
    assert finding.summary == (
        "Rank 3 exchanged messages with rank 2 in step 3, which exchanged with rank 0; rank 1 turned to rank 3, "
        "and messages of different steps met from there on."
    )


def test_where_no_pair_agrees_all_of_a_ring_may_have_chosen_wrongly() -> None:
    (finding,) = find_other_partner(Case(in_pairs([*MUTUAL, *RING])))
    assert (finding.culprit_ranks, finding.confidence) == ((0, 1, 2, 3), 0.6)


def test_ranks_that_receive_before_they_send_have_chosen_no_wrong_partner() -> None:
    job = in_pairs([*MUTUAL, *RING], sends=False)
    assert list(find_other_partner(Case(job))) == []
    assert decide(job).findings[0].kind == "p2p-deadlock-cycle"
