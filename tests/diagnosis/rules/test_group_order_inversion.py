"""Ranks wait for one another in groups that they entered in opposite orders."""

import pytest

from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records.sites import Site
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, in_two_groups


def opposite_orders() -> JobState:
    return build_job(in_two_groups(["ab", "ab", "ba"], done=False), exit_status=None)


def on_one_line(*, wrong_rank: int | None) -> JobState:
    """Return ranks that used group a at one line three times, and wait there; the wrong rank on group b."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = [rank.group(name, range(3), name) for name in "ab"]
        site = rank.site("all_reduce", line=30)
        for step in range(3):
            rank.op("all_reduce", step * 100, step * 100 + 9, group=groups[0], site=site, nbytes=8)
        rank.op("all_reduce", 300, None, returned=301, group=groups[rank.rank == wrong_rank], site=site, nbytes=8)
    return build_job(ranks, exit_status=None)


def one_on_the_wrong_group() -> JobState:
    return on_one_line(wrong_rank=1)


def all_on_one_group() -> JobState:
    return on_one_line(wrong_rank=None)


FAULTY = {"group-order-inversion": opposite_orders, "wrong-group": one_on_the_wrong_group}
SOUND = all_on_one_group


def test_groups_entered_in_opposite_order_are_a_cycle_with_the_odd_rank_as_culprit() -> None:
    finding = found_by(
        "group_order_inversion", build_job(in_two_groups(["ab", "ab", "ba"], done=False), exit_status=None)
    )[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-order-inversion", (2,), (0, 1))
    assert finding.culprit_call_sites[2].line == 40


def test_a_line_that_uses_the_group_of_the_next_line_is_in_the_wrong_order() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = [rank.group(name, range(3), name) for name in "ab"]
        sites = [rank.site("all_reduce", line=30 + i) for i in range(2)]
        for t in (0, 100, 200):
            for i in range(2):
                rank.op("all_reduce", t + 10 * i, t + 10 * i + 9, group=groups[i], site=sites[i], nbytes=8)
        rank.op("all_reduce", 300, None, returned=301, group=groups[rank.rank == 1], site=sites[0], nbytes=8)
    finding = found_by("group_order_inversion", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-order-inversion", (1,), (0, 2))


def test_a_line_that_always_used_one_group_and_now_another_is_the_wrong_group() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = [rank.group(name, range(3), name) for name in "ab"]
        site = rank.site("all_reduce", line=30)
        for step in range(3):
            rank.op("all_reduce", step * 100, step * 100 + 9, group=groups[0], site=site, nbytes=8)
        rank.op("all_reduce", 300, None, returned=301, group=groups[rank.rank == 1], site=site, nbytes=8)
    finding = found_by("group_order_inversion", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("wrong-group", (1,), (0, 2))


def test_of_two_ranks_in_a_cycle_the_one_that_leaves_its_own_order_is_the_culprit() -> None:
    # A pair, then all, at one line; rank 1 takes them the other way round in its fourth round.
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        team = rank.group("pair", (0, 1) if rank.rank < 2 else (2, 3))
        site = rank.site("all_reduce", line=30)
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, group=team, site=site, nbytes=8)
            rank.op("all_reduce", t + 10, t + 19, site=site, nbytes=8)
        if rank.rank >= 2:
            rank.op("all_reduce", 300, 309, group=team, site=site, nbytes=8)
        rank.op("all_reduce", 310, group=team if rank.rank == 0 else 0, site=site, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("group-order-inversion", (1,))


@pytest.mark.parametrize(("orders", "kind"), [("abab", "wrong-group"), ("ab", "group-order-inversion")])
def test_a_loop_over_groups_that_goes_on_after_a_call_on_another_group_used_the_wrong_one(
    orders: str, kind: str
) -> None:
    # One line calls on a, then on b. Rank 1 calls on a twice: paired with the next round of others, it goes on to `c`.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = {name: rank.group(name, range(3), name) for name in "abc"}
        site = rank.site("all_reduce", line=30)
        for round_ in range(3):
            for i, name in enumerate("abc"):
                t = 100 * round_ + 10 * i
                rank.op("all_reduce", t, t + 9, group=groups[name], site=site, nbytes=8)
        rank.op("all_reduce", 300, 309, group=groups["a"], site=site, nbytes=8)
        if rank.rank == 1 and orders == "abab":
            rank.op("all_reduce", 310, 319, group=groups["a"], site=site, nbytes=8)
            rank.op("all_reduce", 320, None, returned=321, group=groups["c"], site=site, nbytes=8)
        elif rank.rank == 1:
            rank.op("all_reduce", 310, None, returned=311, group=groups["c"], site=site, nbytes=8)
        else:
            rank.op("all_reduce", 310, None, returned=311, group=groups["b"], site=site, nbytes=8)
    finding = found_by("group_order_inversion", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(
    ("follows_the_loop", "kind"),
    [(frozenset({("tell", 32)}), "group-order-inversion"), (frozenset[tuple[str, int]](), "rank-skipped-collective")],
)
def test_a_function_that_is_called_after_a_loop_of_collectives_is_in_another_order_before_it(
    follows_the_loop: frozenset[tuple[str, int]], kind: str
) -> None:
    """`if jumps: tell()`, the gradients of the node, `if not jumps: tell()`: rank 2 tells first in step 4."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        node = rank.group("1", range(3), "node")
        average, tell = rank.site("all_reduce", line=30), rank.site("all_reduce", line=7, function="tell")
        for step in range(1, 4):
            for nth in range(2):
                rank.op("all_reduce", step * 100 + nth, step * 100 + nth + 1, group=node, site=average, step=step)
            rank.op("all_reduce", step * 100 + 20, step * 100 + 29, site=tell, step=step)
        if rank.rank == 2:
            rank.op("all_reduce", 400, site=tell, step=4)
        else:
            rank.op("all_reduce", 400, group=node, site=average, step=4)
    file, around = "/home/me/train.py", ((25, 35),)
    lines = [(("main", 30), ("top", 90))] * 2 + [(("tell", 7), ("main", 28), ("top", 90))]
    stacks = {
        rank: Stack(state="sleeping", cpu_share=0.0, frames=tuple(Site(file=file, line=n, function=f) for f, n in own))
        for rank, own in enumerate(lines)
    }
    nothing = frozenset[tuple[str, int]]()
    places = {
        7: SourcePlace(in_loop=False, following=nothing),
        28: SourcePlace(
            in_loop=True, following=follows_the_loop | {("all_reduce", 30)}, loops=around, branches=((28, 28),)
        ),
        29: SourcePlace(in_loop=True, following=follows_the_loop, loops=around),
        30: SourcePlace(in_loop=True, following=nothing, loops=((29, 30), *around)),
        90: SourcePlace(in_loop=False, following=nothing),
    }
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,))
