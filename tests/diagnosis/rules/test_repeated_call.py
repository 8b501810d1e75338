"""A rank made calls of its round again while the others went on."""

import pytest

from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records.sites import Site
from tests.builders import RankBuilder
from tests.diagnosis.judging import STEP, build_job, found_by, ranks_in_step


def publishing(
    world_size: int = 3, culprits: tuple[int, ...] = (1,), *, steps: int = 4, makes_steps: bool = True
) -> list[RankBuilder]:
    """Return ranks that average at line 10, step, and publish at line 20; in the last round culprits publish again."""
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=10), rank.site("broadcast", line=20)
        for step in range(steps):
            t, now = step * STEP, step * makes_steps
            rank.op("all_reduce", t, t + 9, site=average, step=now, nbytes=64)
            rank.op("broadcast", t + 20, t + 29, site=publish, step=now + makes_steps, nbytes=8)
        again = rank.rank in culprits
        site, op = (publish, "broadcast") if again else (average, "all_reduce")
        rank.op(op, steps * STEP, site=site, step=steps * makes_steps, nbytes=8 if again else 64)
    return ranks


def one_that_publishes_again() -> JobState:
    return build_job(publishing(), exit_status=None)


def one_that_is_late() -> JobState:
    ranks = ranks_in_step(3, 4)
    for rank in ranks[1:]:
        rank.op("all_reduce", 4 * STEP, site=rank.site("Tensor.backward", line=10), nbytes=4096)
    return build_job(ranks, exit_status=None)


def stack_of(*lines: tuple[str, int]) -> Stack:
    sites = tuple(Site(file="/home/me/train.py", line=line, function=function) for function, line in lines)
    return Stack(state="sleeping", cpu_share=0.0, frames=sites)


FAULTY = {"step-mismatch": one_that_publishes_again}
SOUND = one_that_is_late


@pytest.mark.parametrize(("world_size", "culprits"), [(2, (1,)), (3, (1,)), (5, (0, 2))])
def test_a_repeated_call_is_named_and_not_a_skip_of_the_call_of_the_others(
    world_size: int, culprits: tuple[int, ...]
) -> None:
    finding = decide(build_job(publishing(world_size, culprits), exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("step-mismatch", culprits, "broadcast")
    assert {site.line for site in finding.culprit_call_sites.values()} == {20}
    assert finding.waiting_ranks == tuple(rank for rank in range(world_size) if rank not in culprits)


def test_where_most_made_the_call_again_they_are_not_named() -> None:
    assert not found_by("repeated_call", build_job(publishing(3, (0, 1)), exit_status=None))


def test_without_steps_a_round_left_out_leaves_the_same_records() -> None:
    assert not found_by("repeated_call", build_job(publishing(makes_steps=False), exit_status=None))


@pytest.mark.parametrize(("turns", "is_named"), [(2, True), (1, False)])
def test_a_condition_past_one_loop_iteration_is_no_branch_past_all_of_them(turns: int, is_named: bool) -> None:
    # `average` has a call for each parameter, in a loop under the condition of line 9; then rank 1 publishes again.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=10, function="average"), rank.site("broadcast", line=20)
        for step in range(4):
            t = step * STEP
            for turn in range(turns):
                rank.op("all_reduce", t + 20 * turn, t + 20 * turn + 9, site=average, step=step, nbytes=64)
            rank.op("broadcast", t + 100, t + 109, site=publish, step=step + 1, nbytes=8)
        site, op = (publish, "broadcast") if rank.rank == 1 else (average, "all_reduce")
        rank.op(op, 4 * STEP, site=site, step=4, nbytes=8 if rank.rank == 1 else 64)
    main = SourcePlace(in_loop=True, following=frozenset(), loops=((5, 40),))
    turn_of = SourcePlace(in_loop=True, following=frozenset(), loops=((8, 10),), conditions=(9,))
    places = {7: main, 20: main, 10: turn_of}
    stacks = {rank: stack_of(("average", 10), ("main", 7)) for rank in (0, 2)} | {1: stack_of(("main", 20))}
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    assert bool(found_by("repeated_call", job)) is is_named


def test_a_call_by_another_caller_before_the_usual_one_is_extra() -> None:
    # `save` of line 20 is called from line 50, and in the last round by rank 1 from line 40 before.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average = rank.site("all_reduce", line=10, function="average", callers=(("main", 30),))
        last, best = (
            rank.site("barrier", line=20, function="save", callers=(("end", line), ("main", 31))) for line in (50, 40)
        )
        for step in range(4):
            t, is_odd = step * STEP, rank.rank == 1 and step == 3
            rank.op("all_reduce", t, t + 9, site=average, step=step, nbytes=64)
            first = best if step == 0 or is_odd else last  # all find the best in the first step
            rank.op("barrier", t + 20, t + 29, site=first, step=step + 1)
        again = rank.rank == 1
        rank.op("barrier" if again else "all_reduce", 4 * STEP, site=last if again else average, step=4)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("step-mismatch", (1,))
    assert finding.culprit_call_sites[1].line == 40


def counting(*, conditions: tuple[int, ...] = (20,), counted: tuple[int, ...] = (20,)) -> JobState:
    """Return three ranks that average at line 10 of a loop; rank 1 has come to the report of line 21, under line 20."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        for step in range(3):
            rank.op("all_reduce", step * STEP, step * STEP + 9, site=rank.site("all_reduce", line=10), nbytes=64)
        op, line = ("all_gather", 21) if rank.rank == 1 else ("all_reduce", 10)
        rank.op(op, 3 * STEP, site=rank.site(op, line=line), nbytes=8)
    loop = ((8, 30),)
    report = SourcePlace(
        in_loop=True, following=frozenset(), loops=loop, branches=((21, 21),), conditions=conditions, counted=counted
    )
    places = {10: SourcePlace(in_loop=True, following=frozenset({("all_gather", 21)}), loops=loop), 21: report}
    return build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))


def test_a_call_under_a_condition_on_a_counter_shows_a_rank_in_another_round() -> None:
    finding = decide(counting()).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("step-mismatch", (1,), "all_gather")
    assert finding.culprit_call_sites[1].line == 21


def test_a_condition_on_more_than_a_counter_shows_no_other_round() -> None:
    assert not found_by("repeated_call", counting(counted=()))


def test_who_went_past_a_condition_on_a_counter_that_the_others_met_is_in_another_round() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        rank.op("all_reduce", 0, 9, site=rank.site("all_reduce", line=10), nbytes=64)
        op, line = ("all_reduce", 10) if rank.rank == 1 else ("all_gather", 21)
        rank.op(op, STEP, site=rank.site(op, line=line), nbytes=8)
    loop = ((8, 30),)
    report = SourcePlace(
        in_loop=True, following=frozenset(), loops=loop, branches=((21, 21),), conditions=(20,), counted=(20,)
    )
    places = {10: SourcePlace(in_loop=True, following=frozenset({("all_gather", 21)}), loops=loop), 21: report}
    finding = decide(build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[1].line) == ("step-mismatch", (1,), 20)


def test_a_repeated_call_that_matched_the_next_is_found_before_later_size_mismatches() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        observe, average = rank.site("all_reduce", line=10), rank.site("all_reduce", line=20)
        for step in range(4):
            t, again = step * STEP, rank.rank == 2 and step == 3
            calls = [(observe, 24), *[(observe, 24)] * again, (average, 24), *[(average, 8)] * (not again)]
            for number, (site, size) in enumerate(calls):
                done = None if again and number == 2 else t + 10 * number + 9
                rank.op("all_reduce", t + 10 * number, done, site=site, step=step, nbytes=size)
        if rank.rank != 2:  # gloo took the 24 bytes of rank 2 for the 8 of these
            rank.op("all_reduce", 4 * STEP, site=observe, step=4, nbytes=24)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (2,), 10)
    assert "train.py:20 (main)" in finding.evidence[0]
