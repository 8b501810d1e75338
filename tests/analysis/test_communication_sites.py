"""Communication by line of the program, phase and size, worked out by hand."""

import pytest

from dtprof.analysis.results import CallLine, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.interchange.public_tables.result_tables import tabulate_results
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
STEPS = 6
LOSS = CallLine(file="/home/me/train.py", line=41, function="train")
GRADIENTS = CallLine(file="/home/me/loop.py", line=7, function="step")


def training(*, known_line: bool = True) -> MemoryRun:
    """Return two ranks of 6 steps of 100 ms.

    In each, rank 0 issues an all_reduce of 1,024 bytes in backward at 20 ms and waits; rank 1 comes 10 ms later, and
    both are done at 34 ms. Outside phases both issue one of 1 MiB at 60 ms, which takes 8 ms.
    """
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for number, rank in enumerate(ranks):
        group = rank.group("g", (0, 1), "mesh_dp")
        backward = rank.site("ddp", file=GRADIENTS.file, line=GRADIENTS.line, function=GRADIENTS.function)
        loss = rank.site("all_reduce", file=LOSS.file, line=LOSS.line, function=LOSS.function) if known_line else 0
        for step in range(STEPS):
            t = 100 * MS * step
            rank.span("backward", t + 5 * MS, t + 40 * MS)
            rank.op("all_reduce", t + (20 + 10 * number) * MS, t + 34 * MS, group=group, nbytes=1024, site=backward)
            rank.op("all_reduce", t + 60 * MS, t + 68 * MS, group=group, nbytes=1 << 20, site=loss)
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
    return MemoryRun(ranks)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(training())


def test_a_line_costs_what_its_operations_block_ranks_on_average(summary: Summary) -> None:
    # Of the first, rank 0 is blocked 14 ms, 10 of them for rank 1, and rank 1 for 4: a mean of 9, 5 and 4 ms a step.
    first, second = summary.call_sites
    assert (first.line, first.phase, first.axis, first.op, first.api) == (
        GRADIENTS,
        "backward",
        "dp",
        "all_reduce",
        "ddp",
    )
    assert (first.exposed_ns_per_step, first.wait_ns_per_step, first.transfer_ns_per_step) == (9 * MS, 5 * MS, 4 * MS)
    assert (first.count_per_step, first.bytes) == (1, 1024)
    assert (second.line, second.phase, second.exposed_ns_per_step, second.wait_ns_per_step) == (
        LOSS,
        "other",
        8 * MS,
        0,
    )


def test_phases_and_sizes_sum_to_the_same_times_as_call_sites(summary: Summary) -> None:
    total = sum(site.exposed_ns_per_step or 0 for site in summary.call_sites)
    assert total == 17 * MS
    assert sum(phase.exposed_ns_per_step or 0 for phase in summary.communication_phases) == total
    assert sum(row.exposed_ns_per_step or 0 for row in summary.message_sizes) == total
    assert [(row.phase, row.bytes_per_step) for row in summary.communication_phases] == [
        ("backward", 1024),
        ("other", 1 << 20),
    ]


def test_sizes_are_classes_from_a_power_of_two_to_the_next_with_their_bandwidth(summary: Summary) -> None:
    small, large = summary.message_sizes
    assert (small.from_bytes, small.below_bytes, small.ranks) == (1024, 2048, 2)
    assert (large.from_bytes, large.below_bytes) == (1 << 20, 1 << 21)
    # 2 ** 20 bytes in 8 ms: 0.131 GB/s; of an all_reduce among two the bus has 2 (2 - 1) / 2 = 1 times as much.
    assert large.algbw_gb_per_s == large.busbw_gb_per_s == pytest.approx(2**20 / (8 * MS))


def test_algorithm_bandwidth_is_bytes_over_transfer() -> None:
    ranks = [RankBuilder(i, world_size=4) for i in range(4)]
    for rank in ranks:
        group = rank.group("g", (0, 1, 2, 3), "mesh_dp")
        for step in range(STEPS):
            rank.op("all_reduce", 100 * MS * step, 100 * MS * step + 10 * MS, group=group, nbytes=10_000_000)
            rank.span("optimizer", 100 * MS * step + 90 * MS, 100 * MS * step + 95 * MS)
    (row,) = summarise(MemoryRun(ranks)).collectives
    # 10 MB in 10 ms is 1 GB/s; the bus of four ranks has 2 * 3 / 4 times as much.
    assert row.algbw_gb_per_s == pytest.approx(1.0)
    assert row.busbw_gb_per_s == pytest.approx(1.5)


def test_the_costliest_line_is_named_in_the_text(summary: Summary) -> None:
    text = " ".join(summary_text(summary).split())
    assert "loop.py:7 in step costs most, 9.00 ms a step (9 %): all_reduce (ddp) over dp in backward" in text


def test_the_share_of_the_costliest_line_is_of_the_mean_step() -> None:
    """Of 8 steps the last takes 730 ms, 700 in an operation; the others take 100 ms each, 6 in it."""
    rank = RankBuilder(0, world_size=1)
    site = rank.site("all_reduce", file=LOSS.file, line=LOSS.line, function=LOSS.function)
    for step in range(8):
        t, length = 100 * MS * step, (700 if step == 7 else 6) * MS
        rank.span("backward", t, t + 2 * MS)
        rank.op("all_reduce", t + 10 * MS, t + 10 * MS + length, nbytes=1024, site=site)
        rank.span("optimizer", t + length + 15 * MS, t + length + 20 * MS)
    summary = summarise(MemoryRun([rank]))
    (row,) = summary.call_sites
    assert row.exposed_ns_per_step and summary.ranks[0].step_ns and summary.steps.duration_ns  # noqa: PT018
    share = row.exposed_ns_per_step / summary.ranks[0].step_ns
    assert row.exposed_ns_per_step > 0.8 * summary.steps.duration_ns.median
    assert f"a step ({100 * share:.0f} %)" in " ".join(summary_text(summary).split())


def test_an_operation_without_a_line_is_listed_and_never_named() -> None:
    unknown = summarise(training(known_line=False))
    assert [site.line for site in unknown.call_sites] == [GRADIENTS, None]
    assert summary_json(unknown)["call_sites"][1]["line"] is None
    assert tabulate_results("call_sites", unknown)["line"].tolist() == [7, None]


def test_without_measured_steps_there_is_no_call_site() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.op("all_reduce", 0, MS, nbytes=8)
    summary = summarise(MemoryRun([rank]))
    assert not summary.call_sites
    assert not summary.communication_phases
    assert not summary.message_sizes


def test_operations_of_a_thread_beside_the_steps_keep_no_step_waiting() -> None:
    """A checkpoint is written by a thread of its own, while the rank evaluates."""
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        group = rank.group("g", (0, 1), "mesh_dp")
        for step in range(STEPS):
            t = 100 * MS * step
            rank.span("backward", t + 5 * MS, t + 40 * MS)
            rank.op("all_reduce", t + 20 * MS, t + 34 * MS, group=group)
            rank.span("evaluation", t + 41 * MS, t + 80 * MS)
            rank.op("all_gather", t + 42 * MS, t + 79 * MS, group=group, thread=2)
            rank.span("optimizer", t + 90 * MS, t + 95 * MS)
    summary = summarise(MemoryRun(ranks))
    reduced, gathered = sorted(summary.collectives, key=lambda row: row.op, reverse=True)
    assert (reduced.exposed_ns, reduced.overlap) == (14 * MS, 0)
    assert (gathered.duration_ns, gathered.exposed_ns, gathered.overlap) == (37 * MS, None, None)
    assert {(site.op, site.phase): site.exposed_ns_per_step for site in summary.call_sites} == {
        ("all_reduce", "backward"): 14 * MS,
        ("all_gather", "other"): None,
    }
