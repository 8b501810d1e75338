"""A rank made the call of its peers on the handle of another group."""

from dataclasses import replace

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records import events
from dtprof.records.member_checksums import checksum_of
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, judge, pair


def in_rows_and_columns(*, wrong_rank: int | None) -> list[RankBuilder]:
    """Return ranks in a grid of two rows; the wrong rank makes the third call of its row on its column.

    There it meets the next call of its column, of another size, and fails.
    """
    ranks = pair(4)
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        column = rank.group(f"column{rank.rank % 2}", (rank.rank % 2, rank.rank % 2 + 2))
        first, second = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for t in (0, 100):
            rank.op("all_reduce", t, t + 9, group=row, site=first, nbytes=64)
            rank.op("all_reduce", t + 20, t + 29, group=column, site=second, nbytes=16)
        if rank.rank == wrong_rank:
            rank.op("all_reduce", 200, 290, group=column, site=first, nbytes=64, state="failed")
        elif wrong_rank is not None and rank.rank == 3:
            rank.op("all_reduce", 200, group=row, site=first, nbytes=64)
        else:
            rank.op("all_reduce", 200, 209, group=row, site=first, nbytes=64)
            rank.op("all_reduce", 220, group=column, site=second, nbytes=16)
    return ranks


def one_on_its_column() -> JobState:
    return build_job(in_rows_and_columns(wrong_rank=2), exit_status=None)


def all_on_their_rows() -> JobState:
    return build_job(in_rows_and_columns(wrong_rank=None), exit_status=None)


FAULTY = {"wrong-group": one_on_its_column}
SOUND = all_on_their_rows


def test_a_wrong_group_that_a_peer_matched_is_found_from_the_ranks_that_wait_at_the_line() -> None:
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", rows[rank.rank // 2])
        column = rank.group(f"column{rank.rank % 2}", columns[rank.rank % 2])
        first, second = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, group=row, site=first)
            rank.op("all_reduce", t + 20, t + 29, group=column, site=second)
        rank.op("all_reduce", 300, 309, group=row, site=first)
        if rank.rank == 3:  # on its row instead of its column: that meets the next call of rank 2
            rank.op("all_reduce", 320, 409, group=row, site=second)
            rank.op("all_reduce", 420, group=row, site=first)
        elif rank.rank == 1:
            rank.op("all_reduce", 320, group=column, site=second)
        else:
            rank.op("all_reduce", 320, 329, group=column, site=second)
            rank.op("all_reduce", 400, 409 if rank.rank == 2 else None, group=row, site=first)
    rank = ranks[2]
    rank.op("all_reduce", 420, group=2, site=rank.site("all_reduce", line=31))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("wrong-group", (3,), "all_reduce")
    assert finding.culprit_call_sites[3].line == 31
    assert finding.group is not None
    assert finding.group.name == "column1"


@pytest.mark.parametrize("next_step", [False, True])
def test_a_group_that_the_line_of_the_next_step_takes_is_a_wrong_group(next_step: bool) -> None:
    """In its own step the next line may have been swapped with it: an order of groups, then."""
    ranks = pair(3)
    for rank in ranks:
        two = rank.group("two", (0, 1)) if rank.rank < 2 else 0
        first, second = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for i in range(3):
            rank.op("all_reduce", 100 * i, 100 * i + 9, group=two, site=first, step=i)
            rank.op("all_reduce", 100 * i + 20, 100 * i + 29, site=second, step=i)
            if next_step:
                rank.span(events.OPTIMIZER, 100 * i + 30, 100 * i + 31, step=i)
        if rank.rank == 0 and next_step:
            rank.op("all_reduce", 300, 309, group=two, site=first, step=3)
            rank.op("all_reduce", 320, group=two, site=second, step=3)
        elif next_step:
            rank.op("all_reduce", 300, 309, group=two, site=first, step=3)
            rank.op("all_reduce", 320, site=second, step=3)
        else:
            rank.op("all_reduce", 300, group=0 if rank.rank == 0 else two, site=first, step=3)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("wrong-group" if next_step else "group-order-inversion", (0,))


def test_a_call_on_another_group_is_found_where_it_met_a_call_of_another_size_there() -> None:
    finding = found_by("wrong_group", one_on_its_column())[0]
    assert (finding.kind, finding.culprit_ranks) == ("wrong-group", (2,))
    assert finding.culprit_call_sites[2].line == 30
    assert any("sizes" in fact for fact in finding.evidence)


def test_a_call_on_the_world_that_the_others_have_left_is_a_wrong_group() -> None:
    ranks = [RankBuilder(rank, 4, closed=rank < 2) for rank in range(4)]
    for rank in ranks:
        pairs = [rank.group("1", (0, 1)), rank.group("2", (2, 3))]
        for t in (0, 100, 200):
            is_odd = t == 200 and rank.rank == 2
            done = None if t == 200 and rank.rank > 1 else t + 9
            group = 0 if is_odd else pairs[rank.rank // 2]
            rank.op("all_reduce", t, done, group=group, site=rank.site("all_reduce", line=10), nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("wrong-group", (2,))


def test_a_call_on_a_group_of_others_that_torch_leaves_out_explains_why_its_peers_wait() -> None:
    ranks = pair(3)
    for rank in ranks:
        line = rank.site("all_reduce", line=30)
        for t in (0, 100):
            rank.op("all_reduce", t, t + 9, site=line, nbytes=64)
        if rank.rank == 2:
            rank.span("outside_group", 200, 201, site=line)
        else:
            rank.op("all_reduce", 200, None, returned=201, site=line, nbytes=64)
    job = build_job(ranks, exit_status=1, statuses={2: (0, 300)})
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("wrong-group", (2,), (0, 1))
    assert finding.culprit_call_sites[2].line == 30


def test_a_call_on_the_group_of_the_epoch_before_is_on_the_wrong_group() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=30)
        groups = [rank.group(str(epoch + 1), range(3)) for epoch in range(3)]
        for epoch in range(3):
            rank.span(events.NEW_GROUP, 1000 * epoch, 1000 * epoch + 9, site=rank.site("new_group", line=20))
        for epoch in range(2):
            for t in (100, 200):
                rank.op("all_reduce", 1000 * epoch + t, 1000 * epoch + t + 9, group=groups[epoch], site=site, nbytes=8)
        rank.op("all_reduce", 2100, group=groups[1 if rank.rank == 2 else 2], site=site, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("wrong-group", (2,), (0, 1))


@pytest.mark.parametrize(("made", "severity", "culprits"), [((2, 3), "warning", (2, 3)), ((0, 1), "info", (2, 3))])
def test_calls_on_the_group_of_others_are_a_warning_where_the_right_one_was_never_used(
    made: tuple[int, ...], severity: str, culprits: tuple[int, ...]
) -> None:
    ranks = [RankBuilder(rank, 4) for rank in range(4)]
    for rank in ranks:
        line = rank.site("all_reduce", line=30)
        if rank.rank > 1:
            rank.span("outside_group", 200, 201, site=line)
        else:
            rank.op("all_reduce", 200, 209, group=rank.group("1", [0, 1]), site=line, nbytes=64)
    job = build_job(ranks, exit_status=0, stalled=False)
    states = {rank: replace(state, group_members=(checksum_of(made),)) for rank, state in job.ranks.items()}
    (finding,) = found_by("wrong_group", replace(job, ranks=states))
    assert (finding.kind, finding.severity, finding.culprit_ranks) == ("wrong-group", severity, culprits)
    assert finding.culprit_call_sites[2].line == 30


@pytest.mark.parametrize(
    ("alone", "in_loop", "kind"),
    [
        (True, False, "wrong-group"),
        (False, False, "other"),
        (True, True, "wrong-group"),  # the others have left the loop after the call on the team
    ],
)
def test_the_only_rank_with_a_group_of_another_size_took_the_wrong_one(alone: bool, in_loop: bool, kind: str) -> None:
    """As a wrapper that is given the team on all ranks but one. Two of four may as well be those that are right."""
    ranks = pair(4)
    for rank in ranks:
        team = rank.group(f"team{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        site, after = rank.site("all_gather", line=30), rank.site("barrier", line=40)
        if rank.rank == 3 or (rank.rank == 2 and not alone):
            rank.op("all_gather", 100, site=site)
        else:
            rank.op("all_gather", 100, None if rank.rank == 2 else 150, group=team, site=site)
        if rank.rank < 2:
            rank.op("barrier", 200, site=after, nbytes=4)

    def place(_: str, __: int) -> SourcePlace:
        return SourcePlace(in_loop=in_loop, following=frozenset())

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind == "wrong-group") == (kind == "wrong-group")
    assert finding.culprit_ranks == (3,) or kind != "wrong-group"


@pytest.mark.parametrize(("in_loop", "is_found"), [(False, True), (True, False)])
def test_of_two_that_wait_at_one_line_the_group_that_nobody_else_took_is_wrong(
    *, in_loop: bool, is_found: bool
) -> None:
    ranks = pair(4)
    for rank in ranks:
        half = rank.group(f"half{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        crossed = rank.group(f"crossed{rank.rank % 2}", (rank.rank % 2, rank.rank % 2 + 2))
        rank.op("all_reduce", 0, 9, group=crossed, site=rank.site("all_reduce", line=20))
        ends = 109 if rank.rank < 2 else None
        rank.op(
            "all_reduce", 100, ends, group=crossed if rank.rank == 3 else half, site=rank.site("all_reduce", line=30)
        )
        rank.closed = rank.rank < 2
    place = SourcePlace(in_loop=in_loop, following=frozenset())
    findings = decide(build_job(ranks, exit_status=None, find_place=lambda *_: place)).findings
    assert (findings[0].kind == "wrong-group", findings[0].culprit_ranks == (3,)) == (is_found, is_found)


@pytest.mark.parametrize(("first", "kind"), [("all", "group-order-inversion"), ("pair", "wrong-group")])
def test_a_group_that_the_line_takes_later_in_each_round_was_entered_too_early(first: str, kind: str) -> None:
    ranks = pair(4)
    for rank in ranks:
        names = {"row": (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1), "column": (rank.rank % 2, rank.rank % 2 + 2)}
        groups = {name: rank.group(f"{name}{members[0]}", members) for name, members in names.items()}
        groups |= {"all": rank.group("all", (0, 1, 2, 3)), "pair": rank.group("pair", (0, 1, 3))}
        site = rank.site("all_reduce", line=30)
        if rank.rank != 2:
            rank.op("all_reduce", 0, 9, group=groups["pair"], site=rank.site("all_reduce", line=20), nbytes=8)
        for t in (100, 200, 300):
            for number, name in enumerate(("row", "column", "all")):
                rank.op("all_reduce", t + 20 * number, t + 20 * number + 9, group=groups[name], site=site, nbytes=8)
        if rank.rank < 2:
            rank.op("all_reduce", 400, group=groups[first if rank.rank == 1 else "row"], site=site, nbytes=8)
        else:
            rank.op("all_reduce", 400, 409, group=groups["row"], site=site, nbytes=8)
            rank.op("all_reduce", 420, group=groups["column"], site=site, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(("line", "kind"), [(20, "wrong-group"), (40, "group-order-inversion")])
def test_a_group_of_the_next_round_is_no_group_of_the_next_call(line: int, kind: str) -> None:
    """Without steps the source tells rounds: a line further up is of the next one."""
    ranks = pair(4)
    for rank in ranks:
        team = rank.group(f"team{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        of_team, of_all = rank.site("all_reduce", line=line), rank.site("all_reduce", line=30)
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, group=team, site=of_team, nbytes=64)
            rank.op("all_reduce", t + 20, t + 29, site=of_all, nbytes=8)
        if line < 30:
            rank.op("all_reduce", 300, 309, group=team, site=of_team, nbytes=64)
        rank.op("all_reduce", 320, group=team if rank.rank == 1 else 0, site=of_all, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(("size", "kind"), [(8, "wrong-group"), (64, "size-mismatch")])
def test_a_call_as_large_as_the_awaited_one_where_its_group_begins_with_another_size_is_on_the_wrong_group(
    size: int, kind: str
) -> None:
    """With the size with which calls of the group begin, it may as well be the next call, made too early."""
    ranks = pair(4)
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        column = rank.group(f"column{rank.rank % 2}", (rank.rank % 2, rank.rank % 2 + 2))
        line = rank.site("all_reduce", line=30)
        for t in (0, 100, 200):
            for nth, (group, nbytes) in enumerate(((row, 8), (row, 8), (column, 64), (column, 8))):
                rank.op("all_reduce", t + 10 * nth, t + 10 * nth + 5, group=group, site=line, nbytes=nbytes)
        if rank.rank == 3:
            rank.op("all_reduce", 300, group=column, site=line, nbytes=size)
        elif rank.rank == 2:
            rank.op("all_reduce", 300, group=row, site=line, nbytes=8)
        else:
            for nth in range(2):
                rank.op("all_reduce", 300 + 10 * nth, 305 + 10 * nth, group=row, site=line, nbytes=8)
            rank.op("all_reduce", 320, group=column, site=line, nbytes=64 if size == 8 else 16)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks if kind == "wrong-group" else ()) == (
        kind,
        (3,) * (kind == "wrong-group"),
    )
