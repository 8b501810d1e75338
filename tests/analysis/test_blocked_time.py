"""When operations keep the program from going on."""

from dtprof.analysis.communication.blocked_time import Blocked, find_blocked
from dtprof.analysis.steps.phase_intervals import find_phases
from dtprof.analysis.steps.step_boundaries import find_steps_of
from dtprof.job.valid_records import valid_operations, valid_spans
from dtprof.records import schema
from tests.builders import START_NS, RankBuilder


def blocked_of(builder: RankBuilder) -> Blocked:
    tables = builder.tables()
    spans = valid_spans(tables.spans)
    steps = find_steps_of(tables)
    return find_blocked(tables, valid_operations(tables.operations), find_phases(tables, spans, steps), steps)


def stretches(blocked: Blocked) -> list[list[list[int]]]:
    """Return the non-empty stretches of each operation."""
    pairs = zip((blocked.call - START_NS).tolist(), (blocked.wait - START_NS).tolist(), strict=True)
    return [[stretch for stretch in pair if stretch[0] < stretch[1]] for pair in pairs]


def one_step(rank: RankBuilder, backward: tuple[int, int]) -> None:
    rank.span("backward", *backward)
    rank.span("optimizer", backward[1], backward[1] + 5)


def test_a_synchronous_operation_blocks_in_the_call_and_in_the_wait() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 10))
    rank.op("all_reduce", 20, 80, returned=25, waits=(27, 82))
    assert stretches(blocked_of(rank)) == [[[20, 25], [27, 82]]]


def test_an_operation_in_flight_does_not_block() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 10))
    rank.op("all_reduce", 20, 80, is_async=True, returned=22)
    assert stretches(blocked_of(rank)) == [[[20, 22]]]


def test_operations_of_a_backward_pass_block_from_the_last_issue_in_order_of_issue() -> None:
    # Issued at 10, 30, 50; the last returns at 52. Done at 40 (before the end of issuing: hidden), 70 and 90.
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 95))
    rank.op("all_reduce", 10, 40, is_async=True, returned=12)
    rank.op("all_reduce", 30, 70, is_async=True, returned=32)
    rank.op("all_reduce", 50, 90, is_async=True, returned=52)
    assert stretches(blocked_of(rank)) == [[[10, 12]], [[30, 32], [52, 70]], [[50, 52], [70, 90]]]


def test_operations_done_out_of_order_are_blamed_in_order_of_issue() -> None:
    # The second is done first, at 60; the first at 90 owns all the time from 32 on.
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 95))
    rank.op("all_reduce", 10, 90, is_async=True, returned=12)
    rank.op("all_reduce", 30, 60, is_async=True, returned=32)
    assert stretches(blocked_of(rank)) == [[[10, 12], [32, 90]], [[30, 32]]]


def test_the_end_of_the_backward_pass_ends_the_block() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 50))
    rank.op("all_reduce", 10, 400, is_async=True, returned=12)
    assert stretches(blocked_of(rank)) == [[[10, 12], [12, 50]]]


def test_each_backward_pass_blocks_for_its_own_operations() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 50))
    one_step(rank, (100, 150))
    rank.op("all_reduce", 10, 40, is_async=True, returned=20)
    rank.op("all_reduce", 110, 140, is_async=True, returned=120)
    assert stretches(blocked_of(rank)) == [[[10, 20], [20, 40]], [[110, 120], [120, 140]]]


def test_an_operation_that_is_waited_for_does_not_block_the_backward_pass() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 50))
    rank.op("all_reduce", 10, 45, is_async=True, returned=12, waits=(60, 61))
    assert stretches(blocked_of(rank)) == [[[10, 12], [60, 61]]]


def test_the_python_hook_infers_the_waits_of_buffers_broadcast_in_forward() -> None:
    expected = {"python": [[[5, 6], [6, 15]]], "native": [[[5, 6]]]}  # the native hook sees waits made in C++
    for hook, blocks in expected.items():
        rank = RankBuilder(0, world_size=2, hook=hook)
        rank.span("forward", 0, 20)
        one_step(rank, (20, 50))
        rank.op("broadcast", 5, 15, returned=6, is_async=True)
        assert stretches(blocked_of(rank)) == blocks


def test_operations_whose_completion_is_not_observed_say_nothing() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 50))
    rank.op("all_reduce", 10, None, returned=15, flags=schema.FLAG["device"])
    blocked = blocked_of(rank)
    assert stretches(blocked) == [[]]
    assert not blocked.known.any()


def test_a_thread_that_runs_no_steps_does_not_count_unless_it_acts_for_the_backward_pass() -> None:
    rank = RankBuilder(0, world_size=2)
    one_step(rank, (0, 50))
    rank.op("all_reduce", 60, 70, thread=2)
    rank.op("all_reduce", 80, 90, thread=2, flags=schema.FLAG["completion"] | schema.FLAG["inferred_site"])
    rank.op("all_reduce", 95, 99)
    assert blocked_of(rank).counts.tolist() == [False, True, True]
