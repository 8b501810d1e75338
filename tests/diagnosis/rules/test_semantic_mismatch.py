"""Operations that match in form: wrappers whose parameters differ in order, optimizers of different age."""

from dataclasses import replace
from typing import Any

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.records.sites import Site
from dtprof.records.tables import OptimizerAge, WrappedParameters
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by

ELEMENTS = 72
SITE = Site(file="train.py", line=9, function="main")


def job_with(facts: dict[int, dict[str, Any]], *, numel: int = ELEMENTS) -> JobState:
    """Return a job that went well, in which each rank averages so many elements a step and tells this besides."""
    ranks = [RankBuilder(rank, len(facts)) for rank in facts]
    for rank in ranks:
        for step in range(3):
            rank.span("backward", 100 * step, 100 * step + 50)
            rank.op(
                "all_reduce", 100 * step + 10, 100 * step + 20, site=rank.site("all_reduce", line=20), nbytes=4 * numel
            )
            rank.span("optimizer", 100 * step + 60, 100 * step + 70)
    job = build_job(ranks, exit_status=0, stalled=False)
    return replace(job, ranks={rank: replace(state, **facts[rank]) for rank, state in job.ranks.items()})


def wrapped(*orders: str, by: str = "DistributedDataParallel") -> JobState:
    """Return a job whose ranks wrap parameters of these names, one letter each."""

    def parameters(order: str) -> WrappedParameters:
        return WrappedParameters(
            group="0", by=by, names=hash(order), count=len(order), some=tuple(order[:8]), site=SITE
        )

    return job_with({rank: {"wrapped_parameters": (parameters(order),)} for rank, order in enumerate(orders)})


def resumed(*steps: int, numel: int = ELEMENTS) -> JobState:
    """Return a job whose optimizers had made so many steps before."""
    ages = [OptimizerAge(steps=number, parameters=2, elements=ELEMENTS) for number in steps]
    return job_with({rank: {"optimizer_ages": (age,)} for rank, age in enumerate(ages)}, numel=numel)


def layers_in_another_order() -> JobState:
    return wrapped("abc", "bac", "abc")


def layers_in_one_order() -> JobState:
    return wrapped("abc", "abc", "abc")


FAULTY = {"step-mismatch": layers_in_another_order}
SOUND = layers_in_one_order


def test_who_orders_parameters_otherwise_is_named_with_the_line_and_the_first_that_differs() -> None:
    (finding,) = found_by("semantic_mismatch", layers_in_another_order())
    assert (finding.kind, finding.severity, finding.culprit_ranks) == ("step-mismatch", "error", (1,))
    assert finding.culprit_call_sites == {1: SITE}
    assert "b where they have a" in finding.summary


def test_of_two_ranks_neither_is_the_usual_one() -> None:
    (finding,) = found_by("semantic_mismatch", wrapped("ab", "ba"))
    assert (finding.culprit_ranks, finding.confidence) == ((0, 1), 0.7)


def test_the_eight_names_that_are_known_may_agree() -> None:
    (finding,) = found_by("semantic_mismatch", wrapped("abcdefghij", "abcdefghji", "abcdefghij"))
    assert "names after the first 8 differ" in finding.summary


@pytest.mark.parametrize(("steps", "culprits"), [((5, 3, 5), (1,)), ((4, 4, 0), (2,)), ((5, 3), (1,))])
def test_who_resumes_at_another_step_is_named(steps: tuple[int, ...], culprits: tuple[int, ...]) -> None:
    (finding,) = found_by("semantic_mismatch", resumed(*steps))
    assert (finding.kind, finding.culprit_ranks) == ("step-mismatch", culprits)
    assert {site.line for site in finding.culprit_call_sites.values()} == {20}


def test_ranks_that_do_not_average_these_gradients_may_differ() -> None:
    assert found_by("semantic_mismatch", resumed(5, 3, 5, numel=1)) == []
    assert found_by("semantic_mismatch", resumed(5, 5, 5)) == []
