"""Identities of groups: the same on all ranks that know them, in any process."""

import pickle

from dtprof.job.groups import Channel, GroupId, identify_groups, message_tags
from dtprof.records.schema import FLAG
from dtprof.records.tables import Group
from tests.builders import RankBuilder


def group(name: str, ranks: tuple[int, ...], size: int = 0) -> Group:
    return Group(name=name, description="", size=size or len(ranks), ranks=ranks)


def test_ranks_that_number_a_group_differently_identify_the_same_group() -> None:
    a = identify_groups({0: group("0", (0, 1, 2, 3)), 1: group("tp", (0, 1))})
    b = identify_groups({0: group("0", (0, 1, 2, 3)), 7: group("dp", (1, 3)), 9: group("tp", (0, 1))})
    assert (a[0], a[1]) == (b[0], b[9])


def test_a_group_that_is_created_again_is_a_new_instance() -> None:
    identities = identify_groups({0: group("dp", (0, 1)), 1: group("tp", (0, 1)), 2: group("dp", (0, 1))})
    assert [identities[number].instance for number in (0, 1, 2)] == [0, 0, 1]


def test_instances_are_counted_over_groups_that_are_not_chosen() -> None:
    identities = identify_groups({0: group("dp", (0, 1)), 2: group("dp", (0, 1))}, chosen={2})
    assert identities == {2: GroupId.of("dp", (0, 1), instance=1)}


def test_groups_of_one_name_with_other_members_are_different_groups() -> None:
    assert GroupId.of("tp", (0, 1)) != GroupId.of("tp", (2, 3))


def test_the_size_counts_where_the_members_are_not_known() -> None:
    assert GroupId.of("dp", (), size=8).size == 8
    assert GroupId.of("dp", (4, 5), size=8).size == 2


def test_a_group_that_a_worker_names_shares_the_members_that_this_process_knows() -> None:
    known = GroupId.of("dp", (0, 1, 3))
    hash(known)  # is kept with the members, and is another in every process
    document = pickle.dumps(known)
    assert pickle.loads(document) == known
    assert pickle.loads(document).ranks is known.ranks
    assert b"_hash" not in document


def test_two_ranks_take_part_in_a_message_and_all_members_in_a_collective() -> None:
    tp = GroupId.of("tp", (4, 5, 6, 7))
    assert (Channel(tp).is_p2p, Channel(tp).num_members) == (False, 4)
    message = Channel(tp, sender=2, receiver=0)
    assert (message.is_p2p, message.num_members, message.sending_rank) == (True, 2, 6)


def test_messages_between_devices_of_nccl_have_no_tags() -> None:
    rank = RankBuilder(0, 2)
    for backend, flags in (("nccl", FLAG["device"]), ("nccl", 0), ("gloo", 0)):
        group = rank.group(f"{backend}{flags}", (0, 1), backend=backend)
        rank.op("send", 100, 200, group=group, peer=1, tag=7, flags=flags)
    tables = rank.tables()
    assert message_tags(tables.operations, tables.groups).tolist() == [0, 7, 7]
