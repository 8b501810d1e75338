"""Members of groups: equal sets are one object, here and in other processes."""

import pickle

from dtprof.records.rank_log.group_members import Members, share, share_range


def test_equal_members_are_one_object() -> None:
    assert share([3, 1, 7]) is share((3, 1, 7))
    assert share_range(2, 3, 4) is share([2, 6, 10])
    assert share([0, 1]) is not share([1, 0])


def test_members_compare_and_hash_like_the_tuple_that_they_are() -> None:
    assert share([3, 1, 7]) == (3, 1, 7)
    assert {(3, 1, 7): "known"}[share([3, 1, 7])] == "known"


def test_members_are_found_again_after_pickling() -> None:
    for ranks in ([3, 1, 7], [4], [], range(0, 10_000, 8)):
        assert pickle.loads(pickle.dumps(share(ranks))) is share(ranks)


def test_many_evenly_spaced_members_make_a_small_pickle() -> None:
    assert len(pickle.dumps(share(range(16_384)))) < 200


def test_place_is_the_rank_in_the_group() -> None:
    members = Members((3, 1, 7))
    assert [members.place_of(rank) for rank in (3, 1, 7, 5)] == [0, 1, 2, -1]
    assert members.lowest == 1
    assert Members(()).lowest == -1
