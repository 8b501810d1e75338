"""Figures that are kept up as steps end: those that a summary of the same steps gives, to the nanosecond."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.results import PARTS, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.monitor import step_aggregates
from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.step_aggregates import NewestStep, StepAggregates
from dtprof.records.reader import open_run
from tests import builders
from tests.builders import RankBuilder
from tests.golden.commands import unpack
from tests.monitor.growing import grow
from tests.monitor.test_live_run import MS, STEP, two_ranks
from tests.synthetic import Job, generate

POLLS = 9
OF_SINGLE_OPERATIONS = ("timeline", "critical_path", "lateness")
OF_HOW_RANKS_END = ("wall_ns",)
"""A log tells of its end beside its records; until then the newest record is the end."""


def window(run: Path, **bounds: int) -> LiveWindow:
    """Return what is there at a first poll."""
    live = LiveWindow(run, **bounds)
    live.poll()
    return live


def differences(run: Path, *, polls: int = POLLS) -> tuple[dict[str, Any], int]:
    """Return in what a summary kept up while a run grows differs from that of the whole run, and how many folds."""
    whole = summarise(open_run(run))
    aggregates = StepAggregates(max_steps=1 << 20)
    live: LiveWindow | None = None
    summary: Summary | None = None
    for _ in grow(run, polls):
        live = live or LiveWindow(run, max_steps=1 << 20, max_rows=1 << 30)
        live.poll()
        summary = aggregates.take(live.frozen()).summary
    assert summary is not None
    assert live is not None
    live.close()
    names = [field.name for field in fields(Summary) if field.name not in (*OF_SINGLE_OPERATIONS, *OF_HOW_RANKS_END)]
    unlike = {name: (getattr(summary, name), getattr(whole, name)) for name in names}
    return {name: pair for name, pair in unlike.items() if pair[0] != pair[1]}, len(aggregates._folds)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline-tensor", "slow"])
def test_stored_run_fed_part_by_part_gives_its_summary_exactly(name: str, tmp_path: Path) -> None:
    unpack(f"runs/{name}", tmp_path)
    run = next(tmp_path.rglob("run.json")).parent
    unlike, num_folds = differences(run)
    assert unlike == {}
    assert num_folds >= 5  # else nothing was kept up


@pytest.mark.parametrize(
    "job",
    [
        Job(dp=4, tp=2, steps=40, jitter=0.02, slow={3: 1.4}),
        Job(dp=2, tp=2, pp=2, microbatches=3, steps=23, jitter=0.2),
    ],
    ids=["data-parallel", "pipeline"],
)
def test_synthetic_job_fed_part_by_part_gives_its_summary_exactly(job: Job, tmp_path: Path) -> None:
    generate(tmp_path / "run", job)
    unlike, num_folds = differences(tmp_path / "run")
    assert unlike == {}
    assert num_folds == POLLS


def test_warm_up_is_skipped_once_it_is_known_to_be_one(tmp_path: Path) -> None:
    ranks = two_ranks(12)
    for rank in ranks:  # steps 2 and 3 take 3 s more than the others, which the first fold cannot know
        for table in (rank._operations, rank._spans, rank._samples):
            for row in table:
                late = 3_000 * MS * min(2, row["step"])
                row.update({name: row[name] + late for name in row if name.endswith("_ns") and row[name] > 10 * STEP})
    run = builders.write_run(tmp_path / "run", ranks)
    assert summarise(open_run(run)).steps.used == (4, 12)
    assert differences(run, polls=3) == ({}, 3)


def test_only_new_steps_are_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = []
    real = step_aggregates.reduce_run

    def note(*arguments: Any, **named: Any) -> Any:
        reduced.append((named["measured"].first, named["measured"].last))
        return real(*arguments, **named)

    monkeypatch.setattr(step_aggregates, "reduce_run", note)
    run = builders.write_run(tmp_path / "run", two_ranks(40))
    aggregates = StepAggregates()
    for _ in grow(run, 4):
        live = window(run)
        aggregates.take(live)
        aggregates.take(live)  # nothing has ended since
    assert [first for first, _ in reduced] == [2, *(last + 1 for _, last in reduced[:-1])]
    assert reduced[-1][1] == 40
    assert len(reduced) == 4


def test_oldest_steps_go_once_enough_newer_ones_are_summed_up(tmp_path: Path) -> None:
    run = builders.write_run(tmp_path / "run", two_ranks(40))
    aggregates = StepAggregates(max_steps=8)
    for _ in grow(run, 10):  # 4 steps each
        summary = aggregates.take(window(run)).summary
    assert summary.steps.used is not None
    first, last = summary.steps.used
    assert last == 40
    assert 8 <= last - first + 1 < 16
    assert summary.ranks[1].partition_ns is not None
    assert summary.ranks[1].partition_ns["exposed_wait"] == 20 * MS


def test_step_with_an_operation_under_way_waits_for_it(tmp_path: Path) -> None:
    ranks = two_ranks(10)
    ranks[0].op("all_reduce", 9 * STEP + 70 * MS, is_async=True)  # returned, and not done
    found = StepAggregates().take(window(builders.write_run(tmp_path / "run", ranks))).newest
    assert found is not None
    assert found.number == 9


def test_restarted_job_begins_anew(tmp_path: Path) -> None:
    run = builders.write_run(tmp_path / "run", two_ranks(8))
    aggregates = StepAggregates()
    live = window(run)
    assert aggregates.take(live).summary.steps.count == 8
    again = two_ranks(4)
    for rank in again:
        rank.attempt = 1
    other = builders.write_run(tmp_path / "again", again)
    for folder in ("rank-00000.1", "rank-00001.1"):
        (other / folder).rename(run / folder)
    live.poll()
    assert aggregates.take(live).summary.steps.used == (2, 4)


def newest_of(run: Path) -> NewestStep | None:
    return StepAggregates().take(window(run)).newest


def test_parts_are_those_of_the_newest_step_and_sum_to_it(tmp_path: Path) -> None:
    found = newest_of(builders.write_run(tmp_path / "run", two_ranks(40)))
    assert found is not None
    # From the end of one optimizer step (95 ms) to that of the next. Rank 0 computes for 20 + 60 ms and meets rank 1 at
    # 80 ms; rank 1 computes for 20 + 40 ms and waits from 60 ms. Both take 5 ms to transfer and 5 to optimise; 10 rest.
    assert (found.number, dict(found.duration_ns)) == (40, {0: STEP, 1: STEP})
    nothing = dict.fromkeys(PARTS, 0)
    same = {"exposed_transfer": 5 * MS, "optimizer": 5 * MS, "host": 10 * MS}
    assert found.parts_ns[0] == nothing | same | {"compute": 80 * MS}
    assert found.parts_ns[1] == nothing | same | {"compute": 60 * MS, "exposed_wait": 20 * MS}


def test_step_is_one_that_the_slowest_rank_has_ended(tmp_path: Path) -> None:
    found = newest_of(builders.write_run(tmp_path / "run", [two_ranks(12)[0], two_ranks(10)[1]]))
    assert found is not None
    assert found.number == 10


def test_step_that_the_program_marks_has_the_number_that_it_has_in_the_run(tmp_path: Path) -> None:
    ranks = two_ranks(40)
    for rank in ranks:
        for number in range(1, 41):  # the optimizer ended a step before the first mark
            rank.span("step", number * STEP - MS, number * STEP - MS, step=number, microbatch=number)
    found = newest_of(builders.write_run(tmp_path / "run", ranks))
    assert found is not None
    assert found.number == 40


def test_ranks_without_steps_are_summarised_as_a_whole_and_have_no_newest_one(tmp_path: Path) -> None:
    ranks = [RankBuilder(number, 2) for number in range(2)]
    for rank in ranks:
        rank.op("all_reduce", MS, 2 * MS)
    found = StepAggregates().take(window(builders.write_run(tmp_path / "run", ranks)))
    assert found.newest is None
    assert [row.count for row in found.summary.collectives] == [1]


def test_rank_whose_operations_are_not_seen_to_end_has_a_step_time_and_no_parts(tmp_path: Path) -> None:
    ranks = two_ranks(10)
    ranks[1].op("all_reduce", 9 * STEP + 86 * MS, 9 * STEP + 87 * MS, flags=0)
    found = newest_of(builders.write_run(tmp_path / "run", ranks))
    assert found is not None
    assert dict(found.duration_ns) == {0: STEP, 1: STEP}
    assert set(found.parts_ns) == {0}
