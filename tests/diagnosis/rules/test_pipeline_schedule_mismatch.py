"""Stages of a pipeline run different schedules or numbers of microbatches."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.records import events
from dtprof.records.tables import Pipeline
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, loss, message, pair


def stages(*schedules: str, microbatches: Sequence[int] = (4, 4)) -> JobState:
    ranks = pair()
    for rank, schedule, count in zip(ranks, schedules, microbatches, strict=True):
        rank.pipelines[1] = Pipeline(schedule=schedule, num_stages=2, stages=(rank.rank,), num_microbatches=4)
        rank.span(events.PP_STEP, 0, 100 if rank.rank == 1 else None, microbatch=1)
        for microbatch in range(count):
            rank.span(events.PP_FORWARD, microbatch * 10, microbatch * 10 + 5, stage=rank.rank, microbatch=microbatch)
    message(ranks[0], "recv", 1, 60, line=4)
    loss(ranks[1], 200, done=False)
    return build_job(ranks, exit_status=None)


def schedules_that_differ() -> JobState:
    return stages("GPipe", "1F1B")


def schedules_that_agree() -> JobState:
    return stages("GPipe", "GPipe")


FAULTY = {"pipeline-schedule-mismatch": schedules_that_differ}
SOUND = schedules_that_agree


def test_fewer_microbatches_than_planned_are_a_mismatch_too() -> None:
    (finding,) = found_by("pipeline_schedule_mismatch", stages("GPipe", "GPipe", microbatches=(4, 3)))
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((1,), (0,))


def test_other_plans_explain_the_death_of_a_stage() -> None:
    job = schedules_that_differ()
    failed = RankBuilder(1, 2, closed=False)
    failed.exception(300, "RuntimeError", "shape of a microbatch")
    died = replace(job.ranks[1], exceptions=tuple(failed.exceptions))
    finding = decide(replace(job, ranks=job.ranks | {1: died})).findings[0]
    assert finding.kind == "pipeline-schedule-mismatch"
    assert finding.evidence[-1].startswith("Rank 1 raised RuntimeError: shape of a microbatch")


@pytest.mark.parametrize("plan", ["GPipe", "1F1B"])
def test_stages_with_other_numbers_of_microbatches_or_other_schedules_disagree(plan: str) -> None:
    ranks = pair()
    for rank in ranks:
        wrong = rank.rank == 1
        rank.pipelines[1] = Pipeline(
            schedule=plan if wrong else "GPipe", num_stages=2, stages=(rank.rank,), num_microbatches=4
        )
        count = 3 if wrong and plan == "GPipe" else 4
        rank.span(events.PP_STEP, 0, 100 if wrong else None, microbatch=1)
        for microbatch in range(count):
            rank.span(events.PP_FORWARD, microbatch * 10, microbatch * 10 + 5, stage=rank.rank, microbatch=microbatch)
    message(ranks[0], "recv", 1, 60, line=4)
    loss(ranks[1], 200, done=False)
    finding = found_by("pipeline_schedule_mismatch", build_job(ranks, exit_status=None))[0]
    assert finding.kind == "pipeline-schedule-mismatch"
    assert (1 in finding.culprit_ranks) or plan == "1F1B"


@pytest.mark.parametrize(("line", "is_found"), [(10, True), (40, False)])
def test_a_stage_in_a_step_that_the_others_are_past_is_a_mismatch(line: int, *, is_found: bool) -> None:
    # Ranks 0 and 1 evaluate at line 20; the last stage is in the training step that they made at line 10.
    ranks = pair(3)
    for rank in ranks:
        rank.pipelines[1] = Pipeline(schedule="GPipe", num_stages=3, stages=(rank.rank,), num_microbatches=1)
        rank.span(events.PP_STEP, 0, 50, microbatch=1)
        rank.span(events.PP_FORWARD, 0, 5, stage=rank.rank, microbatch=0)
        message(rank, "recv", (rank.rank - 1) % 3, 6, 9, line=10)
        message(rank, "recv", (rank.rank - 1) % 3, 100, line=line if rank.rank == 2 else 20)
    findings = found_by("pipeline_schedule_mismatch", build_job(ranks, exit_status=None))
    assert [finding.culprit_ranks for finding in findings] == ([(2,)] if is_found else [])


@pytest.mark.parametrize("more", [0, 1])
def test_a_stage_that_is_in_a_barrier_one_step_early_made_fewer(more: int) -> None:
    # Ranks 0 and 1 are in another step than the last stage has made, or in the one that it has ended before them.
    ranks = pair(3)
    for rank in ranks:
        rank.pipelines[1] = Pipeline(schedule="1F1B", num_stages=3, stages=(rank.rank,), num_microbatches=1)
        is_last = rank.rank == 2
        for step in range(2 if is_last else 2 + more):
            t = 100 * step
            is_over = is_last or step < 1 + more
            rank.span(events.PP_STEP, t, t + 50 if is_over else None, microbatch=1)
            rank.span(events.PP_FORWARD, t, t + 5, stage=rank.rank, microbatch=0)
            if not is_last:
                message(rank, "recv", rank.rank + 1, t + 6, t + 9 if is_over else None, line=10)
        if is_last:
            loss(rank, 400, done=False)
    found = found_by("pipeline_schedule_mismatch", build_job(ranks, exit_status=None))
    assert [finding.culprit_ranks for finding in found] == [(2,)] * more


@pytest.mark.parametrize(("counts", "culprits"), [((4, 4, 5), [(2,)]), ((4, 4, 4), [])])
def test_a_stage_that_has_trained_no_step_is_compared_by_its_one_schedule(
    counts: Sequence[int], culprits: list[tuple[int, ...]]
) -> None:
    """Without a loss function stages only go forward: rank 2 alone trains."""
    ranks = pair(3)
    for rank, count in zip(ranks, counts, strict=True):
        rank.pipelines[1] = Pipeline(schedule="GPipe", num_stages=3, stages=(rank.rank,), num_microbatches=count)
        if rank.rank == 2:
            rank.span(events.PP_STEP, 0, None, microbatch=1)
    message(ranks[0], "send", 1, 60, line=4)
    message(ranks[1], "send", 2, 60, line=4)
    message(ranks[2], "send", 1, 60, line=4)
    found = found_by("pipeline_schedule_mismatch", build_job(ranks, exit_status=None))
    assert [finding.culprit_ranks for finding in found] == culprits
