"""Hand-built jobs with faults that have nothing to do with each other, and jobs in which one fault has a long tail."""

import pytest

from dtprof.diagnosis.job_state import Stack
from dtprof.diagnosis.stack_groups import PythonState
from tests.builders import RankBuilder
from tests.diagnosis.judging import judge, message, pair

WORLD, TEAM, CONTROL = 0, 1, 2


def two_teams() -> list[RankBuilder]:
    """Return 8 ranks in two teams of 4, each of which calls three times at line 30, and at 31 in another group."""
    ranks = [RankBuilder(rank, 8, closed=False) for rank in range(8)]
    for rank in ranks:
        number = rank.rank // 4
        members = range(4 * number, 4 * number + 4)
        assert rank.group(f"team{number}", members) == TEAM
        assert rank.group(f"control{number}", members) == CONTROL
        for step in range(3):
            t = 100 * step
            rank.op("all_reduce", t, t + 9, group=TEAM, site=rank.site("all_reduce", line=30), step=step)
            rank.op("broadcast", t + 20, t + 29, group=CONTROL, site=rank.site("broadcast", line=31), peer=0, step=step)
    return ranks


def enter_next(rank: RankBuilder, *, skips: bool) -> None:
    """Let a rank wait at line 30, or at 31 if it skips that call."""
    if skips:
        rank.op("broadcast", 300, group=CONTROL, site=rank.site("broadcast", line=31), peer=0, step=3)
    else:
        rank.op("all_reduce", 300, group=TEAM, site=rank.site("all_reduce", line=30), step=3)


def receive(rank: RankBuilder, *, source: int) -> None:
    rank.op("recv", 300, group=WORLD, site=rank.site("recv", line=40), peer=source)


def test_each_of_two_groups_with_a_skip_of_its_own_has_a_finding() -> None:
    ranks = two_teams()
    for rank in ranks:
        enter_next(rank, skips=rank.rank in (2, 5))
    verdict = judge(ranks, exit_status=None)
    found = {finding.culprit_ranks: (finding.kind, finding.waiting_ranks) for finding in verdict.findings}
    assert found == {
        (2,): ("rank-skipped-collective", (0, 1, 3)),
        (5,): ("rank-skipped-collective", (4, 6, 7)),
    }
    assert verdict.cannot_tell == ()


def test_ranks_that_wait_for_those_that_wait_are_no_finding_of_their_own() -> None:
    ranks = two_teams()
    for rank in ranks[:4]:
        enter_next(rank, skips=rank.rank == 2)
    for rank in ranks[4:]:  # a chain: 7 waits for 6, 6 for 5, 5 for 4, 4 for 3, which waits in its team
        receive(rank, source=rank.rank - 1)
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (2,))


def test_a_wait_that_no_rule_explains_is_named_beside_the_finding() -> None:
    ranks = two_teams()
    for rank in ranks[:4]:
        enter_next(rank, skips=rank.rank == 2)
    # Rank 6 waits for a receive from any source, which the records of nobody can pair.
    receive(ranks[6], source=-1)
    verdict = judge(ranks, exit_status=None)
    assert [finding.culprit_ranks for finding in verdict.findings] == [(2,)]
    assert any(text.startswith("rank 6 waits in recv #") and "no finding explains" in text
               for text in verdict.cannot_tell)  # fmt: skip


def test_two_ranks_that_raise_before_either_process_is_gone_are_two_findings() -> None:
    ranks = two_teams()
    for rank in ranks:
        if rank.rank in (2, 5):
            rank.exception(300 + rank.rank, "ValueError" if rank.rank == 2 else "KeyError", f"bad {rank.rank}")
        else:
            enter_next(rank, skips=False)
    statuses = {2: (1, 1000), 5: (1, 1001), **dict.fromkeys((0, 1, 3, 4, 6, 7), (-15, 2000))}
    verdict = judge(ranks, statuses=statuses)
    assert verdict.outcome == "crash"
    assert [(finding.kind, finding.culprit_ranks) for finding in verdict.findings] == [
        ("rank-crashed", (2,)),
        ("rank-crashed", (5,)),
    ]


def test_a_rank_that_raises_after_another_process_is_gone_is_a_consequence() -> None:
    ranks = two_teams()
    for rank in ranks:
        if rank.rank in (2, 5):
            rank.exception(300 + 1000 * (rank.rank == 5), "ValueError" if rank.rank == 2 else "KeyError", "bad")
        else:
            enter_next(rank, skips=False)
    statuses = {2: (1, 1000), 5: (1, 1500), **dict.fromkeys((0, 1, 3, 4, 6, 7), (-15, 2000))}
    assert [finding.culprit_ranks for finding in judge(ranks, statuses=statuses).findings] == [(2,)]


def test_ranks_of_another_group_in_two_operations_at_one_place_have_a_finding_beside_a_crash() -> None:
    ranks = two_teams()
    for rank in ranks[:4]:
        op = "broadcast" if rank.rank == 2 else "all_reduce"
        rank.op(op, 300, group=TEAM, site=rank.site(op, line=33 if rank.rank == 2 else 30), peer=0, step=3)
    ranks[5].exception(300, "ValueError", "bad")
    for rank in (ranks[4], *ranks[6:]):
        enter_next(rank, skips=False)
    statuses = {5: (1, 301), **dict.fromkeys((0, 1, 2, 3, 4, 6, 7), (-15, 400))}
    found = {finding.culprit_ranks: finding.waiting_ranks for finding in judge(ranks, statuses=statuses).findings}
    assert found == {(5,): (4, 6, 7), (2,): (0, 1, 3)}


@pytest.mark.parametrize(
    ("peers", "found"),
    [
        ((1, 0, 3, 2), {(0, 1): (), (2, 3): ()}),  # each waits for its partner
        ((1, 0, 0, 2), {(0, 1): (2, 3)}),  # a chain behind one pair
    ],
)
def test_two_cycles_of_messages_are_two_findings_and_who_waits_for_one_is_not_of_it(
    peers: tuple[int, ...], found: dict[tuple[int, ...], tuple[int, ...]]
) -> None:
    ranks = pair(4)
    for rank, peer in zip(ranks, peers, strict=True):
        message(rank, "recv", peer, 100, line=8)
    verdict = judge(ranks, exit_status=None)
    assert {finding.culprit_ranks: finding.waiting_ranks for finding in verdict.findings} == found
    assert {finding.kind for finding in verdict.findings} == {"p2p-deadlock-cycle"}
    assert verdict.cannot_tell == ()


def test_what_never_ends_comes_before_work_that_may_and_only_those_who_wait_for_a_rank_are_said_to() -> None:
    """All messages have one number: ranks 0 and 1 differ in tags, and rank 3 waits for rank 2, which works."""
    ranks = pair(4)
    for t in (0, 100):
        for sender in (0, 2):
            message(ranks[sender], "send", sender + 1, t, t + 9, line=4, tag=7)
            message(ranks[sender + 1], "recv", sender, t, t + 9, line=5, tag=7)
    message(ranks[3], "recv", 2, 200, line=5, tag=7)
    message(ranks[0], "send", 1, 210, line=4, tag=8)
    message(ranks[1], "recv", 0, 210, line=5, tag=7)
    stack = Stack(state="running", cpu_share=1.0, frames=(), reason="no frames", python_state=PythonState.CHANGED)
    verdict = judge(ranks, exit_status=None, stacks={2: stack})
    assert [(finding.kind, finding.culprit_ranks, finding.waiting_ranks) for finding in verdict.findings] == [
        ("p2p-tag-mismatch", (0,), (1,)),
        ("long-operation", (2,), (3,)),
    ]
    assert verdict.findings[1].summary.endswith("; rank 3 waits for it in recv from rank 2 with tag 7.")
