"""A rank is late in most steps, at a notable cost."""

from dataclasses import replace

import pytest

from dtprof.analysis.results import StragglerResult
from dtprof.diagnosis.job_state import JobState, Stragglers
from dtprof.diagnosis.verdict import decide
from dtprof.records import events
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, ranks_in_step


def lagging(
    slowdown: float, *, share: float = 0.9, steps: int = 20, lag_ms: int = 5, blocked: float | None = 0.5
) -> JobState:
    return job_of(3, one_straggler(slowdown, share=share, steps=steps, lag_ms=lag_ms), blocked=blocked)


def one_straggler(slowdown: float, *, share: float = 0.9, steps: int = 20, lag_ms: int = 5) -> Stragglers:
    straggler = StragglerResult(
        rank=1,
        last_share=share,
        slowdown=slowdown,
        blame_ns_per_step=5_000_000,
        lag_ns_per_step=lag_ms * 1_000_000,
        phase=events.DATA,
    )
    return Stragglers(steps=steps, found=(straggler,))


def job_of(world_size: int, stragglers: Stragglers, *, blocked: float | None = 0.5) -> JobState:
    return with_stragglers(ranks_in_step(world_size, 4), stragglers, blocked=blocked)


def with_stragglers(ranks: list[RankBuilder], stragglers: Stragglers, *, blocked: float | None = 0.5) -> JobState:
    job = build_job(ranks, exit_status=0, stalled=False, find_stragglers=lambda: stragglers)
    return replace(job, ranks={rank: replace(own, blocked_share=blocked) for rank, own in job.ranks.items()})


def one_that_costs_much() -> JobState:
    return lagging(1.8)


def one_that_costs_little() -> JobState:
    return lagging(1.1)


FAULTY = {"slow-rank": one_that_costs_much}
SOUND = one_that_costs_little


@pytest.mark.parametrize(
    ("slowdown", "share", "steps", "lag_ms", "found"),
    [
        (1.8, 0.9, 20, 5, ["slow-rank"]),
        (1.8, 0.9, 20_000, 5, ["slow-rank"]),
        (1.1, 0.9, 20, 5, []),  # costs little
        (1.8, 1.0, 3, 5, []),  # three steps are too few
        (1.8, 0.6, 8, 5, []),  # five steps of eight: one of three ranks is so in 26 % of all cases
        (1.8, 0.9, 20, 1, []),  # a millisecond
    ],
)
def test_a_rank_late_again_and_again_is_slow_and_one_that_may_be_so_by_chance_is_not(
    slowdown: float, share: float, steps: int, lag_ms: int, found: list[str]
) -> None:
    verdict = decide(lagging(slowdown, share=share, steps=steps, lag_ms=lag_ms))
    assert [finding.kind for finding in verdict.findings] == found
    assert verdict.outcome == ("slow" if found else "healthy")


@pytest.mark.parametrize(
    ("world_size", "steps", "culprits"),
    [
        (4, 40, (0, 2)),
        (4, 6, ()),  # two of four are to blame in all of six steps by chance
        (3, 40, ()),  # two of three are no stragglers
    ],
)
def test_ranks_that_take_turns_in_holding_up_the_others_are_slow_together(
    world_size: int, steps: int, culprits: tuple[int, ...]
) -> None:
    first = StragglerResult(
        rank=0,
        last_share=0.55,
        slowdown=1.05,
        blame_ns_per_step=5_000_000,
        lag_ns_per_step=2_500_000,
        together_ns_per_step=2_500_000,
        slowdown_together=1.05,
        phase=None,
    )
    second = replace(first, rank=2, last_share=0.45, together_ns_per_step=30_000_000, slowdown_together=2.4)
    stragglers = Stragglers(steps=steps, found=(first, second))
    named = [finding.culprit_ranks for finding in decide(job_of(world_size, stragglers)).findings]
    assert {*named} == ({culprits} if culprits else set())


@pytest.mark.parametrize(("blocked", "found"), [(0.1, []), (0.2, ["slow-rank"]), (None, ["slow-rank"])])
def test_where_the_others_were_hardly_blocked_nobody_is_searched_for(blocked: float | None, found: list[str]) -> None:
    verdict = decide(lagging(1.2, blocked=blocked))
    assert [finding.kind for finding in verdict.findings] == found, "1 / 6 of a step is what 1.2 times as fast gains"


def test_who_waits_for_a_slow_rank_does_not_hang_in_a_job_with_another_fault() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        kind = "max" if rank.rank == 2 else "sum"
        rank.op("all_reduce", 4000, 4010, site=rank.site("all_reduce", line=50), nbytes=8, reduce_op=kind)
    verdict = decide(with_stragglers(ranks, one_straggler(1.8)))
    assert [finding.kind for finding in verdict.findings] == ["reduce-op-mismatch", "slow-rank"]
    assert verdict.outcome == "risk"
