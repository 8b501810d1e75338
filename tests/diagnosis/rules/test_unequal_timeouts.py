"""Members or groups give up after different times."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.records.sites import Site
from dtprof.records.tables import CrashStack
from tests.builders import START_NS, RankBuilder
from tests.diagnosis.judging import CONNECTION_LOST, build_job, found_by, judge_success


def limits(*limits_s: float) -> JobState:
    return build_job(with_limits(limits_s), exit_status=0, stalled=False)


def limits_that_differ() -> JobState:
    return limits(600, 1800, 1800)


def limits_that_agree() -> JobState:
    return limits(600, 600, 600)


FAULTY = {"unequal-timeouts": limits_that_differ}
SOUND = limits_that_agree


def with_limits(limits_s: Sequence[float], *, own_s: float | None = None) -> list[RankBuilder]:
    ranks = [RankBuilder(rank, len(limits_s)) for rank in range(len(limits_s))]
    for rank, limit_s in zip(ranks, limits_s, strict=True):
        rank.groups[0] = replace(rank.groups[0], timeout_s=limit_s)
        if own_s is not None:
            number = rank.group("1", range(len(limits_s)), "tp")
            rank.groups[number] = replace(rank.groups[number], timeout_s=own_s)
    return ranks


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        (with_limits((600, 1800, 1800)), [(0,)]),
        (with_limits((7200, 7200), own_s=1800), [()]),
        (with_limits((7200, 7200), own_s=300), []),  # somebody's choice
        (with_limits((600, 600), own_s=1800), []),
        (with_limits((1800, 1800), own_s=1800), []),
    ],
)
def test_limits_that_differ_are_noted_and_do_no_harm(ranks: list[RankBuilder], culprits: list[tuple[int, ...]]) -> None:
    verdict = judge_success(ranks)
    assert (verdict.outcome, verdict.faults) == ("healthy", ())
    assert [(f.kind, f.severity, f.culprit_ranks) for f in verdict.findings] == [
        ("unequal-timeouts", "info", expected) for expected in culprits
    ]


TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete"


def one_that_gave_up(*, limits_s: Sequence[float] = (60, 2, 60), computes: bool = True, came: bool = False) -> JobState:
    """Return a job in which rank 1 gives up after 2 s on rank 0, which a signal then ends."""
    ranks = with_limits(limits_s)
    for rank in ranks:
        site = rank.site("all_reduce", line=20)
        rank.op("all_reduce", 0, 10, returned=10, site=site, nbytes=8)
        if rank.rank:
            done = 10**6 + 2 * 10**9 if rank.rank == 1 else 10**6 + 2 * 10**9 + 1000
            rank.op("all_reduce", 10**6, done, returned=done, site=site, nbytes=8, state="failed")
            rank.exception(done + 100, "RuntimeError", TIMED_OUT if rank.rank == 1 else CONNECTION_LOST, line=20)
        elif came:
            rank.op("all_reduce", 10**6 + 2 * 10**9 + 500, site=site, nbytes=8)
    end = 4 * 10**9
    job = build_job(ranks, statuses={0: (-15, end), 1: (1, end - 10**9), 2: (1, end - 10**8)})
    frames = (Site(file="/home/me/train.py", line=31, function="work"),)
    crash = CrashStack(signal=15, t_ns=START_NS + end, thread="main", frames=frames, computes=computes)
    return replace(job, ranks=job.ranks | {0: replace(job.ranks[0], crash=crash)})


def test_a_rank_with_a_shorter_timeout_is_the_culprit_where_the_late_rank_worked() -> None:
    (finding,) = [f for f in found_by("unequal_timeouts", one_that_gave_up()) if f.severity == "warning"]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("unequal-timeouts", (1,), (2,))
    assert {rank: site.line for rank, site in finding.culprit_call_sites.items()} == {1: 20}
    assert finding.call_sites[0].line == 31
    assert decide(one_that_gave_up()).findings[0].kind == "unequal-timeouts"


def test_a_late_rank_that_came_needs_no_stack() -> None:
    found = found_by("unequal_timeouts", one_that_gave_up(came=True, computes=False))
    assert [f.evidence for f in found if f.severity == "warning"] == [("rank 0 came after that",)]


@pytest.mark.parametrize(
    "job",
    [
        one_that_gave_up(computes=False),  # it may have been stuck
        one_that_gave_up(limits_s=(2, 2, 2)),  # the limit of all
        one_that_gave_up(limits_s=(60, 30, 60)),  # what ended the wait was not the limit
    ],
)
def test_a_limit_is_no_fault_where_the_wait_would_not_have_ended_well(job: JobState) -> None:
    assert [f for f in found_by("unequal_timeouts", job) if f.severity == "warning"] == []
