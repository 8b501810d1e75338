"""The summary as text."""

import signal
from dataclasses import replace

import pytest

from dtprof.analysis.rank_exits import EndState, RankEnd
from dtprof.analysis.results import Caveat, CollectiveResult, GroupResult, Headroom, PipelineResult, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.tables import OutOfMemory
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
PIPELINE = PipelineResult(
    schedule="1F1B",
    stages=4,
    ranks=4,
    microbatches=8,
    bubble_fraction=0.4,
    theory_fraction=3 / 11,
    parts={"schedule": 0.27, "imbalance": 0.08, "exposed_p2p": 0.04, "jitter": 0.01},
    per_rank=(),
)


def summary_of(num_ranks: int, late_rank: int | None = None) -> Summary:
    """Return a run of steps of 100 ms: backward 70, optimizer 10, and an all_reduce of 20 that all but one wait in."""
    ranks = [RankBuilder(i, world_size=num_ranks) for i in range(num_ranks)]
    for rank in ranks:
        for step in range(6):
            begin = step * 100 * MS
            rank.span("backward", begin + 10 * MS, begin + 80 * MS)
            late = 10 * MS if rank.rank == late_rank else 0
            rank.op("all_reduce", begin + 60 * MS + late, begin + 80 * MS, is_async=True, nbytes=4 << 20)
            rank.span("optimizer", begin + 80 * MS, begin + 90 * MS)
            rank.sample("peak_rss_bytes", begin + 91 * MS, 3 << 30)
    return summarise(MemoryRun(ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 9, 300])
def test_a_summary_fits_under_forty_lines_of_eighty_columns(num_ranks: int) -> None:
    lines = summary_text(summary_of(num_ranks, late_rank=num_ranks - 1)).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "next        dtprof report a-run"


def test_the_headroom_stands_beside_the_memory_that_ran_out_and_who_held_what() -> None:
    summary = summary_of(2)
    held = {"parameters": 3 << 20, "gradients": 0, "optimizer_state": 6 << 20, "other": 40 << 20}
    failure = OutOfMemory(t_ns=1, device="cpu", message="", live_bytes=None, held_bytes=held, largest="other")
    room = Headroom(host="a", device="host", capacity_bytes=8 << 30, most_used_bytes=6 << 30, headroom_bytes=2 << 30)
    ranks = (summary.ranks[0], replace(summary.ranks[1], out_of_memory=(failure,)))
    lines = summary_text(replace(summary, ranks=ranks, headroom=(room,))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ran out"))
    assert "of memory on cpu: rank 1; it held 40.0 MiB other" in lines[at]
    assert [line for line in lines if line.startswith("headroom")] == ["headroom    2.00 GiB of 8.00 GiB left on a"]
    assert lines.index("headroom    2.00 GiB of 8.00 GiB left on a") == at + 2


def test_a_summary_shows_figures_with_their_units() -> None:
    # Step 100 ms from 90 to 190: host 10, forward inferred from 90..110 = 20 more compute... the step begins at 90,
    # the backward at 110: compute = 20 + 70 - 20 blocked = 70; rank 0 waits 10 of the 20, rank 1 none; optimizer 10.
    text = summary_text(summary_of(2, late_rank=1))
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("per step"))
    assert lines[at].split() == ["per", "step", "step", "compute", "transfer", "wait", "optim"]
    assert lines[at + 1].split() == ["ms"] * 5
    assert lines[at + 2].split() == ["rank", "0", "100", "70.0", "10.0", "10.0", "10.0"]
    assert lines[at + 3].split() == ["rank", "1", "100", "80.0", "10.0", "0", "10.0"]
    assert lines[at + 4].split() == ["share", "100", "%", "75.0", "%", "10.0", "%", "5.00", "%", "10.0", "%"]
    assert "median 100 ms (p10 100 ms, p90 100 ms)" in text
    # Blame: 10 ms a step; 100 / (100 - 10) = 1.11.
    # Its work is 100 - 10 blocked, that of rank 0 100 - 20; what it does more lies in the backward pass.
    assert (
        "stragglers  rank 1: to blame in 100 % of steps with waits, the other rank waits\n"
        "            10.0 ms a step for it, slowdown 1.11x, slow in backward since step 2\n"
    ) in text
    assert "4.00 MiB" in text
    assert "peak memory 3.00 GiB" in text


def test_the_slowdown_stands_beside_that_of_a_replay_and_its_bounds() -> None:
    summary = summary_of(2, late_rank=1)
    # Steps of 100 ms, a lag of 10 ms, 8 replayed: 100 / (100 - 8) = 1.09; bounds 100 / (100 - 5) = 1.05 and 1.18.
    straggler = replace(
        (summary.stragglers or ())[0],
        replayed_lag_ns_per_step=8 * MS,
        replayed_lag_interval_ns_per_step=(5 * MS, 15 * MS),
    )
    words = " ".join(summary_text(replace(summary, stragglers=(straggler,))).split())
    assert "slowdown 1.11x (replayed 1.09x, 1.05x to 1.18x), slow in backward since step 2" in words


def test_of_many_ranks_the_extremes_and_the_median_are_shown() -> None:
    text = summary_text(summary_of(20, late_rank=13))
    rows = [line.split("  ")[0].strip() for line in text.splitlines() if line.startswith(("rank ", "median "))]
    assert rows[0] == "rank 13"  # waits least
    assert len(rows) == 7
    assert rows[-1] == "median of 20"


def test_a_run_that_did_not_end_well_is_sent_to_diagnose() -> None:
    summary = summary_of(2)
    killed = replace(summary.ranks[1], ended=RankEnd(EndState.KILLED, signal.SIGKILL))
    text = summary_text(replace(summary, ranks=(summary.ranks[0], killed)))
    assert "ended       rank 0 finished; rank 1 killed by SIGKILL" in text
    assert text.endswith("dtprof diagnose a-run")


def test_the_next_command_can_be_copied_however_long_the_path() -> None:
    path = "/data/" + "a very long name " * 8
    assert summary_text(replace(summary_of(1), run=path)).endswith(f"dtprof report '{path}'")


def test_a_column_of_microseconds_is_not_shown_in_milliseconds() -> None:
    # Beside a step of 100 ms, data loading of 60 and 140 us; 0 stays 0.
    summary = summary_of(2)
    rows = [
        replace(rank, partition_ns={**(rank.partition_ns or {}), "data": data, "host": host})
        for rank, data, host in zip(summary.ranks, (60_000, 140_000), (0, 2 * MS), strict=True)
    ]
    lines = summary_text(replace(summary, ranks=tuple(rows))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("per step"))
    columns = list(zip(*(line.removeprefix("rank").split() for line in lines[at + 2 : at + 4]), strict=True))
    names, units = lines[at].split()[2:], lines[at + 1].split()
    shown = {name: (unit, *cells) for name, unit, cells in zip(names, units, columns[1:], strict=True)}
    assert shown["data"] == ("us", "60", "140")
    assert shown["host"] == ("ms", "0", "2.00")


def test_groups_of_an_axis_are_one_row() -> None:
    # Two tp groups of two ranks: 30 operations of 2 ms and 10 of 6 ms are 40 of 3 ms.
    rows = [
        CollectiveResult(
            group=name,
            op="all_reduce",
            api="tp",
            count=count,
            bytes=1 << 20,
            duration_ns=duration * MS,
            wait_ns=MS,
            transfer_ns=(duration - 1) * MS,
            exposed_ns=duration * MS,
            overlap=0.0,
            busbw_gb_per_s=1.0,
        )
        for name, count, duration in (("3", 30, 2), ("4", 10, 6))
    ]
    groups = [GroupResult(name=name, description="mesh_tp", ranks=(0, 1), axis="tp") for name in ("3", "4")]
    summary = replace(summary_of(4), collectives=tuple(rows), groups=tuple(groups))
    (row,) = [line for line in summary_text(summary).splitlines() if line.startswith("all_reduce")]
    assert row == "all_reduce (tp) 2 tp    40 1.00 MiB 3.00 ms 1.00 ms 3.00 ms     0 % 1.00"


def test_what_finds_no_room_is_counted_with_where_it_is() -> None:
    caveats = tuple(Caveat(f"figure {i}", "because " * 30) for i in range(30))
    lines = summary_text(replace(summary_of(8), cannot_tell=caveats)).splitlines()
    assert len(lines) < 30
    (line,) = [line for line in lines if line.startswith("not shown")]
    shown = sum(line.startswith("caveat") for line in lines)
    assert line == f"not shown   {30 - shown} caveats: see --json or the report"


def test_caveats_are_whole_sentences() -> None:
    cut = Caveat("run", "rank-00000.0/events.00000 is cut after 40000 of 4194304 bytes: later events are lost")
    text = summary_text(replace(summary_of(8), cannot_tell=(cut, Caveat("memory", "not known"))))
    assert f"caveat      {cut}" in " ".join(text.replace("\n            ", " ").split("\n"))


def test_the_bubble_of_a_pipeline_stands_beside_theory_with_its_parts() -> None:
    text = " ".join(summary_text(replace(summary_of(4), pipeline=PIPELINE)).split())
    assert "pipeline 1F1B, 4 stages on 4 ranks, 8 microbatches: bubble 40.0 % of its window (theory 27.3 %)" in text
    assert "schedule 27.0, imbalance 8.0, exposed p2p 4.0, jitter 1.0 %" in text
