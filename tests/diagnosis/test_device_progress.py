"""Operations on devices are issued, started and completed; a hang there gets the verdict that it gets on gloo."""

import pytest

from dtprof.diagnosis.job_state import Stack
from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.records import events, schema
from tests.builders import RankBuilder
from tests.diagnosis.judging import judge

FOLLOWED = schema.FLAG["device"] | schema.FLAG["followed"]
ON_STREAM = FOLLOWED | schema.FLAG["no_work"]


def issue(
    rank: RankBuilder, seq: int, *, line: int = 10, group: int = 0, ran: tuple[int, int | None] | None = None
) -> None:
    """Issue an all_reduce on the device at 1000 times its position; `ran` says when the device began and ended it."""
    site, t = rank.site("all_reduce", line=line), 1000 * seq + 100 * group
    rank.op("all_reduce", t, returned=t + 5, site=site, nbytes=64, flags=ON_STREAM, seq=seq, group=group)
    if ran is not None:
        rank.device_interval("operation", "all_reduce", *ran, host=(t, 0), seq=seq, group=group)


def post(rank: RankBuilder, name: str, peer: int, t: int, *, line: int, tag: int = 0, begun: int | None = None) -> None:
    """Post a message on the device; `begun` says when the device came to it, where it did."""
    rank.op(
        name,
        t,
        returned=t + 5,
        site=rank.site(name, line=line),
        nbytes=64,
        peer=peer,
        tag=tag,
        flags=ON_STREAM,
    )
    if begun is not None:
        seq = sum(operation["peer"] >= 0 for operation in rank.tables().operations) - 1
        rank.device_interval("operation", name, begun, None, host=(t, 0), seq=seq, flags=schema.DEVICE_FLAG["p2p"])


def ranks_in_step(world_size: int, num_operations: int) -> list[RankBuilder]:
    """Return ranks whose devices ran so many operations."""
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]
    for rank in ranks:
        for seq in range(num_operations):
            issue(rank, seq, ran=(1000 * seq + 100, 1000 * seq + 200))
    return ranks


def test_operations_are_issued_then_started_then_completed() -> None:
    rank = RankBuilder(0, 2)
    issue(rank, 0, ran=(100, 200))
    issue(rank, 1, ran=(1100, None))
    issue(rank, 2)
    done, running, issued = rank_state(rank.tables(), exit=None, stack=None, alive=None).operations
    assert (done.done, done.open, done.started) == (True, False, False)
    assert (running.done, running.open, running.started) == (False, True, True)
    assert (issued.done, issued.open, issued.started) == (False, True, False)


def test_an_operation_whose_device_is_not_followed_is_not_called_open() -> None:
    rank = RankBuilder(0, 2)
    rank.op("all_reduce", 0, returned=5, flags=schema.FLAG["device"])
    (operation,) = rank_state(rank.tables(), exit=None, stack=None, alive=None).operations
    assert (operation.open, operation.started) == (False, None)


def test_an_operation_that_was_given_up_is_neither_open_nor_failed() -> None:
    # The program dropped its handle, or the device broke: the flag is taken back, and the interval has failed.
    rank = RankBuilder(0, 2)
    issue(rank, 0, ran=(100, 200))
    tables = rank.tables()
    tables.operations["flags"], tables.device_intervals["state"] = schema.FLAG["device"], schema.STATE["failed"]
    (given_up,) = rank_state(tables, exit=None, stack=None, alive=None).operations
    assert (given_up.open, given_up.failed, given_up.started) == (False, False, None)


def test_rank_that_stays_away_from_an_operation_is_named_though_the_others_left_the_call() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks[:2]:
        issue(rank, 4, line=20, ran=(4100, None))
    asleep = Stack(state="sleeping", cpu_share=0.0, frames=())
    verdict = judge(ranks, exit_status=None, stacks=dict.fromkeys(range(3), asleep))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-stuck", (2,))
    assert (finding.waiting_ranks, finding.call_sites[0].line) == ((0, 1), 20)


def test_rank_that_skips_an_operation_of_its_device_is_named_with_the_line() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks[:2]:
        issue(rank, 4, line=20, ran=(4100, None))
        issue(rank, 5, line=10)
    issue(ranks[2], 4, line=10, ran=(5100, None))  # it has gone on to the next step
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-skipped-collective")
    assert verdict.findings[0].culprit_ranks == (2,)


def test_rank_whose_stream_is_held_up_is_named_when_the_others_devices_have_begun() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        issue(rank, 4, line=20, ran=None if rank.rank == 1 else (4100, None))
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[1].line) == ("rank-stuck", (1,), 20)
    assert "its device never began" in finding.summary


def test_operation_that_all_devices_began_and_none_ends_is_a_stall_of_the_back_end() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        issue(rank, 4, line=20, ran=(4100, None))
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("backend-stall", (), (0, 1, 2))


def test_devices_that_completed_everything_leave_nothing_open() -> None:
    ranks = ranks_in_step(3, 4)
    states = [rank_state(rank.tables(), exit=None, stack=None, alive=None) for rank in ranks]
    assert [state.open_operations for state in states] == [(), (), ()]
    assert states[0].last_ns - states[0].operations[0].issued_ns == 3200  # the last end on the device


def test_groups_that_all_hosts_issued_in_opposite_orders_are_a_cycle_of_what_devices_began() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        a, b = rank.group("a", range(3), "a"), rank.group("b", range(3), "b")
        first, second = (b, a) if rank.rank == 1 else (a, b)
        issue(rank, 0, line=30, group=first, ran=(4100, None))
        issue(rank, 0, line=40, group=second)
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-order-inversion", (1,), (0, 2))
    assert finding.culprit_call_sites[1].line == 30


def test_messages_that_all_hosts_posted_are_a_cycle_where_no_device_came_to_a_send() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        post(rank, "recv", (rank.rank - 1) % 3, 100, line=10, begun=150)
        post(rank, "send", (rank.rank + 1) % 3, 200, line=11)
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-deadlock-cycle", (0, 1, 2))
    assert "receives before it sends" in finding.summary


def test_a_message_that_is_posted_and_held_back_is_not_called_missing() -> None:
    # Rank 1 stands in an all_reduce that rank 2 stays away from; its receive comes after that.
    ranks = ranks_in_step(3, 2)
    post(ranks[0], "send", 1, 3000, line=30, begun=3100)
    issue(ranks[1], 2, line=20, ran=(2100, None))
    post(ranks[1], "recv", 0, 3000, line=31)
    asleep = Stack(state="sleeping", cpu_share=0.0, frames=())
    finding = judge(ranks, exit_status=None, stacks=dict.fromkeys(range(3), asleep)).findings[0]
    assert finding.kind == "rank-stuck"
    assert 2 in finding.culprit_ranks
    assert 1 not in finding.culprit_ranks


def test_who_waits_for_a_message_of_a_batch_waits_for_all_messages_of_it() -> None:
    # A batch is one work of the backend, and one of its messages stands for the wait.
    # The batch after it is another one.
    several = schema.DEVICE_FLAG["p2p"] | schema.DEVICE_FLAG["several"]
    rank = RankBuilder(0, 3)
    for seq, (name, waits) in enumerate(
        (("send", None), ("recv", (150, 200)), ("all_reduce", None), ("send", None), ("recv", None))
    ):
        peer = -1 if name == "all_reduce" else 1
        rank.op(name, 100 * seq, returned=100 * seq + 5, nbytes=64, peer=peer, waits=waits, flags=FOLLOWED)
        if peer == 1:
            of_messages = seq - (seq > 2)
            rank.device_interval("operation", name, 1000, None, host=(100 * seq, 0), seq=of_messages, flags=several)
    operations = rank_state(rank.tables(), exit=None, stack=None, alive=None).operations
    assert [operation.waited for operation in operations] == [True, True, False, False, False]


def test_a_frozen_process_is_named_though_its_host_had_issued_the_operation() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        issue(rank, 4, line=20, ran=(4100, None))
    stopped = Stack(state="stopped", cpu_share=0.0, frames=(), reason="the process is stopped")
    (finding,) = judge(ranks, exit_status=None, stacks={1: stopped}).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-frozen", (1,), (0, 2))
    assert finding.call_sites[0].line == 20


@pytest.mark.parametrize(("short", "kind"), [(2, "uneven-inputs"), (4, "rank-exited")])
def test_a_rank_with_fewer_batches_is_found_though_all_hosts_are_through_with_their_data(short: int, kind: str) -> None:
    ranks = [RankBuilder(rank, 3, closed=rank == 0) for rank in range(3)]
    for rank in ranks:
        batches = short if rank.rank == 0 else 4
        for seq in range(batches):
            rank.span(events.DATA, 1000 * seq, 1000 * seq + 5)
        for seq in range(2 if rank.rank == 0 else 4):
            issue(rank, seq, ran=(1000 * seq + 100, 1000 * seq + 200 if seq < 2 else None) if seq < 3 else None)
        rank.span(events.DATA, 5000, 5001, flags=schema.FLAG["skipped"])
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))


def test_a_process_that_ended_in_order_leaves_those_waiting_whose_operation_it_had_only_issued() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        issue(rank, 4, line=20, ran=(4100, None))
    ranks[2].closed = True
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (2,), (0, 1))
