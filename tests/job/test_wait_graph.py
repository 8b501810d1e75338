"""Who waits for whom, from what each rank has issued alone."""

from collections.abc import Mapping

from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import ChannelEnd, Operation, RankOperations
from dtprof.job.wait_graph import find_cycle, find_waits, is_met

WORLD = GroupId.of("0", range(3))


def operation(op: str, *, seq: int = 0, peer: int = -1, nth: int = -1, group: GroupId = WORLD) -> Operation:
    """Return an operation that a rank has issued and waits for."""
    p2p = op in ("send", "recv")
    return Operation(group=group, op=op, seq=seq, p2p=p2p, peer=peer, done=False, issued_ns=0, observed=True, nth=nth)


def ranks_of(
    *held_up: Operation | None, counts: Mapping[int, dict[tuple[GroupId, bool], int]] | None = None
) -> dict[int, RankOperations]:
    """Return ranks that wait in these operations; None for one that nothing holds up."""
    return {
        rank: RankOperations(
            rank=rank,
            open_operations=(own,) if own is not None else (),
            counts=(counts or {}).get(rank, {}),
            channels={ChannelEnd(own.group, own.peer_rank, 0, own.op == "send"): own.nth + 1}
            if own is not None and own.p2p
            else {},
        )
        for rank, own in enumerate(held_up)
    }


def awaited(ranks: Mapping[int, RankOperations], *, lost: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    return {rank: own[0].awaited for rank, own in find_waits(ranks, ranks, lost=lost).items()}


def test_a_collective_waits_for_members_that_have_not_issued_it_and_for_those_lost() -> None:
    here = operation("all_reduce", seq=4)
    ranks = ranks_of(here, None, counts={0: {(WORLD, False): 5}, 1: {(WORLD, False): 4}})
    assert awaited(ranks) == {0: (1,)}  # of rank 2 nobody knows
    assert awaited(ranks, lost=(2,)) == {0: (1, 2)}


def test_operations_of_a_group_made_before_are_none_of_its_new_instance() -> None:
    again = WORLD._replace(instance=1)
    counts = {0: {(again, False): 1}, 1: {(WORLD, False): 9}, 2: {(again, False): 1}}
    assert awaited(ranks_of(operation("all_reduce", group=again), None, None, counts=counts)) == {0: (1,)}


def test_a_receive_from_any_source_is_held_up_only_while_all_its_senders_are() -> None:
    ring = ranks_of(operation("recv", peer=1, nth=0), operation("recv", peer=0, nth=0), operation("recv", nth=0))
    waits = find_waits(ring, ring, lost=())
    assert waits[2][0].any_of_them
    assert waits[2][0].awaited == (0, 1)
    assert find_cycle(waits) == (0, 1)
    del waits[1]  # goes on, and may send to either
    assert find_cycle(waits) == ()


def test_whether_a_message_is_met_is_not_known_where_an_end_has_lost_its_first_ones() -> None:
    send, receive = operation("send", peer=1, nth=0), operation("recv", peer=0, nth=0)
    both = ranks_of(send, receive)
    assert is_met(both, 0, send) is True
    assert is_met(ranks_of(send, None), 0, send) is False
    cut = RankOperations(rank=1, channels=both[1].channels, complete=False)
    assert is_met({0: both[0], 1: cut}, 0, send) is None
