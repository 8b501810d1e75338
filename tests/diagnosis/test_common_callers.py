"""Of a line so many callers are compared as ranks have in common."""

import pytest

from dtprof.diagnosis.common_callers import count_common_callers
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records.schema import MOST_CALLERS
from dtprof.records.sites import Site
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job

LOSS, RECALL, COUNT = ("train", 20), ("train", 30), ("evaluate", 40)
MAIN, WITH_WRITER = ("main", 80), ("main", 90)


def sites(*ways: tuple[tuple[str, int], ...]) -> list[Site]:
    rank = RankBuilder(0, 2)
    return [rank.sites[rank.site(line=7, function="average", callers=callers)] for callers in ways]


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ([[(LOSS, MAIN), (RECALL, MAIN)], [(RECALL, MAIN), (LOSS, MAIN)]], MOST_CALLERS),
        ([[(LOSS, MAIN)], [(LOSS, MAIN), (RECALL, MAIN)]], MOST_CALLERS),  # one makes a call more
        ([[(LOSS, WITH_WRITER), (RECALL, WITH_WRITER)], [(LOSS, MAIN), (RECALL, MAIN)]], 1),
        ([[(LOSS, WITH_WRITER), (COUNT, MAIN)], [(LOSS, MAIN), (COUNT, MAIN)]], 1),
        ([[(LOSS, MAIN)], [(RECALL, MAIN)]], 0),  # branches of a rank
        ([[(LOSS, MAIN)], [()]], 0),  # callers of one are not known
    ],
)
def test_callers_that_one_rank_has_in_place_of_another_do_not_count(
    ranks: list[list[tuple[tuple[str, int], ...]]], count: int
) -> None:
    counts = count_common_callers([sites(*ways) for ways in ranks])
    assert [*counts.values()] == ([] if count == MOST_CALLERS else [count])


@pytest.mark.parametrize("is_odd", [True, False])
def test_a_rank_that_trains_from_a_line_of_its_own_hides_no_other_order(is_odd: bool) -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        outer = WITH_WRITER if rank.rank == 0 else MAIN
        lines = (RECALL, LOSS) if is_odd and rank.rank == 2 else (LOSS, RECALL)
        for nth in range(20):
            site = rank.site("all_reduce", line=7, function="average", callers=(lines[nth % 2], outer))
            rank.op("all_reduce", 100 * nth, 100 * nth + 9, site=site, nbytes=4)
    findings = decide(build_job(ranks, exit_status=0, stalled=False)).findings
    assert [(finding.kind, finding.culprit_ranks) for finding in findings] == [("step-mismatch", (2,))] * is_odd
    for finding in findings:
        assert finding.culprit_call_sites[2].line == RECALL[1]


@pytest.mark.parametrize("is_odd", [True, False])
def test_a_round_of_one_caller_too_many_is_told_from_the_next_round(is_odd: bool) -> None:
    """`average` of two models is called twice from line 61 in a round, then once from line 70; rank 0 has a writer."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    critic, generator = ("train", 61), ("train", 70)
    for rank in ranks:
        outer = WITH_WRITER if rank.rank == 0 else MAIN
        rounds = [critic, critic, generator] * 3 + [critic, critic]
        newest = critic if is_odd and rank.rank == 2 else generator
        for nth, line in enumerate([*rounds, newest]):
            site = rank.site("all_reduce", line=7, function="average", callers=(line, outer))
            is_open = nth == len(rounds)
            rank.op("all_reduce", 100 * nth, None if is_open else 100 * nth + 9, site=site, nbytes=4, step=nth)
    inner, outer_loop = (60, 62), (59, 71)
    places = {
        61: SourcePlace(in_loop=True, following=frozenset(), loops=(inner, outer_loop)),
        70: SourcePlace(in_loop=True, following=frozenset(), loops=(outer_loop,)),
    }
    job = build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind == "step-mismatch") == is_odd
    if is_odd:
        assert finding.culprit_ranks == (2,)
        assert finding.culprit_call_sites[2].line == 61
        assert "called at /home/me/train.py:61" in finding.summary
