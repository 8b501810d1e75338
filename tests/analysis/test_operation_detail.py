"""Every step of a rank in detail: what the summary takes its means of."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dtprof.analysis.results import PARTS, PHASES
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.steps.step_partition import round_means, sum_steps
from dtprof.analysis.timeline.operation_detail import read_detail, read_ranks, summarise_and_map
from dtprof.analysis.whatif.advice import summarise_advised
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import open_run
from tests.builders import MemoryRun, RankBuilder
from tests.synthetic import Job, generate


def test_parts_and_phases_of_each_step_are_those_that_the_summary_averages(tmp_path: Path) -> None:
    generate(tmp_path / "run", Job(pp=2, tp=2, microbatches=3, steps=6, jitter=0.2))
    run = open_run(tmp_path / "run")
    detail, summary = read_detail(run), summarise(run)
    for rank, result in zip(read_ranks(detail), summary.ranks, strict=True):
        used = (rank.steps.numbers >= detail.measured.first) & (rank.steps.numbers <= detail.measured.last)
        assert used.any()
        assert rank.parts is not None
        count = int(used.sum())
        for columns, means in ((rank.parts, result.partition_ns), (rank.phases, result.phases_ns)):
            (totals,) = sum_steps({name: column[used] for name, column in columns.items()}, [0, count])
            assert round_means(totals, count) == means
        length = rank.steps.windows[:, 1] - rank.steps.windows[:, 0]
        for columns, names in ((rank.parts, PARTS), (rank.phases, PHASES)):
            assert tuple(columns) == names
            assert np.array_equal(sum(columns.values()), length)


def test_details_found_with_the_summary_are_those_of_ranks_read_once_more(tmp_path: Path) -> None:
    generate(tmp_path / "run", Job(pp=2, tp=2, microbatches=3, steps=6, jitter=0.2))
    run = open_run(tmp_path / "run")
    detail = read_detail(run)
    summary, found = summarise_and_map(detail, lambda rank: rank, THIS_PROCESS)
    assert summary == summarise_advised(run)
    for one, other in zip(found, read_ranks(detail), strict=True):
        assert one.tables.rank == other.tables.rank
        assert one.parts is not None
        assert other.parts is not None
        assert all(np.array_equal(column, other.parts[name]) for name, column in one.parts.items())
        assert all(np.array_equal(column, vars(other.timing)[name]) for name, column in vars(one.timing).items())
        assert np.array_equal(one.instance, other.instance)
        assert np.array_equal(one.arrived, other.arrived)


def running(steps: int) -> MemoryRun:
    """A job of two ranks that has come so far; it makes a group of its own after two steps."""
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        for step in range(steps):
            begin = step * 100
            rank.op("all_reduce", begin + 60 + rank.rank, begin + 80, nbytes=4096)
            rank.span("optimizer", begin + 84, begin + 90)
        if steps > 2:
            rank.group("1", (0, 1), "later")
            rank.op("broadcast", steps * 100 - 5, steps * 100 - 3, nbytes=8, group=1, peer=0)
    return MemoryRun(ranks)


def test_what_a_running_job_records_between_two_readings_is_skipped() -> None:
    before, after = running(2), running(5)
    detail = read_detail(before)
    assert summarise_advised(after, surveys=detail.surveys).steps == summarise(before).steps
    ranks = list(read_ranks(replace(detail, run=after)))
    assert [int((rank.instance > 0).sum()) for rank in ranks] == [2, 2]


def test_members_of_an_operation_share_a_number_that_no_other_has(tmp_path: Path) -> None:
    job = Job(dp=2, tp=2, steps=3)
    generate(tmp_path / "run", job)
    seen: dict[int, set[tuple[str, int]]] = {}
    members: dict[int, int] = {}
    for rank in read_ranks(read_detail(open_run(tmp_path / "run"))):
        for row, number in zip(rank.operations, rank.instance.tolist(), strict=True):
            group = rank.tables.groups[int(row["group"])]
            seen.setdefault(number, set()).add((group.name, int(row["seq"])))
            members[number] = members.get(number, 0) + 1
            assert len(group.ranks) >= 2
    assert 0 not in seen
    assert {len(names) for names in seen.values()} == {1}
    assert set(members.values()) == {2, 4}
