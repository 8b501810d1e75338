"""Both ends of a message wait, with different tags."""

import pytest

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import build_job, found_by, message, pair


def tags(sent: int, received: int) -> JobState:
    ranks = pair()
    message(ranks[0], "send", 1, 300, line=4, tag=sent)
    message(ranks[1], "recv", 0, 300, line=5, tag=received)
    return build_job(ranks, exit_status=None)


def tags_that_differ() -> JobState:
    return tags(8, 7)


def tags_that_agree() -> JobState:
    return tags(7, 7)


FAULTY = {"p2p-tag-mismatch": tags_that_differ}
SOUND = tags_that_agree


def test_other_tags_at_both_ends_are_named_with_the_end_that_never_used_its_tag_before() -> None:
    ranks = pair()
    for step in range(3):
        message(ranks[0], "send", 1, step * 100, step * 100 + 9, line=4, tag=7)
        message(ranks[1], "recv", 0, step * 100, step * 100 + 9, line=5, tag=7)
    message(ranks[0], "send", 1, 300, line=4, tag=8)
    message(ranks[1], "recv", 0, 300, line=5, tag=7)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-tag-mismatch", (0,), (1,))


def test_of_two_ends_with_tags_not_used_before_the_one_that_breaks_its_row_is_named() -> None:
    ranks = pair()
    for step in range(3):
        message(ranks[0], "send", 1, step * 100, step * 100 + 9, line=4, tag=step)
        message(ranks[1], "recv", 0, step * 100, step * 100 + 9, line=5, tag=step)
    message(ranks[0], "send", 1, 300, line=4, tag=3)
    message(ranks[1], "recv", 0, 300, line=5, tag=4)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-tag-mismatch", (1,), (0,))


def test_a_rank_that_restarts_its_count_of_tags_is_named_though_it_used_the_tag_before() -> None:
    ranks = pair()
    for step in range(4):
        message(ranks[0], "send", 1, step * 100, step * 100 + 9, line=4, tag=step)
        message(ranks[1], "recv", 0, step * 100, step * 100 + 9, line=5, tag=step)
    message(ranks[0], "send", 1, 400, line=4, tag=0)
    message(ranks[1], "recv", 0, 400, line=5, tag=4)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-tag-mismatch", (0,), (1,))


@pytest.mark.parametrize(("agree", "culprit"), [(True, 2), (False, 1)])
def test_a_rank_that_restarts_its_count_with_a_peer_is_right_where_they_meet(agree: bool, culprit: int) -> None:
    """Rank 1 passes on to rank 2 what it gets of rank 0, with the tag of that message."""
    ranks = pair(3)
    for tag in range(4):
        for sender, receiver, t in ((0, 1, 100 * tag), (1, 2, 100 * tag + 50)):
            message(ranks[sender], "send", receiver, t, t + 9, line=4, tag=tag)
            message(ranks[receiver], "recv", sender, t, t + 9, line=5, tag=tag)
    tag = 0 if agree else 4
    message(ranks[0], "send", 1, 400, 409, line=4, tag=tag)
    message(ranks[1], "recv", 0, 400, 409, line=5, tag=tag)
    message(ranks[1], "send", 2, 450, line=4, tag=0)
    message(ranks[2], "recv", 1, 450, line=5, tag=4)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert finding.culprit_ranks == (culprit,)


def test_where_tags_come_in_rounds_the_end_that_leaves_their_order_is_named() -> None:
    ranks = pair()
    for number, tag in enumerate((0, 1, 2) * 3):
        t = 100 * number
        message(ranks[0], "send", 1, t, t + 9, line=4, tag=tag)
        message(ranks[1], "recv", 0, t, t + 9, line=5, tag=tag)
    message(ranks[0], "send", 1, 1000, line=4, tag=2)
    message(ranks[1], "recv", 0, 1000, line=5, tag=0)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-tag-mismatch", (0,))


@pytest.mark.parametrize(
    ("tags", "culprits"),
    [
        ((0, 1, 2), (2,)),
        ((0, 1), (0, 2)),  # the tag is new with both
        ((2, 5, 6), (0, 2)),  # each worker has tags of its own
    ],
)
def test_a_worker_that_passes_over_a_tag_is_named_where_the_server_met_another_one_with_it(
    tags: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    ranks = pair(3)
    for step, tag in enumerate(tags):
        t = 100 * step
        message(ranks[1], "send", 0, t, t + 9, line=4, tag=tag)
        message(ranks[0], "recv", 1, t, t + 9, line=5, tag=tag)
        if step < 2:
            message(ranks[2], "send", 0, t + 10, t + 19, line=4, tag=step)
            message(ranks[0], "recv", 2, t + 10, t + 19, line=5, tag=step)
    message(ranks[2], "send", 0, 300, line=4, tag=3)
    message(ranks[0], "recv", 2, 300, line=5, tag=2)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-tag-mismatch", culprits)


@pytest.mark.parametrize(("first", "culprits"), [(5, (2,)), (4, (1,)), (6, (1, 2))])
def test_in_a_ring_that_counts_its_rounds_the_rank_with_a_tag_of_its_own_is_named(
    first: int, culprits: tuple[int, ...]
) -> None:
    """Ranks 1 and 2 are at tags 5 and 4 from their first round on; rank 0 at the tag of one of them, or at neither."""
    ranks = pair(3)
    for rank, tag in enumerate((first, 5, 4)):
        message(ranks[rank], "send", (rank + 1) % 3, 100, line=4, tag=tag)
        message(ranks[rank], "recv", (rank - 1) % 3, 110, line=5, tag=tag)
    found = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))
    finding = next(one for one in found if {*one.culprit_ranks} <= {1, 2})
    assert finding.culprit_ranks == culprits


@pytest.mark.parametrize(("first", "culprits"), [(0, (2,)), (3, (0, 2))])
def test_a_worker_whose_first_message_has_another_tag_than_that_of_another_is_named(
    first: int, culprits: tuple[int, ...]
) -> None:
    """Rank 0 receives a loss of each worker with the number of the epoch as tag; rank 2 resumed in the next epoch."""
    ranks = pair(3)
    message(ranks[1], "send", 0, 10, 19, line=4, tag=first)
    message(ranks[0], "recv", 1, 10, 19, line=5, tag=first)
    message(ranks[2], "send", 0, 20, line=4, tag=1)
    message(ranks[0], "recv", 2, 20, line=5, tag=0)
    finding = found_by("p2p_tag_mismatch", build_job(ranks, exit_status=None))[0]
    assert finding.culprit_ranks == culprits
