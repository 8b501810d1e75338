"""Not all ranks call new_group, or not in the same order."""

from dtprof.diagnosis.job_state import JobState
from dtprof.records import events
from tests.diagnosis.judging import build_job, found_by, loss, ranks_in_step


def making(*, without: int | None) -> JobState:
    """Return ranks that are in their second call of new_group, all but one."""
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1100, 1150)
        if rank.rank == without:
            loss(rank, 1200, done=False)
        else:
            rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    return build_job(ranks, exit_status=None)


def one_that_does_not_make_it() -> JobState:
    return making(without=2)


def all_that_make_it() -> JobState:
    return making(without=None)


FAULTY = {"group-creation-mismatch": one_that_does_not_make_it}
SOUND = all_that_make_it


def test_a_group_that_one_rank_does_not_make_is_named_with_the_line_of_the_others() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1100, 1150)
        if rank.rank == 2:
            loss(rank, 1200, done=False)
        else:
            rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    finding = found_by("group_creation_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (2,), (0, 1))
    assert {site.line for site in finding.call_sites.values()} == {70}


def test_lines_at_which_ranks_made_one_group_together_may_differ() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1100, 1150, site=rank.site(line=60 + rank.rank))
        rank.group("1", range(3))
        if rank.rank == 2:
            loss(rank, 1200, done=False)
        else:
            rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    finding = found_by("group_creation_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("group-creation-mismatch", (2,))
    assert {site.line for site in finding.call_sites.values()} == {70}


def test_ranks_that_make_different_groups_at_a_time_differ_in_their_numbers() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        for _ in range(1 + (rank.rank != 2)):
            rank.span(events.NEW_GROUP, 1100, 1150, site=rank.site(line=60))
        rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    finding = found_by("group_creation_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (2,), (0, 1))


def test_a_rank_that_makes_another_group_than_the_others_at_its_place_is_named() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1200, site=rank.site(line=60 if rank.rank == 1 else 70))
    finding = found_by("group_creation_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (1,), (0, 2))
    assert finding.culprit_call_sites[1].line == 60


def in_a_loop_over(orders: dict[int, list[int]], *, local: bool = False) -> JobState:
    """Return ranks that call new_group at one line for other members each time, which a number stands for."""
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        members = orders[rank.rank]
        for i, number in enumerate(members):
            is_open = i == len(members) - 1 and not local
            rank.span(
                events.NEW_GROUP, 1100 + i, None if is_open else 1150 + i, site=rank.site(line=60), microbatch=number
            )
    if local:
        loss(ranks[0], 1200, done=False)
    return build_job(ranks, exit_status=None)


def test_a_rank_that_makes_the_groups_of_a_loop_in_another_order_is_named() -> None:
    finding = found_by("group_creation_mismatch", in_a_loop_over({0: [5], 1: [9], 2: [5, 9]}))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (1,), (0, 2))
    assert finding.evidence[0] == "their call number 1 of new_group is for other members"
    assert finding.advice[0].startswith("Every rank must give new_group the same ranks")


def test_ranks_that_each_made_a_group_of_their_own_members_did_not_hang_there() -> None:
    assert not found_by("group_creation_mismatch", in_a_loop_over({0: [5], 1: [9], 2: [5]}, local=True))
