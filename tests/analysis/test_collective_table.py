"""Wait, transfer, exposed time and bandwidth of operations."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.analysis.communication import collective_table
from dtprof.analysis.communication.collective_table import find_fastest
from dtprof.analysis.results import CollectiveResult, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records import schema
from dtprof.records.events import BACKWARD, OPTIMIZER
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000


def only_row(summary: Summary) -> CollectiveResult:
    (row,) = summary.collectives
    return row


def collective(starts: Sequence[int], dones: Sequence[int], op: str = "all_reduce", **options: int) -> Summary:
    ranks = [RankBuilder(i, world_size=len(starts)) for i in range(len(starts))]
    for rank, start, done in zip(ranks, starts, dones, strict=True):
        rank.op(op, start, done, **options)
    return summarise(MemoryRun(ranks))


def test_the_wait_is_for_the_last_to_arrive_and_the_transfer_is_the_rest() -> None:
    # Arrival: 40. Waits 30, 0; transfers 60-40 = 20 and 70-40 = 30; durations 50 and 30.
    row = only_row(collective((10, 40), (60, 70), nbytes=1000))
    assert (row.count, row.bytes) == (1, 1000)
    assert (row.duration_ns, row.wait_ns, row.transfer_ns) == (40, 15, 25)
    # Both are blocked from issue to done: exposed 50 and 30, and nothing overlaps.
    assert (row.exposed_ns, row.overlap) == (40, 0.0)
    # busbw of all_reduce: 2(n-1)/n = 1 for n = 2; 1000 B in a mean transfer of 25 ns.
    assert row.busbw_gb_per_s == pytest.approx(40.0)


def test_bandwidth_uses_the_size_of_the_group_and_not_of_the_world() -> None:
    ranks = [RankBuilder(i, world_size=4) for i in range(4)]
    for rank in ranks:
        pair = (0, 1) if rank.rank < 2 else (2, 3)
        rank.op("all_gather", 0, 100, nbytes=1000, group=rank.group(f"tp{pair[0]}", pair))
    rows = summarise(MemoryRun(ranks)).collectives
    # n = 2: S = 2 * 1000 bytes, factor 1/2, 100 ns.
    assert [row.busbw_gb_per_s for row in rows] == [pytest.approx(10.0)] * 2


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 4 * 3 / 4),  # S is four times what one rank puts in
        ("all_to_all", 3 / 4),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("gather", None),
        ("barrier", None),
    ],
)
def test_bus_bandwidth_follows_nccl_tests(op: str, factor: float | None) -> None:
    peer = 0 if op in ("broadcast", "reduce", "gather") else -1
    row = only_row(collective((0,) * 4, (100,) * 4, op, nbytes=1000, peer=peer))
    assert row.busbw_gb_per_s == (None if factor is None else pytest.approx(1000 * factor / 100))


def test_from_a_root_all_wait_for_the_root_only() -> None:
    # Root 0 starts at 20; rank 1 waits 10 for it; rank 2 comes at 50, when the others are done, and waits for nobody.
    ranks = [RankBuilder(i, world_size=3) for i in range(3)]
    for rank, start, done in zip(ranks, (20, 10, 50), (30, 35, 60), strict=True):
        rank.op("broadcast", start, done, peer=0)
    row = only_row(summarise(MemoryRun(ranks)))
    assert row.wait_ns == 10 // 3


def test_a_root_that_could_not_end_before_the_last_receiver_came_waited_for_it() -> None:
    # The root is done at 60, after rank 1 arrived at 50: it waited 40 of its 50.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank, start, done in zip(ranks, (10, 50), (60, 61), strict=True):
        rank.op("broadcast", start, done, peer=0)
    assert only_row(summarise(MemoryRun(ranks))).wait_ns == 40 // 2


def test_to_a_root_only_the_root_waits() -> None:
    # Root 0 starts at 0 and waits until 30; rank 1 sends at 10 and is done at 12; rank 2 sends at 30.
    ranks = [RankBuilder(i, world_size=3) for i in range(3)]
    for rank, start, done in zip(ranks, (0, 10, 30), (40, 12, 33), strict=True):
        rank.op("reduce", start, done, peer=0)
    assert only_row(summarise(MemoryRun(ranks))).wait_ns == 30 // 3


def test_a_receive_waits_for_the_send_and_an_early_send_does_not_wait() -> None:
    sender, receiver = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    sender.op("send", 10, 12, peer=1, nbytes=8)  # buffered: done before the other side arrives
    receiver.op("recv", 50, 55, peer=0, nbytes=8)
    sender.op("send", 100, 110, peer=1, nbytes=8)
    receiver.op("recv", 60, 110, peer=0, nbytes=8)  # waits 40 of its 50
    rows = {row.op: row for row in summarise(MemoryRun([sender, receiver])).collectives}
    assert (rows["send"].count, rows["send"].wait_ns, rows["send"].transfer_ns) == (2, 0, 6)
    assert (rows["recv"].count, rows["recv"].wait_ns, rows["recv"].transfer_ns) == (2, 20, 7)


def test_without_one_clock_the_shortest_duration_stands_for_the_transfer() -> None:
    # Durations 50 and 30: transfer 30, waits 20 and 0, whatever the clocks say.
    a, b = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2, boot_id="boot-b")
    a.op("all_reduce", 10, 60)
    b.op("all_reduce", 999_000, 999_030)
    summary = summarise(MemoryRun([a, b]))
    row = only_row(summary)
    assert (row.wait_ns, row.transfer_ns) == (10, 30)
    # Both were done after both had started: that says by 80 ns where the one clock is on the other.
    assert summary.clock_error_ns is not None
    assert summary.clock_error_ns >= 40
    assert any("below the error of the clocks" in caveat for caveat in summary.cannot_tell)


def test_alone_in_the_records_no_rank_can_say_what_it_waited_for() -> None:
    rank = RankBuilder(0, world_size=2)
    rank.op("all_reduce", 10, 60, nbytes=100)
    summary = summarise(MemoryRun([rank]))
    row = only_row(summary)
    assert (row.duration_ns, row.wait_ns, row.transfer_ns, row.busbw_gb_per_s) == (50, None, None, None)
    assert summary.missing_ranks == (1,)
    assert any("other members' records are missing" in caveat for caveat in summary.cannot_tell)


def test_operations_that_met_a_different_one_have_no_wait() -> None:
    a, b = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    a.op("all_reduce", 10, 60)
    b.op("barrier", 20, 60)
    summary = summarise(MemoryRun([a, b]))
    assert [row.wait_ns for row in summary.collectives] == [None]
    assert any("met a different operation" in caveat for caveat in summary.cannot_tell)


def test_device_operations_are_counted_and_not_timed() -> None:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        for begin in (0, 1000):
            rank.span(BACKWARD, begin, begin + 100)
            rank.op("all_reduce", begin + 10, None, returned=begin + 15, nbytes=64, flags=schema.FLAG["device"])
            rank.span(OPTIMIZER, begin + 100, begin + 110)
    summary = summarise(MemoryRun(ranks))
    row = only_row(summary)
    assert (row.count, row.bytes) == (1, 64)
    assert (row.duration_ns, row.transfer_ns, row.exposed_ns, row.overlap) == (None, None, None, None)
    assert [rank.partition_ns for rank in summary.ranks] == [None, None]
    assert summary.ranks[0].phases_ns is not None
    assert any("is not observed" in caveat for caveat in summary.cannot_tell)


def test_a_call_at_different_lines_is_one_row_under_the_name_of_the_lowest_rank() -> None:
    a, b = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    a.op("all_reduce", 10, 60, api="barrier_like")
    b.op("all_reduce", 20, 60, api="all_reduce")
    row = only_row(summarise(MemoryRun([a, b])))
    assert (row.api, row.count) == ("barrier_like", 1)


def test_what_overlaps_is_not_exposed() -> None:
    # Issued at 10, done at 110; waited for from 90 to 115: 20 of 100 in flight are exposed, 5 more come after.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 10, 110, is_async=True, waits=(90, 115))
    row = only_row(summarise(MemoryRun(ranks)))
    assert row.exposed_ns == 25
    assert row.overlap == pytest.approx(0.8)


def test_an_operation_that_failed_is_counted_and_not_timed() -> None:
    # The first gave up after a timeout of 60 s; its wait must not become anybody's duration.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 10, 60_000_000_000, state="failed")
        rank.op("all_reduce", 70_000_000_000, 70_000_000_030)
    row = only_row(summarise(MemoryRun(ranks)))
    assert (row.count, row.duration_ns, row.exposed_ns) == (2, 30, 30)


def test_durations_measured_on_the_device_tell_who_waited() -> None:
    # Issued at 10 and 15, seen complete long after; on the device they took 50 and 30: the first waited 20 of its 50.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank, issued, seen, took in zip(ranks, (10, 15), (900, 1000), (50, 30), strict=True):
        rank.op("all_reduce", issued, seen, nbytes=1000, device=took)
    row = only_row(summarise(MemoryRun(ranks)))
    assert (row.duration_ns, row.wait_ns, row.transfer_ns) == (40, 10, 30)


def steps_with_a_jump(jump_ns: int) -> list[RankBuilder]:
    """Return two ranks of four steps of 100 ms that end in an all_reduce; before the third, a clock jumps."""
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        for step in range(4):
            t = step * 100 * MS + (jump_ns if rank.rank and step >= 2 else 0)
            rank.span("backward", t, t + 60 * MS)
            rank.op("all_reduce", t + 60 * MS + rank.rank * MS, t + 70 * MS, nbytes=1000)
            rank.span("optimizer", t + 80 * MS, t + 90 * MS)
    return ranks


@pytest.mark.parametrize(("jump_ns", "ranks"), [(5_000 * MS, "rank 0"), (-150 * MS, "rank 1"), (0, "")])
def test_a_clock_that_jumps_is_reported_and_its_waits_are_estimated(jump_ns: int, ranks: str) -> None:
    summary = summarise(MemoryRun(steps_with_a_jump(jump_ns)))
    early = [caveat for caveat in summary.cannot_tell if "ended before another rank began" in caveat]
    assert [f" of {ranks} ended before" in caveat for caveat in early] == [True] * bool(jump_ns)
    (row,) = summary.collectives
    # Rank 0 waits 1 ms for rank 1 in each: no wait of the length of a jump.
    assert row.wait_ns is not None
    assert row.wait_ns <= 1 * MS


def test_of_very_many_rows_the_costliest_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_table, "MAX_LISTED", 3)
    monkeypatch.setattr("dtprof.analysis.run_summary.MAX_LISTED", 3)
    rank = RankBuilder(0, world_size=1)
    for i in range(8):
        rank.op("all_reduce", 1000 * i, 1000 * i + 10 * (i + 1), group=rank.group(f"g{i}", [0]))
    summary = summarise(MemoryRun([rank]))
    assert [row.group for row in summary.collectives] == ["g7", "g6", "g5"]
    assert {group.name for group in summary.groups} == {"g7", "g6", "g5"}
    assert any("5 more rows" in caveat for caveat in summary.cannot_tell)


def test_a_send_that_is_handed_over_at_once_is_not_the_fastest_operation() -> None:
    slow = replace(only_row(collective((10, 40), (60, 70), nbytes=1000)), busbw_gb_per_s=1.0)
    send = replace(slow, op="send", busbw_gb_per_s=90.0)
    assert find_fastest([send, slow]) == slow
    assert find_fastest([send]) == send
