"""Figures of runs whose devices were followed: all of them in the time of the device, by hand."""

import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.schema import DEVICE_FLAG, FLAG
from dtprof.report.wording import clock_words
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
FOLLOWED, ON_STREAM = FLAG["device"] | FLAG["followed"], DEVICE_FLAG["on_stream"]


class DeviceRank(RankBuilder):
    """A rank whose host takes 10 ms a step and whose device takes 1000."""

    def phase(self, name: str, begin: int, end: int, host: int, host_end: int) -> None:
        """Add a phase, in ms: on the device, and on the host."""
        self.span(name, host * MS, host_end * MS)
        self.device_interval("phase", name, begin * MS, end * MS, host=(host * MS, host_end * MS))

    def operation(
        self,
        name: str,
        begin: int,
        end: int,
        host: int,
        *,
        seq: int,
        flags: int = 0,
        wait: tuple[int, int] | None = None,
    ) -> None:
        """Add an operation of 8 MB, and the wait of the stream for it."""
        is_async = wait is not None
        self.op(name, host * MS, is_async=is_async, nbytes=8_000_000, flags=FOLLOWED, returned=host * MS)
        self.device_interval("operation", name, begin * MS, end * MS, host=(host * MS, 0), seq=seq, flags=flags)
        if wait is not None:
            self.device_interval("wait", name, wait[0] * MS, wait[1] * MS, host=(host * MS, host * MS), seq=seq)


def rank_of_a_device_bound_job(rank: int, late: int, wait_from: int, steps: int = 4) -> DeviceRank:
    """Steps of forward, backward with an all_reduce beside it and a reduce_scatter within it, and optimizer."""
    built = DeviceRank(rank, world_size=2)
    for step in range(steps):
        at, host = 1000 * step + 500, 10 * step
        built.phase("forward", at, at + 300, host, host + 1)
        built.phase("backward", at + 300, at + 800, host + 1, host + 6)
        built.operation(
            "all_reduce", at + 500 + late, at + 640, host + 2, seq=2 * step, wait=(at + wait_from, at + 640)
        )
        built.operation("reduce_scatter", at + 700 + late // 2, at + 760, host + 4, seq=2 * step + 1, flags=ON_STREAM)
        built.phase("optimizer", at + 800, at + 950, host + 6, host + 9)
    return built


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Rank 1 starts the all_reduce 60 ms late, and the reduce_scatter 30."""
    return summarise(MemoryRun([rank_of_a_device_bound_job(0, 0, 600), rank_of_a_device_bound_job(1, 60, 580)]))


def in_ms(parts: object) -> dict[str, float]:
    assert isinstance(parts, dict)
    return {name: value / MS for name, value in parts.items() if value}


def test_step_is_split_by_what_the_stream_did(summary: Summary) -> None:
    # From the end of one optimizer step on the device to the next: 1000 ms, of which nothing covers the 50 between.
    # Rank 0: its stream stands for the all_reduce from 600 to 640, when all have started it; in the reduce_scatter from
    # 700, until rank 1 starts it at 730, then until 760. Rank 1: from 580 to 640, and from 730 to 760.
    first, second = summary.ranks
    assert first.step_ns == second.step_ns == 1000 * MS
    assert in_ms(first.partition_ns) == {
        "exposed_transfer": 40 + 30,
        "exposed_wait": 30,
        "optimizer": 150,
        "compute": 300 + 500 - 100,
        "host": 50,
    }
    assert in_ms(second.partition_ns) == {
        "exposed_transfer": 60 + 30,
        "optimizer": 150,
        "compute": 300 + 500 - 90,
        "host": 50,
    }
    assert in_ms(first.phases_ns) == {"forward": 300, "backward": 500, "optimizer": 150, "other": 50}


def test_wait_ends_when_the_last_member_starts(summary: Summary) -> None:
    rows = {row.op: row for row in summary.collectives}
    beside, within = rows["all_reduce"], rows["reduce_scatter"]
    # 140 ms on rank 0, 80 on rank 1, which is what data needs.
    assert (beside.duration_ns, beside.wait_ns, beside.transfer_ns) == (110 * MS, 30 * MS, 80 * MS)
    assert beside.exposed_ns == (40 + 60) / 2 * MS
    assert beside.overlap == pytest.approx(1 - (40 + 60) / (140 + 80))
    # 8 MB of two ranks over 80 ms of transfer, factor 2(n-1)/n = 1; the wait is not in it
    assert beside.busbw_gb_per_s == pytest.approx(0.1)
    assert (within.wait_ns, within.transfer_ns, within.overlap) == (15 * MS, 30 * MS, 0)


def test_every_figure_says_whose_time_it_is_in(summary: Summary) -> None:
    # The host takes 10 ms a step, the device 1000: its lead grows from 500 ms to 3450 - 39.
    assert [rank.clock for rank in summary.ranks] == ["device", "device"]
    assert (summary.device.ranks, summary.device.error_ns) == ((0, 1), 0)
    for lead in (summary.ranks[0].host_lead_ns, summary.device.host_lead_ns):
        assert lead is not None
        assert 500 * MS < lead < 3411 * MS
    assert str(summary.cannot_tell[0]) == (
        "device: steps, phases and operations of ranks 0, 1 are timed on the device, off by up to 0 ns; what it waits "
        "for the host counts as host"
    )
    assert clock_words(summary).startswith("of the device, off by up to 0 ns; the host leads by 2.")


def test_times_of_a_rank_without_a_device_are_the_hosts_and_said_to_be() -> None:
    host = RankBuilder(1, world_size=2)
    for step in range(4):
        host.span("backward", 1000 * step * MS, (1000 * step + 700) * MS)
        host.span("optimizer", (1000 * step + 700) * MS, (1000 * step + 900) * MS)
    device = rank_of_a_device_bound_job(0, 0, 600)
    for interval in device._device_intervals:
        interval["error_ns"] = 30_000
    summary = summarise(MemoryRun([device, host]))
    assert [rank.clock for rank in summary.ranks] == ["device", "host"]
    assert clock_words(summary).startswith("of the device on rank 0, else of the host, off by up to 30.0 us")
    assert summary.ranks[1].host_lead_ns is None
    # Two marks of devices may be off either way.
    assert (summary.clock_error_ns, summary.time_error_ns) == (0, 60_000)


def test_device_that_has_caught_up_waits_for_the_host() -> None:
    # Forward ends on the device when the host says so; the next one begins when the host comes to it. Backward and
    # optimizer are launched ahead.
    built = DeviceRank(0, world_size=1)
    for step in range(4):
        at = 1000 * step
        built.phase("forward", at, at + 300, at, at + 300)
        built.phase("backward", at + 300, at + 800, at + 300, at + 310)
        built.phase("optimizer", at + 800, at + 950, at + 310, at + 320)
    (rank,) = summarise(MemoryRun([built])).ranks
    assert in_ms(rank.partition_ns) == {"host": 300 + 50, "compute": 500, "optimizer": 150}


def test_wait_that_nothing_marks_leaves_the_partition_unknown() -> None:
    # FSDP gathers on a stream of its own, for which the stream that computes waits by an event.
    built = rank_of_a_device_bound_job(0, 0, 600)
    other = rank_of_a_device_bound_job(1, 0, 600)
    built.op("all_gather", 35 * MS, nbytes=8, flags=FOLLOWED, returned=35 * MS)
    built.device_interval(
        "operation", "all_gather", 3000 * MS, 3010 * MS, host=(35 * MS, 0), seq=8, flags=ON_STREAM, stream=2
    )
    first, second = summarise(MemoryRun([built, other])).ranks
    assert first.partition_ns is None
    assert second.partition_ns is not None


def test_wait_below_the_error_of_the_marks_is_not_blamed_on_anybody() -> None:
    # The marks of two devices are off by 40 ms each: who started the all_reduce first, 60 ms ahead, is not known.
    ranks = [rank_of_a_device_bound_job(0, 0, 600), rank_of_a_device_bound_job(1, 60, 580)]
    for rank in ranks:
        for interval in rank._device_intervals:
            interval["error_ns"] = 40 * MS
    summary = summarise(MemoryRun(ranks))
    assert summary.ranks[0].waited_for_ns == {}
    assert any(
        "hosts or devices came below the error of the clocks, up to 80.0 ms" in caveat for caveat in summary.cannot_tell
    )


def test_reducer_that_waits_at_the_end_of_backward_is_blocked_from_there_and_not_from_the_kernel() -> None:
    # DDP issues buckets at 500 and 700 and waits at the end of the backward pass, which marks nothing. The kernel of
    # the second stands behind the first until 750; the stream stands from 700, first for the one, then for the other.
    built = DeviceRank(0, world_size=2), DeviceRank(1, world_size=2)
    for rank in built:
        for step in range(4):
            at, host = 1000 * step, 10 * step
            rank.phase("forward", at, at + 300, host, host + 1)
            rank.phase("backward", at + 300, at + 800, host + 1, host + 6)
            for seq, (reached, begin, end) in enumerate(((500, 500, 750), (700, 750, 800))):
                rank.op("all_reduce", (host + 2 + seq) * MS, is_async=True, nbytes=8, flags=FOLLOWED, returned=0)
                rank.device_interval(
                    *("operation", "all_reduce", (at + begin) * MS, (at + end) * MS),
                    host=((host + 2 + seq) * MS, 0),
                    seq=2 * step + seq,
                    flags=DEVICE_FLAG["exact"],
                    reached=(at + reached) * MS,
                )
            rank.phase("optimizer", at + 800, at + 1000, host + 6, host + 9)
    summary = summarise(MemoryRun(built))
    assert in_ms(summary.ranks[0].partition_ns) == {
        "exposed_transfer": 100,
        "compute": 300 + 400,
        "optimizer": 200,
    }
    (row,) = summary.collectives
    assert row.duration_ns == (250 + 50) / 2 * MS
    assert row.overlap == pytest.approx(1 - (50 + 50) / (250 + 50))
    # Nobody came last: the path goes through the queue of both operations on the rank itself, back to 500.
    assert summary.critical_path is not None
    assert summary.critical_path.transfer_ns == 300 * MS


def test_wait_for_the_last_of_a_queue_is_shared_among_those_it_stands_behind() -> None:
    # Two all_reduces from 500 to 600 and 600 to 700; the stream comes to the wait for the second at 550.
    summary = summarise(MemoryRun([rank_of_queue(rank, exact=True) for rank in range(2)]))
    (row,) = summary.collectives
    assert row.exposed_ns == (50 + 100) / 2 * MS
    assert row.overlap == pytest.approx(1 - 150 / 200)
    assert in_ms(summary.ranks[0].partition_ns)["exposed_transfer"] == 150


def test_operation_whose_kernel_is_not_seen_begins_when_its_queue_comes_to_it() -> None:
    # Both marks before the calls lie at 500; the second kernel begins at 600, when the first has ended.
    summary = summarise(MemoryRun([rank_of_queue(0, exact=False)]))
    (row,) = summary.collectives
    assert row.duration_ns == 100 * MS


def rank_of_queue(rank: int, *, exact: bool) -> DeviceRank:
    built = DeviceRank(rank, world_size=2)
    for step in range(4):
        at, host = 1000 * step, 10 * step
        built.phase("forward", at, at + 300, host, host + 1)
        built.phase("backward", at + 300, at + 800, host + 1, host + 6)
        for seq, (begin, end) in enumerate(((500, 600), (600 if exact else 500, 700))):
            wait = (at + 550, at + 700) if seq else None
            built.operation(
                *("all_reduce", at + begin, at + end, host + 2 + seq),
                seq=2 * step + seq,
                flags=DEVICE_FLAG["exact"] if exact else DEVICE_FLAG["polled"],
                wait=wait,
            )
        built.phase("optimizer", at + 800, at + 1000, host + 6, host + 9)
    return built


def test_gather_on_a_stream_of_its_own_blocks_where_the_wait_for_it_is_marked() -> None:
    # FSDP2 gathers on stream 2 from 100 to 200; the stream that computes stands for it from 150.
    built = DeviceRank(0, world_size=2)
    for step in range(4):
        at, host = 1000 * step, 10 * step
        built.phase("forward", at, at + 300, host, host + 1)
        built.op("all_gather", host * MS, nbytes=8, flags=FOLLOWED, returned=host * MS)
        built.device_interval(
            *("operation", "all_gather", (at + 100) * MS, (at + 200) * MS),
            host=(host * MS, 0),
            seq=step,
            flags=ON_STREAM,
            stream=2,
        )
        built.device_interval(
            "wait", "all_gather", (at + 150) * MS, (at + 200) * MS, host=(host * MS, host * MS), seq=step
        )
        built.phase("backward", at + 300, at + 800, host + 1, host + 6)
        built.phase("optimizer", at + 800, at + 1000, host + 6, host + 9)
    summary = summarise(MemoryRun([built]))
    # The other member left no record: all of it counts as wait.
    assert in_ms(summary.ranks[0].partition_ns) == {"exposed_wait": 50, "compute": 750, "optimizer": 200}
    assert summary.collectives[0].overlap == pytest.approx(0.5)


def test_wait_for_two_queues_is_shared_at_the_end_of_the_first_and_what_ended_before_blocked_nobody() -> None:
    # FSDP1 with HYBRID_SHARD: reduce-scatters on stream 2 from 350 to 450 and 500 to 600, the all-reduce behind them on
    # stream 3 until 700. The stream that computes comes to the wait for both queues at 550.
    built = DeviceRank(0, world_size=1)
    for step in range(4):
        at, host = 1000 * step, 10 * step
        built.phase("forward", at, at + 300, host, host + 1)
        built.phase("backward", at + 300, at + 800, host + 1, host + 6)
        reductions = (("reduce_scatter", 350, 450, 2), ("reduce_scatter", 500, 600, 2), ("all_reduce", 600, 700, 3))
        for number, (name, begin, end, stream) in enumerate(reductions):
            built.op(name, (host + 2) * MS, nbytes=8, flags=FOLLOWED, returned=(host + 2) * MS)
            built.device_interval(
                *("operation", name, (at + begin) * MS, (at + end) * MS),
                host=((host + 2) * MS, 0),
                seq=3 * step + number,
                flags=ON_STREAM,
                stream=stream,
            )
        for number, name in ((1, "reduce_scatter"), (2, "all_reduce")):
            hosts = ((host + 3) * MS + number, (host + 4) * MS - number)
            built.device_interval("wait", name, (at + 550) * MS, (at + 700) * MS, host=hosts, seq=3 * step + number)
        built.phase("optimizer", at + 800, at + 1000, host + 6, host + 9)
    summary = summarise(MemoryRun([built]))
    rows = {row.op: row for row in summary.collectives}
    assert rows["reduce_scatter"].exposed_ns == (0 + 50) / 2 * MS
    assert rows["all_reduce"].exposed_ns == 100 * MS
    assert in_ms(summary.ranks[0].partition_ns) == {"exposed_transfer": 150, "compute": 650, "optimizer": 200}


def test_collectives_in_a_row_on_a_device_are_not_called_serialised() -> None:
    # They run on one stream whatever the program does: issued together they would take as long.
    ranks = [DeviceRank(rank, world_size=2) for rank in range(2)]
    for built in ranks:
        for step in range(4):
            at, host = 1000 * step, 10 * step
            built.phase("backward", at, at + 800, host + 1, host + 6)
            for seq in range(3):
                begin = at + 100 + 100 * seq
                built.operation("all_reduce", begin, begin + 100, host + 2 + seq, seq=3 * step + seq, flags=ON_STREAM)
            built.phase("optimizer", at + 800, at + 1000, host + 6, host + 9)
    summary = summarise(MemoryRun(ranks))
    assert in_ms(summary.ranks[0].partition_ns)["exposed_transfer"] == 300
    assert summary.serialised == ()


def test_replay_of_a_graph_outside_all_phases_is_compute_and_is_counted() -> None:
    # 800 of 1000 ms are one graph; forward and backward passes are in it, and nothing else says so.
    ranks = [DeviceRank(rank, world_size=2) for rank in range(2)]
    for built in ranks:
        for step in range(4):
            at, host = 1000 * step, 10 * step
            built.phase("graph_replay", at, at + 800, host + 1, host + 2)
            built.phase("optimizer", at + 850, at + 1000, host + 6, host + 9)
    summary = summarise(MemoryRun(ranks))
    assert in_ms(summary.ranks[0].partition_ns) == {"compute": 800, "optimizer": 150, "host": 50}
    (caveat,) = [caveat for caveat in summary.cannot_tell if "graphs" in caveat]
    assert caveat.startswith("exposed_ns: CUDA graphs were replayed 8 times; operations in them are not recorded")


def test_operation_without_marks_leaves_the_partition_of_its_rank_unknown() -> None:
    # All marks were taken: when the device ran it is not known, nor what of the step it exposed.
    built = rank_of_a_device_bound_job(0, 0, 600)
    other = rank_of_a_device_bound_job(1, 0, 600)
    built.op("all_reduce", 35 * MS, nbytes=8, flags=FLAG["device"], returned=35 * MS)
    built.sample("device_marks_skipped", 35 * MS, 2)
    other.sample("device_marks_captured", 35 * MS, 4)
    summary = summarise(MemoryRun([built, other]))
    assert summary.ranks[0].partition_ns is None
    assert summary.ranks[1].partition_ns is not None
    assert any(caveat.startswith("device: 2 marks found no place") for caveat in summary.cannot_tell)
    assert any(caveat.startswith("device: 4 marks fell into the capture of graphs") for caveat in summary.cannot_tell)
