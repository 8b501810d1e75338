"""Matching operations across ranks."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtprof.job.api_names import find_apis
from dtprof.job.collective_matching import (
    INSTANCE,
    MAX_OF_STEP,
    OperationInstances,
    RankInstances,
    describe_operations,
    match_operations,
    merge,
)
from dtprof.job.groups import Channel, GroupId
from dtprof.job.rank_batches import batch_ranks
from dtprof.records.tables import Array
from tests.builders import START_NS, RankBuilder


def describe(builder: RankBuilder, *, first_whole_step: int | None = None) -> RankInstances:
    batch = batch_ranks([dataclasses.replace(builder.tables(), first_whole_step=first_whole_step)])
    apis = [find_apis(batch.tables[0], batch.operations.of(0))]
    (described,) = describe_operations(batch, apis, match_operations(batch))
    return described


def match(builders: Sequence[RankBuilder]) -> OperationInstances:
    instances = OperationInstances()
    for builder in builders:
        instances.add(describe(builder))
    return instances


def test_the_last_to_start_is_the_last_to_arrive() -> None:
    ranks = [RankBuilder(i, world_size=3) for i in range(3)]
    for rank, start in zip(ranks, (10, 40, 20), strict=True):
        rank.op("all_reduce", start, 60)
    ((channel, table),) = match(ranks).tables.items()
    assert channel == Channel(GroupId.of("0", (0, 1, 2)))
    row = table[0]
    assert (row["num_seen"], row["last_rank"], row["first_rank"]) == (3, 1, 0)
    assert (row["first_start"] - START_NS, row["last_start"] - START_NS) == (10, 40)
    assert row["min_duration"] == 20


def test_groups_of_one_name_with_other_members_do_not_meet() -> None:
    # torch may give disjoint groups the same name: ranks 0, 1 and ranks 2, 3 each have a group "tp".
    ranks = [RankBuilder(i, world_size=4) for i in range(4)]
    for rank in ranks:
        members = (0, 1) if rank.rank < 2 else (2, 3)
        rank.op("all_reduce", 10, 20, group=rank.group("tp", members))
    assert sorted(channel.group.ranks for channel in match(ranks).tables) == [(0, 1), (2, 3)]


def test_a_group_made_again_under_its_old_name_counts_apart() -> None:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 10, 20)
        rank.op("all_reduce", 30, 40, group=rank.group("0", (0, 1)))
    tables = match(ranks).tables
    assert [channel.group.instance for channel in tables] == [0, 1]
    assert all(len(table) == 1 for table in tables.values())


def test_messages_meet_by_sender_receiver_tag_and_order() -> None:
    # Rank 0 sends tag 1, tag 2, tag 1; rank 1 receives tag 2 first. The second message of tag 1 meets at 30 and 35.
    sender, receiver = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    for start, tag in ((10, 1), (20, 2), (30, 1)):
        sender.op("send", start, start + 1, peer=1, tag=tag)
    for start, tag in ((15, 2), (25, 1), (35, 1)):
        receiver.op("recv", start, start + 1, peer=0, tag=tag)
    ((channel, table),) = match([sender, receiver]).tables.items()
    assert (channel.sender, channel.receiver, channel.num_members) == (0, 1, 2)
    starts = [[int(row["first_start"]) - START_NS, int(row["last_start"]) - START_NS] for row in table]
    assert starts == [[10, 25], [30, 35], [15, 20]]


def test_messages_of_logs_without_their_beginning_meet_by_step_and_order_in_it() -> None:
    # The sender's log begins in the middle of step 3, the receiver's before it: messages of step 3 cannot be matched.
    sender, receiver = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    for step, start in ((3, 20), (4, 30), (4, 40), (5, 50)):
        sender.op("send", start, start + 1, peer=1, step=step)
    for step, start in ((3, 10), (3, 21), (4, 31), (4, 41), (5, 51)):
        receiver.op("recv", start, start + 1, peer=0, step=step)
    instances = OperationInstances()
    for builder, first in ((sender, 4), (receiver, 0)):
        instances.add(describe(builder, first_whole_step=first))
    ((_, table),) = instances.tables.items()
    met = table[table["num_seen"] == 2]
    starts = [[int(row["first_start"]) - START_NS, int(row["last_start"]) - START_NS] for row in met]
    assert starts == [[30, 31], [40, 41], [50, 51]]


def test_messages_of_a_step_beyond_those_that_are_numbered_are_unmatched() -> None:
    rank = RankBuilder(0, world_size=2)
    for i in range(MAX_OF_STEP + 2):
        rank.op("send", i, i + 1, peer=1, step=7)
    rank.op("send", MAX_OF_STEP + 9, MAX_OF_STEP + 10, peer=1, step=8)
    tables = dataclasses.replace(rank.tables(), first_whole_step=7)
    (matched,) = match_operations(batch_ranks([tables]))
    assert matched.unmatched == 2
    (seqs,) = matched.seqs
    assert len(seqs) == MAX_OF_STEP + 1
    assert (np.diff(seqs) > 0).all()


def test_a_receive_from_any_source_is_counted_as_unmatched() -> None:
    rank = RankBuilder(0, world_size=2)
    rank.op("recv", 10, 20, peer=-1)
    (matched,) = match_operations(batch_ranks([rank.tables()]))
    assert matched.unmatched == 1


def test_different_operations_at_one_position_are_marked() -> None:
    a, b = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    a.op("all_reduce", 10, 20)
    b.op("broadcast", 10, 20, peer=0)
    (table,) = match([a, b]).tables.values()
    assert table["mixed_ops"].tolist() == [True]


def test_positions_that_do_not_ascend_with_time_are_put_in_order() -> None:
    rank = RankBuilder(0, world_size=2)
    for seq, begin in ((2, 10), (0, 20), (1, 30)):
        rank.op("all_reduce", begin, begin + 5, seq=seq)
    (matched,) = match_operations(batch_ranks([rank.tables()]))
    assert [rows.tolist() for rows in matched.rows] == [[1, 2, 0]]
    assert [seqs.tolist() for seqs in matched.seqs] == [[0, 1, 2]]


def test_more_operations_than_are_combined_at_once_meet_each_its_own() -> None:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for number in range(3000):  # the first one comes 3 ns before the second at even positions, after it at odd ones
        for rank, begin in zip(ranks, (number * 100, number * 100 + 3 - number % 2 * 6), strict=True):
            rank.op("all_reduce", begin + 10, begin + 50)
    (table,) = match(ranks).tables.values()
    assert table["seq"].tolist() == list(range(3000))
    assert table["last_rank"].tolist() == [1, 0] * 1500
    assert (table["num_seen"] == 2).all()


def test_hosts_that_do_not_share_a_clock_are_marked() -> None:
    a, b = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2, boot_id="boot-b")
    for rank in (a, b):
        rank.op("all_reduce", 10, 20)
    (table,) = match([a, b]).tables.values()
    assert table["mixed_hosts"].tolist() == [True]


@st.composite
def instance_tables(draw: st.DrawFn) -> list[Array]:
    """Draw the rows of several ranks in one channel, each with its own positions."""
    tables = []
    for rank in range(draw(st.integers(2, 4))):
        seqs = sorted(draw(st.sets(st.integers(0, 5), max_size=5)))
        rows = np.zeros(len(seqs), INSTANCE)
        rows["seq"], rows["num_seen"] = seqs, 1
        starts = [draw(st.integers(0, 5)) for _ in seqs]
        rows["first_start"] = rows["last_start"] = starts
        rows["last_rank"] = rows["first_rank"] = rank
        rows["root_start"], rows["root_rank"] = -1, -1
        rows["min_duration"] = [draw(st.integers(0, 9)) for _ in seqs]
        for column in ("op", "api", "host"):
            rows[column] = [draw(st.integers(0, 1)) for _ in seqs]
        tables.append(rows)
    return tables


@given(instance_tables())
def test_ranks_may_be_merged_in_any_order(tables: list[Array]) -> None:
    forwards, backwards = tables[0], tables[-1]
    for table in tables[1:]:
        forwards = merge(forwards, table)
    for table in tables[-2::-1]:
        backwards = merge(backwards, table)
    # `host` only names some host where they are mixed.
    for column in set(INSTANCE.names or ()) - {"host"}:
        assert forwards[column].tolist() == backwards[column].tolist()
    seqs = np.concatenate([table["seq"] for table in tables])
    assert forwards["seq"].tolist() == sorted(set(seqs.tolist()))
    assert forwards["num_seen"].sum() == len(seqs)
