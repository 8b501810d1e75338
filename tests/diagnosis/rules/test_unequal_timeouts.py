"""Members or groups give up after different times."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.diagnosis.job_state import JobState
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, judge_success


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
