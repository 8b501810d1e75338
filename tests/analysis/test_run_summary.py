"""The summary of whole runs: healthy, cut short, damaged, odd."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtprof.analysis.results import PARTS, PHASES, Caveat, StragglerResult, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records import paths, schema, tables
from dtprof.records.manifest import Manifest
from dtprof.records.reader import open_run
from dtprof.records.tables import Group, ProcessExit, RankTables
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_markdown import summary_markdown
from dtprof.report.text.summary_text import summary_text
from dtprof.report.wording import missing_words
from tests.builders import START_NS, MemoryRun, RankBuilder, write_run

MS = 1_000_000


def train(
    num_ranks: int = 2, num_steps: int = 6, change: Callable[[RankBuilder, int], None] | None = None
) -> list[RankBuilder]:
    """Return ranks that train in steps of 100 ms; `change(rank, step)` may add records."""
    ranks = [RankBuilder(i, world_size=num_ranks) for i in range(num_ranks)]
    for rank in ranks:
        for step in range(num_steps):
            begin = step * 100 * MS
            rank.span("data", begin, begin + 5 * MS)
            rank.span("backward", begin + 40 * MS, begin + 80 * MS)
            rank.op("all_reduce", begin + 50 * MS, begin + 70 * MS, is_async=True, nbytes=4096, api="Tensor.backward")
            if change is not None:
                change(rank, step)
            rank.span("optimizer", begin + 80 * MS, begin + 90 * MS)
            rank.sample("rss_bytes", begin + 91 * MS, 9_000)
            rank.sample("peak_rss_bytes", begin + 91 * MS, 10_000 + step + rank.rank)
    return ranks


def has_caveat(summary: Summary, words: str) -> bool:
    return any(words in caveat for caveat in summary.cannot_tell)


def check_invariants(summary: Summary) -> None:
    for rank in summary.ranks:
        if rank.partition_ns is not None:
            assert tuple(rank.partition_ns) == PARTS
            assert sum(rank.partition_ns.values()) == rank.step_ns
        if rank.phases_ns is not None:
            assert tuple(rank.phases_ns) == PHASES
            assert sum(rank.phases_ns.values()) == rank.step_ns
    for row in summary.collectives:
        assert row.overlap is None or 0 <= row.overlap <= 1
    assert summary.cannot_tell
    assert summary_json(summary)["schema"] == 1
    lines = summary_text(summary).splitlines()
    assert len(lines) < 30


def test_steps_after_a_gap_keep_their_numbers_and_those_between_dilute_nothing() -> None:
    # A full log kept steps 1 to 5 and 51 to 62, of 100 ms. Rank 1 computes 20 ms longer, for which rank 0 waits.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        late = 20 * MS * rank.rank
        for step in (*range(5), *range(50, 62)):
            begin = step * 100 * MS
            rank.span("backward", begin + 10 * MS, begin + 60 * MS + late, step=step)
            rank.op("all_reduce", begin + 60 * MS + late, begin + 90 * MS, step=step)
            rank.span("optimizer", begin + 90 * MS, begin + 95 * MS, step=step)
    summary = summarise(MemoryRun(ranks))
    assert summary.steps.used == (52, 62)
    assert has_caveat(summary, "4 more are known of every rank, but some between were dropped")
    assert list(summary.step_series[0].steps) == [*range(2, 6), *range(52, 63)]
    assert set(summary.step_series[0].duration_ns) == {100 * MS}
    assert [(straggler.rank, straggler.blame_ns_per_step) for straggler in summary.stragglers] == [(1, 20 * MS)]


def test_a_healthy_run_is_complete_and_used_from_the_second_step() -> None:
    summary = summarise(MemoryRun(train()))
    assert summary.complete
    assert (summary.world_size, summary.hosts, summary.backend) == (2, ("host-a",), "gloo")
    assert (summary.torch, summary.hook, summary.clock_error_ns) == ("2.13.0+cpu", "native", 0)
    assert (summary.steps.count, summary.steps.used) == (6, (2, 6))
    assert summary.steps.duration_ns is not None
    assert summary.steps.duration_ns.median == 100 * MS
    assert [series.duration_ns for series in summary.step_series] == [(100 * MS,) * 5] * 2
    assert [rank.peak_bytes for rank in summary.ranks] == [10_005, 10_006]
    assert [rank.ended for rank in summary.ranks] == ["finished", "finished"]
    assert summary.stragglers == ()
    (row,) = summary.collectives
    assert row.count == 5  # one a step used
    check_invariants(summary)


def test_the_device_peak_is_reported_where_a_device_is_used() -> None:
    ranks = train(1)
    ranks[0].sample("cuda_peak_allocated_bytes", 1, 77)
    assert summarise(MemoryRun(ranks)).ranks[0].peak_bytes == 77


def test_a_missing_rank_is_named_and_the_others_are_analysed() -> None:
    ranks = train(3)
    summary = summarise(MemoryRun([ranks[0], ranks[2]]))
    assert summary.missing_ranks == (1,)
    assert not summary.complete
    assert has_caveat(summary, "rank 1 left no log")
    assert summary.collectives[0].duration_ns == 20 * MS
    assert summary.stragglers is None
    check_invariants(summary)


def test_only_the_last_attempt_of_a_restarted_job_is_used() -> None:
    first, second = train(2, num_steps=9), train(2, num_steps=3)
    for rank in first:
        rank.closed = False
    for rank in second:
        rank.attempt = 1
    summary = summarise(MemoryRun([*first, second[0], second[1]]))
    assert summary.steps.count == 3
    assert has_caveat(summary, "restarted; only the last attempt (1)")


def test_a_rank_that_is_only_in_an_earlier_attempt_is_skipped() -> None:
    first, second = train(2, num_steps=9), train(2, num_steps=3)
    second[0].attempt = 1
    summary = summarise(MemoryRun([*first, second[0]]))
    assert [rank.rank for rank in summary.ranks] == [0]
    assert has_caveat(summary, "run: rank 1 took no part in the last attempt: left out")
    assert not has_caveat(summary, "rank 1 left no log")
    assert summary.lost_ranks == ()
    assert "incomplete: 1 rank not in the last attempt" in " ".join(summary_text(summary).split())
    assert "**1 rank not in the last attempt**" in summary_markdown(summary)


def test_ranks_without_a_log_and_ranks_of_an_earlier_attempt_are_distinguished() -> None:
    first, second = train(3, num_steps=9), train(3, num_steps=3)
    second[0].attempt = 1
    summary = summarise(MemoryRun([*first[:2], second[0]]))  # rank 1 was in attempt 0, rank 2 nowhere
    assert (summary.missing_ranks, summary.lost_ranks, summary.left_out_ranks) == ((1, 2), (2,), (1,))
    assert missing_words(summary) == "1 rank left no log, 1 rank not in the last attempt"


@pytest.mark.parametrize(
    ("phase", "words"),
    [("other", "outside all phases"), ("backward", "in backward"), (None, "")],
)
def test_the_phase_in_which_a_straggler_is_slow_is_named_in_words(phase: str | None, words: str) -> None:
    straggler = StragglerResult(rank=1, last_share=0.9, slowdown=None, blame_ns_per_step=None, phase=phase)
    assert straggler.phase_words == words


def test_a_job_that_never_steps_is_summarised_as_a_whole() -> None:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        for step in range(3):
            rank.op("all_reduce", 10 + 100 * step, 60 + 100 * step)
    summary = summarise(MemoryRun(ranks))
    assert summary.steps.used is None
    assert summary.collectives[0].count == 3
    assert (summary.ranks[0].step_ns, summary.ranks[0].partition_ns) == (None, None)
    assert summary.timeline is None
    assert has_caveat(summary, "collectives cover the whole run")
    check_invariants(summary)


def test_a_job_without_any_collective_has_steps_and_parts() -> None:
    rank = RankBuilder(0, world_size=1)
    for step in range(3):
        rank.span("backward", 100 * step, 100 * step + 50)
        rank.span("optimizer", 100 * step + 60, 100 * step + 90)
    summary = summarise(MemoryRun([rank]))
    assert summary.ranks[0].partition_ns is not None
    assert summary.collectives == ()
    assert has_caveat(summary, "none was recorded")
    check_invariants(summary)


def test_each_of_very_many_groups_has_its_own_figures() -> None:
    ranks = [RankBuilder(rank, world_size=4) for rank in range(4)]
    for number in range(1_000):
        pair = (0, 1) if number % 2 else (2, 3)
        begin = 1_000 + 100 * number
        for place, rank in enumerate(pair):
            own = ranks[rank]
            group = own.group(f"pair {number}", pair)
            # The first waits 20 for the second; the transfer takes 10: means are 20, 10 and 10.
            own.op("all_reduce", begin + 20 * place, begin + 30, group=group, nbytes=number)
    summary = summarise(MemoryRun(ranks))
    assert len(summary.groups) == 1_001
    rows = {row.group: row for row in summary.collectives}
    assert len(rows) == 1_000
    for number in (0, 1, 998, 999):
        row = rows[f"pair {number}"]
        assert (row.count, row.bytes, row.duration_ns, row.wait_ns, row.transfer_ns) == (1, number, 20, 10, 10)


def test_ranks_killed_in_the_middle_of_a_step_keep_their_complete_steps() -> None:
    ranks = train(2)
    for rank in ranks:
        rank.closed = False
        rank.span("data", 600 * MS, 605 * MS)
        rank.span("backward", 640 * MS, None)
        rank.op("all_reduce", 650 * MS, None)
    exits = {ranks[0].pid: ProcessExit(pid=ranks[0].pid, status=-9, t_ns=1)}
    summary = summarise(MemoryRun(ranks, exits=exits))
    assert summary.steps.used == (2, 6)
    assert [rank.ended for rank in summary.ranks] == ["killed by SIGKILL", "unknown"]
    assert has_caveat(summary, "did not close the log")
    check_invariants(summary)


def test_a_job_that_has_not_ended_is_running() -> None:
    ranks = train(1)
    ranks[0].closed = False
    summary = summarise(MemoryRun(ranks, manifest=Manifest(started_realtime_ns=5, ended_realtime_ns=0)))
    assert summary.ranks[0].ended.is_running


def test_an_empty_run_is_summarised_in_sentences() -> None:
    summary = summarise(MemoryRun([]))
    assert (summary.world_size, summary.ranks, summary.clock_error_ns) == (0, (), None)
    assert has_caveat(summary, "no rank left a log")
    check_invariants(summary)


def test_how_a_job_ended_is_said_where_no_rank_can_show_it() -> None:
    assert has_caveat(summarise(MemoryRun([], manifest=Manifest(exit_status=2))), "the command exited with status 2")
    assert not has_caveat(summarise(MemoryRun([], manifest=Manifest(exit_status=0))), "the command exited")
    stopped = summarise(MemoryRun(train(1), manifest=Manifest(exit_status=3, stopped_on_hang=True)))
    assert has_caveat(stopped, "dtprof stopped it")


def test_a_damaged_world_size_does_not_invent_ranks() -> None:
    rank = train(1)[0]
    rank.world_size = 2**31 - 1
    assert summarise(MemoryRun([rank])).world_size == 1


def test_a_run_on_disk_says_the_same_as_in_memory(tmp_path: Path) -> None:
    ranks = train(2)
    memory, disk = summarise(MemoryRun(ranks)), summarise(open_run(write_run(tmp_path / "run", ranks)))
    for name in ("steps", "ranks", "collectives", "stragglers", "timeline", "groups", "cannot_tell"):
        assert getattr(memory, name) == getattr(disk, name)
    assert disk.command == ("torchrun", "train.py")


def test_every_cut_of_a_segment_and_of_the_strings_is_summarised(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", train(2, num_steps=3))
    folder = run / paths.rank_folder_name(1, 0)
    segment, strings = folder / paths.segment_name(0), folder / paths.STRINGS
    whole, lines = segment.read_bytes(), strings.read_bytes()
    used = schema.HEADER_SIZE + 30 * schema.RECORD_SIZE
    for cut in [0, 1, 100, *range(schema.HEADER_STRUCT.size - 1, used, 157)]:
        segment.write_bytes(whole[:cut])
        check_invariants(summarise(open_run(run)))
    segment.write_bytes(whole)
    for cut in range(0, len(lines), 37):
        strings.write_bytes(lines[:cut])
        check_invariants(summarise(open_run(run)))


NUMBERS = st.one_of(
    st.integers(0, 300),
    st.integers(START_NS, START_NS + 300),
    st.sampled_from([-1, 0, 2**31 - 1, 2**62, 2**63 - 1, -(2**63)]),
)
OPS = ("all_reduce", "broadcast", "reduce", "send", "recv", "data", "forward", "backward", "optimizer", "checkpoint")


@st.composite
def arbitrary_tables(draw: st.DrawFn, rank: int, world_size: int) -> RankTables:
    """Draw the tables of a rank whose every column holds anything its type can."""

    def table(dtype: np.dtype, size: int) -> tables.Array:
        rows = np.zeros(size, dtype)
        for name in dtype.names or ():
            kind = dtype[name]
            limits = np.iinfo(kind)
            few = st.integers(0, 12)
            values = NUMBERS if kind.itemsize == 8 else few if kind.itemsize < 4 else st.integers(-1, 5)
            drawn = draw(st.lists(values, min_size=size, max_size=size))
            rows[name] = [min(max(value, limits.min), limits.max) for value in drawn]
        return rows

    operations = table(tables.OPERATION, draw(st.integers(0, 8)))
    spans = table(tables.SPAN, draw(st.integers(0, 8)))
    samples = table(tables.SAMPLE, draw(st.integers(0, 3)))
    num_ops = draw(st.integers(0, len(OPS)))
    return RankTables(
        rank=rank,
        attempt=0,
        world_size=world_size,
        boot_id=draw(st.sampled_from(["a", "b"])),
        hook=draw(st.sampled_from(["native", "python", ""])),
        ops=OPS[:num_ops],
        groups={
            0: Group(name="0", description="", size=world_size, ranks=tuple(range(world_size))),
            1: Group(name="1", description="", size=2, ranks=()),
        },
        operations=np.sort(operations, order="issued_ns"),
        spans=np.sort(spans, order="begin_ns"),
        samples=np.sort(samples, order="t_ns"),
        capture_ns=draw(st.integers(0, 2**63)),
        last_ns=draw(NUMBERS),
    )


@st.composite
def arbitrary_runs(draw: st.DrawFn) -> MemoryRun:
    world_size = draw(st.integers(1, 3))
    return MemoryRun([draw(arbitrary_tables(rank, world_size)) for rank in range(world_size)])


@settings(max_examples=150)
@given(arbitrary_runs())
def test_arbitrary_tables_never_raise_and_parts_always_sum(run: MemoryRun) -> None:
    check_invariants(summarise(run))


@st.composite
def thinned_runs(draw: st.DrawFn) -> MemoryRun:
    """Draw a healthy run that has lost any of its records."""
    ranks = []
    for builder in train(2, num_steps=4):
        whole = builder.tables()
        kept = {
            name: table[np.array(draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))), np.bool_)]
            for name, table in (("operations", whole.operations), ("spans", whole.spans))
        }
        ranks.append(RankTables(**{**{f: getattr(whole, f) for f in whole.__dataclass_fields__}, **kept}))
    return MemoryRun(ranks)


@settings(max_examples=60)
@given(thinned_runs())
def test_a_run_that_lost_any_records_is_summarised(run: MemoryRun) -> None:
    check_invariants(summarise(run))


@pytest.mark.parametrize("late_ms", [5, 15])
def test_an_injected_delay_shows_as_wait_of_the_others_and_as_blame(late_ms: int) -> None:
    # Rank 1 joins the all_reduce of each step late by d, before the backward pass ends: rank 0's exposed wait is d.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        for step in range(8):
            begin = step * 100 * MS
            rank.span("backward", begin + 10 * MS, begin + 80 * MS)
            late = late_ms * MS if rank.rank == 1 else 0
            rank.op("all_reduce", begin + 50 * MS + late, begin + 70 * MS, is_async=True)
            rank.span("optimizer", begin + 80 * MS, begin + 100 * MS)
    summary = summarise(MemoryRun(ranks))
    waits = [rank.partition_ns["exposed_wait"] for rank in summary.ranks if rank.partition_ns]
    assert waits == [late_ms * MS, 0]
    assert [rank.waited_for_ns for rank in summary.ranks] == [{1: late_ms * MS}, {}]
    (straggler,) = summary.stragglers
    assert (straggler.rank, straggler.blame_ns_per_step) == (1, late_ms * MS)


def test_what_ranks_noted_of_trouble_is_reported_once_with_its_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", train(num_ranks=3))
    for rank, text in ((0, "memory is not recorded"), (2, "memory is not recorded"), (2, "a phase is not recorded")):
        with (run / paths.rank_folder_name(rank, 0) / paths.STRINGS).open("a") as strings:
            strings.write(f'{{"k":"note","t_ns":1,"text":"{text}"}}\n')
    summary = summarise(open_run(run))
    noted = [caveat for caveat in summary.cannot_tell if "noted" in caveat]
    assert noted == [
        "run: ranks 0, 2 noted: memory is not recorded",
        "run: rank 2 noted: a phase is not recorded",
    ]


def test_caveats_of_importers_have_their_subject() -> None:
    assert Caveat.parse("memory formula: no such thing: see") == Caveat("memory formula", "no such thing: see")
    assert Caveat.parse("idle: none is recorded").is_usual
    assert str(Caveat.parse("no colon")) == "no colon"
