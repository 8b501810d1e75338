"""Findings on runs are as sure as findings of their class were right on generated programs."""

import inspect
import sys

import pytest

from dtprof.diagnosis.absent_ranks import absent_finding
from dtprof.diagnosis.divergence.skip_findings import OR_SWAPPED
from dtprof.diagnosis.findings import Evidence, Finding
from dtprof.diagnosis.measured_rates import RATES, with_measured_rate
from dtprof.diagnosis.rule import Rule
from dtprof.diagnosis.rules import KINDS, REFINEMENTS, RULES
from dtprof.diagnosis.rules.rank_stuck import find_absent
from dtprof.lint.program_order import SourcePlace
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by


@pytest.mark.parametrize(
    ("sources", "evidence", "sure"),
    [
        (("run",), Evidence.DIRECT, 0.5),
        (("run",), Evidence.BUSY, 0.9),  # of this class nothing was measured
        (("run",), None, 0.9),
        (("log",), Evidence.DIRECT, 0.9),
        (("run", "log"), Evidence.DIRECT, 0.9),
    ],
)
def test_a_measured_rate_takes_the_place_of_the_grade_of_a_run_alone(
    sources: tuple[str, ...], evidence: Evidence | None, sure: float
) -> None:
    finding = Finding(kind="rank-stuck", summary="", culprit_ranks=(), grade=0.9, evidence_class=evidence)
    assert with_measured_rate(finding, sources, {("rank-stuck", Evidence.DIRECT): 0.5}).confidence == sure


def test_rates_are_of_known_kinds_and_of_nothing_for_certain() -> None:
    assert {kind for kind, _ in RATES} <= set(KINDS)
    assert all(0.5 < rate <= 0.97 for rate in RATES.values())


def test_each_rate_is_of_evidence_that_a_rule_of_its_kind_names() -> None:
    named: dict[str, set[Evidence]] = {}
    for declared in (*RULES, *REFINEMENTS):
        find = declared.find if isinstance(declared, Rule) else declared.refine
        functions = (find, absent_finding) if find is find_absent else (find,)
        text = "".join(inspect.getsource(sys.modules[function.__module__]) for function in functions)
        for kind in declared.kinds:
            named.setdefault(kind, set()).update(e for e in Evidence if f"Evidence.{e.name}" in text)
    assert [key for key in RATES if key[1] not in named[key[0]]] == []


def at_lines(first: int, second: int, *, is_known: bool, are_ordered: bool = True) -> tuple[float, bool]:
    """Return how sure a skip of the first of two calls is, and whether it may be a swap."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        one, two = rank.site("all_reduce", line=first), rank.site("broadcast", line=second)
        for t in (0, 100):
            rank.op("all_reduce", t, t + 9, site=one, nbytes=8)
            rank.op("broadcast", t + 20, t + 29, site=two, nbytes=8, peer=0)
        if rank.rank == 1:
            rank.op("broadcast", 200, site=two, nbytes=8, peer=0)
        else:
            rank.op("all_reduce", 200, site=one, nbytes=8)

    def place(_: str, line: int) -> SourcePlace | None:
        branches = () if are_ordered else ((line, line),)
        return SourcePlace(in_loop=are_ordered, following=frozenset(), branches=branches) if is_known else None

    (finding,) = found_by("rank_skipped_collective", build_job(ranks, find_place=place))[:1]
    return finding.confidence, OR_SWAPPED in finding.evidence


def test_a_skip_may_be_a_swap_unless_the_source_has_the_two_calls_in_one_order() -> None:
    assert at_lines(10, 11, is_known=False) == (0.7, True)
    assert at_lines(10, 11, is_known=True) == (0.95, False)
    assert at_lines(10, 11, is_known=True, are_ordered=False) == (0.7, True)  # as in two branches of a hook


def test_a_skip_of_the_first_call_of_all_may_be_a_swap() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("broadcast", line=10)
        if rank.rank != 2:
            rank.op("broadcast", 0, 9, site=site, nbytes=56, peer=0)
        rank.op("broadcast", 100, site=site, nbytes=32, peer=0)
    (finding,) = found_by("rank_skipped_collective", build_job(ranks))[:1]
    assert (finding.culprit_ranks, finding.seq) == ((2,), 0)
    assert (finding.confidence, OR_SWAPPED in finding.evidence) == (0.7, True)
