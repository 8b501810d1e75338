"""Which rank deviates is asked of all ranks whose groups serve one purpose."""

import pytest

from dtprof.diagnosis.sibling_groups import are_siblings
from dtprof.diagnosis.verdict import decide
from dtprof.job.groups import GroupId
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, judge, pair

ROW, COLUMN, ALL = "row", "column", "all"
LINES = {ROW: 30, COLUMN: 31, ALL: 32}


def on_a_mesh(names: dict[int, list[str]], *, line: int = 0) -> list[RankBuilder]:
    """Return four ranks in a mesh of two rows that reduce over what each names, at one line or at a line of its own."""
    ranks = pair(4)
    for rank in ranks:
        members = {ROW: (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1), COLUMN: (rank.rank % 2, rank.rank % 2 + 2)}
        groups = {name: rank.group(f"{name}{own[0]}", own) for name, own in members.items()} | {ALL: 0}
        for nth, name in enumerate(names.get(rank.rank, names[0])):
            site = rank.site("all_reduce", line=line or LINES[name])
            rank.op("all_reduce", 100 * nth, 100 * nth + 9, group=groups[name], site=site, nbytes=8)
    return ranks


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        ((0, 1), (2, 3), True),
        ((0, 1), (0, 1), True),
        ((0, 2), (0, 1), False),  # of one line, but rank 0 is in both
        ((0, 1), (0, 1, 2, 3), False),
    ],
)
def test_siblings_have_no_member_in_common_and_one_line(a: tuple[int, ...], b: tuple[int, ...], answer: bool) -> None:
    job = build_job(on_a_mesh({0: [ROW, COLUMN, ALL]}, line=30), exit_status=0)
    known = {group.ranks: group for rank in job.ranks.values() for group in rank.collectives.groups}
    assert are_siblings(job, known[a], known[b]) is answer
    assert not are_siblings(job, known[a], GroupId.of("unused", (7, 8)))


def test_groups_of_other_lines_are_no_siblings() -> None:
    ranks = on_a_mesh({0: [ROW], 2: [], 3: []}, line=30)
    for rank in ranks[2:]:
        group = rank.group("later", (2, 3))
        rank.op("all_reduce", 0, 9, group=group, site=rank.site("all_reduce", line=50), nbytes=8)
    job = build_job(ranks, exit_status=0)
    first, later = (next(g for g in job.ranks[rank].collectives.groups if g.size == 2) for rank in (0, 2))
    assert not are_siblings(job, first, later)


@pytest.mark.parametrize(("odd", "culprits"), [(2, (2,)), (None, None)])
def test_of_two_in_opposite_orders_the_one_unlike_the_ranks_of_the_other_row_is_to_blame(
    odd: int | None, culprits: tuple[int, ...] | None
) -> None:
    orders = {0: [ROW, ALL] * 3} | ({odd: [ALL, ROW] * 3} if odd is not None else {})
    findings = judge(on_a_mesh(orders), exit_status=0, stalled=False).findings
    assert [(f.kind, f.culprit_ranks) for f in findings] == ([("group-order-risk", culprits)] if culprits else [])


def test_of_a_cycle_the_one_unlike_the_ranks_of_the_other_row_is_to_blame() -> None:
    """Ranks 0 and 1 have ended the call on their row, and wait in that of all, as rank 2 does without the row."""
    ranks = pair(4)
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        of_row, of_all = rank.site("all_reduce", line=30), rank.site("all_reduce", line=32)
        if rank.rank != 2:
            rank.op("all_reduce", 100, 109 if rank.rank < 2 else None, group=row, site=of_row, nbytes=8)
        if rank.rank != 3:
            rank.op("all_reduce", 200, site=of_all, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("group-order-inversion", (2,))


@pytest.mark.parametrize("swapped", [True, False])
def test_a_rank_with_another_group_than_all_others_in_the_first_step_took_the_wrong_one(
    swapped: bool,
) -> None:
    """At one line all sum over columns, then rows, then all; in place of the row rank 3 takes all, or its column."""
    ranks = pair(4)
    for rank in ranks:
        members = {ROW: (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1), COLUMN: (rank.rank % 2, rank.rank % 2 + 2)}
        groups = {name: rank.group(f"{name}{own[0]}", own) for name, own in members.items()} | {ALL: 0}
        site = rank.site("all_reduce", line=30)
        made = {2: [COLUMN, ROW], 3: [COLUMN, ALL if swapped else COLUMN]}.get(rank.rank, [COLUMN, ROW, ALL])
        for nth, name in enumerate(made):
            is_open = nth == len(made) - 1
            t = 100 * nth
            rank.op("all_reduce", t, None if is_open else t + 9, group=groups[name], site=site, nbytes=8, step=0)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    kind = "group-order-inversion" if swapped else "wrong-group"
    assert (finding.kind, finding.culprit_ranks) == (kind, (3,))


def test_where_nobody_went_on_from_the_first_calls_of_a_line_they_may_be_in_another_order() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = [rank.group(name, (0, 1, 2)) for name in (ROW, COLUMN)]
        rank.op("all_reduce", 0, group=groups[rank.rank == 1], site=rank.site("all_reduce", line=30), nbytes=8, step=0)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("group-order-inversion", (1,))
