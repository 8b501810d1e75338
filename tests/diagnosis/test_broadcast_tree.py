"""gloo's way through a broadcast, and who went another way: worked by hand on the trees of 4 and 5 ranks."""

import pytest

from dtprof.diagnosis.broadcast_tree import find_deviations, tree


def test_members_send_to_those_a_power_of_two_above() -> None:
    assert [tree(rank, 0, 5) for rank in range(5)] == [(None, [1, 2, 4]), (0, [3]), (0, []), (1, []), (0, [])]
    assert [tree(rank, 3, 4) for rank in range(4)] == [(3, [2]), (3, []), (0, []), (None, [0, 1])]


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ({0: "send", 3: "recv"}, {("skipped", 1)}),  # 1 would have passed it on to 3
        ({0: "send", 2: "recv"}, {("root", 2)}),
        ({0: "send"}, {("skipped", 2), ("more", 0)}),
        ({1: "send"}, {("skipped", 3)}),
        ({1: "recv", 2: "recv", 3: "recv"}, {("skipped", 0)}),
        ({1: "recv"}, {("more", 1)}),
        ({1: "send", 2: "send"}, set()),
    ],
)
def test_one_rank_that_deviates_explains_who_waits(waiting: dict[int, str], expected: set[tuple[str, int]]) -> None:
    assert {(deviation.how, deviation.rank) for deviation in find_deviations(waiting, 4, [0])} == expected


def test_groups_that_take_too_long_to_search_are_not_searched() -> None:
    assert find_deviations({0: "send"}, 4, range(4))
    assert find_deviations({0: "send"}, 64, [0]) == set()
