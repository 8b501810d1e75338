"""Ranks wait in init_process_group for one that does not come."""

from dataclasses import replace
from functools import partial

import pytest

from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.verdict import decide
from dtprof.records import events
from dtprof.records.sites import Site
from dtprof.records.tables import WrappedParameters
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by, judge, ranks_in_step, waiting_in_a_second_init


def joining(number: int, *, world_size: int) -> JobState:
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(number)]
    for rank in ranks:
        rank.span("init_process_group", 10, None if number < world_size else 20, site=rank.site("", line=3))
    return build_job(ranks, exit_status=None)


def one_that_never_joins() -> JobState:
    return joining(3, world_size=4)


def one_that_ended() -> JobState:
    return build_job(waiting_in_a_second_init(closed=True), exit_status=None)


def one_elsewhere(state: str, phase: str | None = None) -> JobState:
    ranks = waiting_in_a_second_init(closed=False)
    if phase is not None:
        ranks[0].span(phase, 3100)
    stack = Stack(state=state, cpu_share=0.0, frames=(), reason="no frames")
    return build_job(ranks, exit_status=None, stacks={0: stack})


def all_that_joined() -> JobState:
    return joining(4, world_size=4)


FAULTY = {
    "rank-never-joined": one_that_never_joins,
    "rank-exited": one_that_ended,
    "rank-stuck": partial(one_elsewhere, "sleeping"),
    "rank-frozen": partial(one_elsewhere, "stopped"),
    "long-operation": partial(one_elsewhere, "running", events.COMPILE),
}
SOUND = all_that_joined


def test_ranks_without_a_record_never_joined_while_others_wait_in_init() -> None:
    ranks = [RankBuilder(rank, 4, closed=False) for rank in (0, 1, 3)]
    for rank in ranks:
        rank.span("init_process_group", 10, site=rank.site("", line=3))
    verdict = judge(ranks, exit_status=None)
    finding = verdict.findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-never-joined", (2,))
    assert verdict.ranks_missing == (2,)


@pytest.mark.parametrize("has_ddp", [True, False])
def test_rank_that_is_stuck_while_another_waits_in_a_later_init_is_named_with_its_line(has_ddp: bool) -> None:
    place = Site(file="/home/me/train.py", line=21, function="train")
    stack = Stack(state="sleeping", cpu_share=0.0, frames=(place,))
    job = build_job(waiting_in_a_second_init(closed=False), exit_status=None, stacks={0: stack})
    wrapped = WrappedParameters(group="0", by="ddp", names=1, count=1, some=(), site=None)
    ranks = {r: replace(rank, wrapped_parameters=(wrapped,) * has_ddp) for r, rank in job.ranks.items()}
    verdict = decide(replace(job, ranks=ranks))
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind) == ("hang", "rank-stuck")
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((0,), (1,))
    assert (finding.culprit_call_sites[0].line, finding.call_sites[1].line) == (21, 12)
    assert "in init_process_group" in finding.summary
    assert any("destroy_process_group" in advice for advice in finding.advice) == has_ddp


def test_rank_that_ended_while_another_waits_in_a_later_init_has_exited() -> None:
    finding = found_by("rank_never_joined", build_job(waiting_in_a_second_init(closed=True), exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (0,), (1,))


@pytest.mark.parametrize(("again", "found"), [(True, [()]), (False, [])])
def test_ranks_that_are_all_in_init_once_more_do_not_find_one_another(
    again: bool, found: list[tuple[int, ...]]
) -> None:
    """Of a first group that none comes out of, addresses and ports are to blame, which no record shows."""
    ranks = ranks_in_step(3, 2 if again else 0)
    for rank in ranks:
        rank.span("init_process_group", 3000, site=rank.site("", line=12))
    findings = found_by("rank_never_joined", build_job(ranks, exit_status=None))
    assert [finding.culprit_ranks for finding in findings] == found
    assert [sorted(finding.call_sites) for finding in findings] == [[0, 1, 2]] * len(found)
