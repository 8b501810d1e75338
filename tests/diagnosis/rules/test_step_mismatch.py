"""Calls of ranks meet that belong to different steps."""

from collections.abc import Sequence

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records import events
from tests.builders import RankBuilder
from tests.diagnosis.judging import STEP, build_job, found_by, gradients, judge, kinds_after_success


def averaging(*, ahead: int = 0, skips: int | None = None) -> list[RankBuilder]:
    """Return ranks that average a loss in 10 steps, rank 0 `ahead` of them; rank 1 `skips` one, and makes up for it."""
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for step in range(10):
            if rank.rank != 1 or step != skips:
                logged(rank, step + ahead * (rank.rank == 0), 100 * step)
        if rank.rank == 1 and skips is not None:
            rank.op("all_reduce", 1100, 1120, site=rank.site("all_reduce", line=30), nbytes=8)
    return ranks


def one_that_makes_up_for_a_call() -> JobState:
    return build_job(averaging(skips=4), exit_status=0, stalled=False)


def one_that_trains_less() -> JobState:
    """Return a job that averages 8 times in line 9 to train and 3 times in 20 to validate; rank 0 trains 6 times."""
    ranks = [RankBuilder(rank, 3, closed=rank == 0) for rank in range(3)]
    for rank in ranks:
        calls = [9] * (8 if rank.rank else 6) + [20] * (2 if rank.rank else 3)
        for i, line in enumerate(calls):
            end = 100 * i + 9 if i < 9 else None
            rank.op("all_reduce", 100 * i, end, site=rank.site("all_reduce", line=line), nbytes=8)
    return build_job(ranks, exit_status=None)


def one_a_step_ahead_from_the_start() -> JobState:
    return build_job(averaging(ahead=1), exit_status=0, stalled=False)


FAULTY = {"step-mismatch": one_that_makes_up_for_a_call, "rank-skipped-collective": one_that_trains_less}
SOUND = one_a_step_ahead_from_the_start


def logged(rank: RankBuilder, step: int, t: int) -> None:
    rank.span(events.BACKWARD, t, t + 5)
    rank.span(events.OPTIMIZER, t + 6, t + 8)
    rank.op("all_reduce", t + 10, t + 20, site=rank.site("all_reduce", line=9), nbytes=8, step=step + 1)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_left_a_call_out_and_makes_it_up_later_is_out_of_step(culprit: int, world_size: int) -> None:
    ranks = [RankBuilder(rank, world_size) for rank in range(world_size)]
    for rank in ranks:
        for step in range(10):
            if rank.rank != culprit or step != 4:
                logged(rank, step, 100 * step)
        if rank.rank == culprit:
            rank.op("all_reduce", 1100, 1120, site=rank.site("all_reduce", line=30), nbytes=8)
    finding = found_by("step_mismatch", build_job(ranks, exit_status=0, stalled=False))[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (culprit,), 4)
    assert finding.culprit_call_sites[culprit].line == 9


@pytest.mark.parametrize(
    ("others_ahead", "said"),
    [
        (1, "Rank 1 skipped an optimizer step: at #6 of the default group it is in step 6, the others in step 7."),
        (2, "Rank 1 skipped 2 optimizer steps: at #6 of the default group it is in step 6, the others in step 8."),
        (-1, "Rank 1 made an optimizer step more than the others: at #6 of the default group it is in step 6, "),
    ],
)
def test_equal_forward_counts_reveal_an_extra_optimizer_step(others_ahead: int, said: str) -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for i in range(12):
            rank.span(events.FORWARD, 100 * i, 100 * i + 5)
            ahead = others_ahead if rank.rank != 1 and i >= 6 else 0
            rank.op("all_reduce", 100 * i + 10, 100 * i + 20, site=rank.site("", line=9), nbytes=8, step=i + ahead)
    (finding,) = judge(ranks, exit_status=0, stalled=False).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 6)
    assert finding.summary.startswith(said)
    assert "condition around optimizer.step()" in finding.advice[0]


def test_ranks_whose_steps_differ_from_the_start_are_in_step() -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for step in range(10):
            logged(rank, step + (rank.rank == 0), 100 * step)  # rank 0 made a step of its own before
    assert kinds_after_success(ranks) == []


def test_one_call_at_a_line_of_rank_0_alone_is_no_shift() -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for step in range(10):
            line = 30 if rank.rank == 0 and step == 4 else 9
            rank.op("all_reduce", 100 * step, 100 * step + 9, site=rank.site("all_reduce", line=line), nbytes=8, step=0)
    assert kinds_after_success(ranks) == []


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ((9, 10, 9), ("step-mismatch", (1,), 4)),  # the call of its own line is one too many
        ((7, 10, 9), ("rank-exited", (0, 2), 9)),  # others left at other times: they left too early
        ((9, 11, 9), ("rank-exited", (0, 2), 10)),  # one line of its own, two calls more
    ],
)
def test_an_extra_call_is_found_where_all_peers_ended_with_equal_counts(
    counts: Sequence[int], found: tuple[str, tuple[int, ...], int]
) -> None:
    ranks = [RankBuilder(rank, 3, closed=rank != 1) for rank in range(3)]
    for rank, count in zip(ranks, counts, strict=True):
        for i in range(count):
            line = 64 if rank.rank == 1 and i == 4 else 60
            waits = rank.rank == 1 and i == count - 1
            site = rank.site("all_reduce", line=line)
            rank.op("all_reduce", 100 * i, None if waits else 100 * i + 50, site=site, nbytes=4, step=0)
    kind, culprits, seq = found
    finding = judge(ranks, exit_status=1).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == (kind, culprits, seq)


SHARDED = (("all_gather", 18, 104), ("all_gather", 18, 100), ("reduce_scatter", 19, 300), ("reduce_scatter", 19, 312))
"""One round: operation, line, bytes."""


@pytest.mark.parametrize(
    ("own_line", "found"),
    [
        (23, ("step-mismatch", (0,), 16)),
        (18, ("step-mismatch", (0,), 18)),  # no line of its own: of the two passes of the step, the second
    ],
)
def test_an_extra_forward_pass_is_found_by_its_line_though_the_job_fails_two_calls_later(
    own_line: int, found: tuple[str, tuple[int, ...], int]
) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        calls = [*SHARDED * 4, *((op, own_line, nbytes) for op, _, nbytes in SHARDED[:2]), SHARDED[0]]
        calls = calls if rank.rank == 0 else [*SHARDED * 4, *SHARDED[:3]]
        for i, (op, line, nbytes) in enumerate(calls):
            ends = i < len(calls) - 1
            site = rank.site(op, line=line)
            rank.op(op, 100 * i, 100 * i + 50 if ends else None, step=i // 4, site=site, nbytes=nbytes)
    kind, culprits, seq = found
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == (kind, culprits, seq)


def sharded(*last: str, usual: str = "G18 G18 S19 S19", steps: int = 4) -> list[RankBuilder]:
    """Return ranks that gather and scatter in steps, then make these calls; the last of them hangs."""
    ranks = [RankBuilder(rank, len(last), closed=False) for rank in range(len(last))]
    names = {"G": "all_gather", "S": "reduce_scatter", "R": "all_reduce"}
    for rank, own in zip(ranks, last, strict=True):
        calls = [*(usual.split() * steps), *own.split()]
        for i, call in enumerate(calls):
            ends = i < len(calls) - 1
            site = rank.site(names[call[0]], line=int(call[1:]))
            rank.op(names[call[0]], 100 * i, 100 * i + 50 if ends else None, step=i // 4, site=site, nbytes=8)
    return ranks


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("usual", ["G18 G18 S19 S19", 5 * "G18 G18 S19 S19 " + "G23 G23 R24"])
def test_calls_of_an_extra_pass_are_found_though_they_matched_usual_ones(usual: str, world_size: int) -> None:
    calls = ["G18 G18 S19"] * (world_size - 1)
    finding = judge(sharded(*calls, "G23 G23 R24", usual=usual, steps=3), exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("step-mismatch", (world_size - 1,))
    assert finding.seq == 3 * len(usual.split())
    assert finding.culprit_call_sites[world_size - 1].line == 23
    assert "calls apart" not in finding.summary


@pytest.mark.parametrize(
    ("branches", "own", "kind"),
    [
        (((20, "continue"),), "G18 G18 G18 R24", "rank-skipped-collective"),
        ((), "G18 G18 G18 R24", "step-mismatch"),
        (((20, "continue"),), "G18 G18 G23 R24", "step-mismatch"),
    ],
)
def test_a_forward_pass_that_meets_a_backward_pass_is_the_next_one_where_the_source_leads_past_the_latter(
    branches: tuple[tuple[int, str], ...], own: str, kind: str
) -> None:
    """Forward passes gather at line 18, backward passes at line 22."""
    last = "G18 G18 G22 S22"
    ranks = sharded(last, last, own, usual="G18 G18 G22 G22 G22 S22 S22")
    places = {
        18: SourcePlace(in_loop=True, following=frozenset(), loops=((10, 30),)),
        22: SourcePlace(in_loop=True, following=frozenset(), loops=((10, 30),), ways_past=branches),
    }
    job = build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))
    found = [finding for finding in found_by("step_mismatch", job) if finding.culprit_ranks == (2,)]
    assert found[0].kind == kind
    if kind == "rank-skipped-collective":
        assert found[0].culprit_call_sites[2].line == 20


@pytest.mark.parametrize("own", ["R23 R23 R24", "G18 G18 R24", "G23 G18 S24"])
def test_calls_that_differ_in_operation_or_match_again_are_no_extra_pass(own: str) -> None:
    job = build_job(sharded("G18 G18 S19", "G18 G18 S19", own), exit_status=None)
    assert not [finding for finding in found_by("step_mismatch", job) if "extra" in finding.summary]


def test_calls_of_a_thread_without_steps_may_match_in_different_steps() -> None:
    def verdict(thread: int) -> str:
        ranks = [RankBuilder(rank, 3) for rank in range(3)]
        for rank in ranks:
            own = rank.group("own", range(3))
            line = rank.site("all_gather", line=30)
            for step in range(5):
                gradients(rank, step * STEP, done=True)
                rank.span("optimizer", step * STEP + 300, step * STEP + 310)
                late = 2 * (rank.rank == 1)  # one rank's calls meet those of the others two steps later
                for i in range(late if step == 0 else 0):
                    rank.span("optimizer", 320 + 20 * i, 330 + 20 * i)
                for i in range(2):
                    t = step * STEP + 500 + i * 100
                    where = step + (late if step > 0 else 0)
                    rank.op("all_gather", t, t + 9, group=own, site=line, thread=thread, step=where)
        return judge(ranks, exit_status=0, stalled=False, statuses=dict.fromkeys(range(3), (0, 9000))).outcome

    assert (verdict(thread=2), verdict(thread=1)) == ("healthy", "risk")


@pytest.mark.parametrize(("early", "culprits"), [((1,), (1,)), ((0, 1), ()), ((), ())])
def test_an_optimizer_step_in_one_iteration_alone_is_extra(early: tuple[int, ...], culprits: tuple[int, ...]) -> None:
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        for step in range(9):
            is_early = step == 3 and rank.rank in early
            logged(rank, step + is_early, 100 * step)
            if is_early:
                rank.span(events.OPTIMIZER, 308, 309)
    found = found_by("step_mismatch", build_job(ranks, exit_status=0, stalled=False))
    assert [finding.culprit_ranks for finding in found] == ([culprits] if culprits else [])


def test_an_extra_iteration_before_the_last_call_leaves_the_rank_one_behind() -> None:
    # As one that started from an older checkpoint; the others have ended.
    ranks = [RankBuilder(rank, 3, closed=rank != 1) for rank in range(3)]
    for rank in ranks:
        rounds = 5 + (rank.rank == 1)
        for i in range(rounds):
            rank.op("all_reduce", i * STEP, i * STEP + 9, site=rank.site("all_reduce", line=10), nbytes=8)
        done = None if rank.rank == 1 else rounds * STEP + 9
        rank.op("all_reduce", rounds * STEP, done, site=rank.site("all_reduce", line=20), nbytes=8)
    finding = found_by("step_mismatch", build_job(ranks, exit_status=1))[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 5)


def test_a_rank_that_left_the_training_early_and_ended_skipped_its_last_rounds() -> None:
    finding = found_by("step_mismatch", one_that_trains_less())[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (0,), 6)


def test_scattered_skips_are_no_extra_calls_where_nothing_counts_iterations() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        calls = [(number, place) for number in range(5) for place in range(9)]
        if rank.rank == 1:
            calls = [call for call in calls if call not in ((3, 2), (3, 4), (3, 6))]
        for t, (_, place) in enumerate(calls):
            site = rank.site("all_gather", line=10 + place)
            rank.op("all_gather", 10 * t, 10 * t + 5, returned=10 * t + 1, site=site, nbytes=64)
    (finding,) = found_by("step_mismatch", build_job(ranks, exit_status=None))
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (1,), 29)
    assert "3 calls apart" in finding.summary  # and not 6, by which the next round fits


def test_equal_calls_in_fewer_steps_are_no_extra_calls_of_a_rank_that_ended() -> None:
    ranks = [RankBuilder(rank, 4, closed=rank in (0, 2)) for rank in range(4)]
    for rank in ranks:
        some = rank.group("students", (1, 2, 3))
        steps = 0
        for turn in range(8):
            t, leaves_out = 1000 * turn, rank.rank == 2 and turn == 4
            rank.op("broadcast", t, t + 9, site=rank.site("broadcast", line=10), step=steps, nbytes=8)
            if rank.rank and not leaves_out:
                done = None if rank.rank != 2 and turn == 7 else t + 60
                rank.op("all_reduce", t + 50, done, site=rank.site("all_reduce", line=20), step=steps, group=some)
                steps += 1
    assert not [f for f in found_by("step_mismatch", build_job(ranks, exit_status=None)) if f.op == "broadcast"]


def averaged_metrics(*, by_caller: bool) -> list[RankBuilder]:
    """Return ranks that average two metrics ten times by one helper; rank 2 in the other order."""
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        lines = (30, 20) if rank.rank == 2 else (20, 30)
        for nth in range(20):
            callers = (("log", lines[nth % 2]), ("main", 50)) if by_caller else ()
            rank.op(
                "all_reduce",
                100 * nth,
                100 * nth + 9,
                site=rank.site("all_reduce", line=7, function="average", callers=callers),
                nbytes=4,
            )
    return ranks


def test_calls_of_a_helper_in_another_order_are_named_by_who_calls_it() -> None:
    finding = found_by("step_mismatch", build_job(averaged_metrics(by_caller=True), exit_status=0, stalled=False))[0]
    assert (finding.kind, finding.culprit_ranks) == ("step-mismatch", (2,))
    assert finding.summary.startswith("Rank 2 never made all_reduce at /home/me/train.py:20 (log)")
    assert kinds_after_success(averaged_metrics(by_caller=False)) == []


def test_a_finding_names_the_callers_where_call_stacks_diverge() -> None:
    job = build_job(averaged_metrics(by_caller=True), exit_status=0, stalled=False)
    finding = decide(job).findings[0]
    assert {rank: site.line for rank, site in finding.culprit_call_sites.items()} == {2: 30}
    assert {rank: site.line for rank, site in finding.call_sites.items()} == {0: 20, 1: 20}
    assert [caller.line for caller in finding.culprit_call_sites[2].callers] == [50]


def skipping_batches(*, without: str, rounds: dict[int, int]) -> JobState:
    """Return ranks that make 12 rounds; each skips the backward pass of a round, or also its optimizer step."""
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        counted = 0
        for i in range(12):
            t = 100 * i
            skips = rounds.get(rank.rank) == i
            rank.span(events.FORWARD, t, t + 5)
            if not skips:
                rank.span(events.BACKWARD, t + 6, t + 9)
            rank.op("all_reduce", t + 10, t + 20, site=rank.site("all_reduce", line=9), nbytes=8, step=counted)
            if not skips or without == "backward":
                rank.span(events.OPTIMIZER, t + 30, t + 35)
            counted += not skips
    return build_job(ranks, exit_status=0, stalled=False)


@pytest.mark.parametrize(
    ("without", "rounds", "culprits"),
    [
        ("backward", {2: 4}, []),
        ("backward", {1: 4, 0: 5, 2: 5}, []),
        ("optimizer", {2: 4}, [(2,)]),
        ("optimizer", {1: 4, 0: 5, 2: 5}, [(1,)]),
        ("optimizer", {0: 5, 1: 5, 2: 5}, []),
    ],
)
def test_an_optimizer_step_without_a_backward_pass_is_no_skipped_step(
    without: str, rounds: dict[int, int], culprits: list[tuple[int, ...]]
) -> None:
    found = found_by("step_mismatch", skipping_batches(without=without, rounds=rounds))
    assert [finding.culprit_ranks for finding in found] == culprits


@pytest.mark.parametrize(("parts", "at", "culprits"), [(2, 3, [(2,)]), (2, 5, [(2,)]), (2, 6, [(2,)]), (1, 3, [])])
def test_a_round_made_again_in_halves_at_a_line_of_its_own_is_out_of_step(
    parts: int, at: int, culprits: list[tuple[int, ...]]
) -> None:
    """However few calls of the rounds after it have been made, steps show that the rank is behind."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        for i in range(8):
            t, retries = 1000 * i, rank.rank == 2 and i == at
            rank.span(events.BACKWARD, t, t + 5)
            for nth in range(parts if retries else 1):
                site = rank.site("all_reduce", line=80 if retries else 9)
                done = None if parts == 2 and rank.rank == 2 and i == 7 else t + 100 * nth + 20
                rank.op("all_reduce", t + 100 * nth + 10, done, site=site, nbytes=8, step=i)
            rank.span(events.OPTIMIZER, t + 500, t + 505)
        if parts == 1 or rank.rank != 2:
            rank.op("barrier", 9000, site=rank.site("barrier", line=20), step=8)
    found = found_by("step_mismatch", build_job(ranks, exit_status=None))
    assert [finding.culprit_ranks for finding in found] == culprits
    assert [(finding.step, finding.culprit_call_sites[2].line) for finding in found] == [(at, 80)] * len(culprits)
