"""Ranks that skipped the operations of an iteration together with its optimizer step."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records import events
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, found_by


def skipping_iteration(*, last: str) -> list[RankBuilder]:
    """Return ranks of which rank 2 makes the forward pass of the fourth of 8 rounds, and no more of that round.

    Its steps agree with those of the others, as it made no optimizer step either. At its end it is in the call `last`,
    or has ended.
    """
    ranks = [RankBuilder(rank, 3, closed=rank == 2 and not last) for rank in range(3)]
    for rank in ranks:
        step = 0
        for i in range(8):
            t = 1000 * i
            rank.span(events.FORWARD, t, t + 10)
            if rank.rank == 2 and i == 3:
                continue
            ends = i < 7 or rank.rank == 2
            site = rank.site("Tensor.backward", line=10)
            rank.op("all_reduce", t + 20, t + 30 if ends else None, step=step, site=site, nbytes=64)
            if ends:
                step += 1
                rank.op("all_reduce", t + 40, t + 50, step=step, site=rank.site("all_reduce", line=20), nbytes=8)
    if last:
        rank = ranks[2]
        rank.op(last, 8000, step=7, site=rank.site(last, line=30), nbytes=0)
    return ranks


def one_that_skips_an_iteration() -> JobState:
    return build_job(skipping_iteration(last=""), exit_status=1)


def one_with_a_forward_pass_more() -> JobState:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for i in range(8):
            for extra in range(1 + (rank.rank == 0 and i == 3)):
                rank.span(events.FORWARD, 1000 * i + 5 * extra, 1000 * i + 5 * extra + 2)
            site = rank.site("Tensor.backward", line=10)
            rank.op("all_reduce", 1000 * i + 20, 1000 * i + 30, step=i, site=site, nbytes=64)
    return build_job(ranks, exit_status=0, stalled=False)


FAULTY = {"rank-skipped-collective": one_that_skips_an_iteration}
SOUND = one_with_a_forward_pass_more


def test_a_forward_pass_without_a_step_reveals_a_skipped_iteration_of_a_rank_that_ended() -> None:
    finding = found_by("skipped_iteration", one_that_skips_an_iteration())[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (2,), 6)
    assert {site.line for site in finding.call_sites.values()} == {10}


@pytest.mark.parametrize(("ways", "line"), [(((9, "continue"),), 9), (((8, "continue"), (9, "continue")), 10)])
def test_the_only_branch_past_a_skipped_iteration_is_the_line_of_the_culprit(
    ways: tuple[tuple[int, str], ...], line: int
) -> None:
    place = SourcePlace(in_loop=True, following=frozenset(), loops=((5, 20),), ways_past=ways)
    job = build_job(skipping_iteration(last=""), exit_status=1, find_place=lambda _, _line: place)
    finding = found_by("skipped_iteration", job)[0]
    assert (finding.kind, finding.culprit_call_sites[2].line) == ("rank-skipped-collective", line)


def test_a_skipped_iteration_is_found_where_the_culprit_waits_in_a_later_call() -> None:
    finding = found_by("skipped_iteration", build_job(skipping_iteration(last="barrier"), exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (2,), 6)


def test_one_forward_pass_more_means_nothing_in_a_job_that_goes_well() -> None:
    assert decide(one_with_a_forward_pass_more()).outcome == "healthy"
