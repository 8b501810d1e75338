"""Where steps begin and end."""

from dataclasses import replace

import numpy as np

from dtprof.analysis.steps.step_boundaries import RankSteps, agree_on_rule, choose_steps, find_steps_of
from tests.builders import START_NS, RankBuilder


def steps_of(builder: RankBuilder) -> RankSteps:
    tables = builder.tables()
    return find_steps_of(tables)


def windows(steps: RankSteps) -> list[list[int]]:
    return (steps.windows - START_NS).tolist()


def regular(durations: list[int], rank: int = 0) -> RankSteps:
    """Return steps that end after each of the durations; the first has no begin."""
    ends = np.cumsum(durations)
    return RankSteps(
        rank=rank,
        count=len(durations),
        numbers=np.arange(2, len(durations) + 1),
        windows=np.stack((ends[:-1], ends[1:]), axis=1),
        threads=(1,),
    )


def test_a_step_runs_from_the_end_of_one_optimizer_to_the_end_of_the_next() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100, 200):
        rank.span("backward", begin, begin + 50)
        rank.span("optimizer", begin + 60, begin + 90)
    steps = steps_of(rank)
    assert steps.count == 3
    assert steps.numbers.tolist() == [2, 3]
    assert windows(steps) == [[90, 190], [190, 290]]


def test_optimizers_with_no_backward_between_them_end_one_step_together() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100):
        rank.span("backward", begin, begin + 50)
        rank.span("optimizer", begin + 60, begin + 70)
        rank.span("optimizer", begin + 75, begin + 90)
    assert windows(steps_of(rank)) == [[90, 190]]


def test_an_optimizer_stepped_inside_the_backward_pass_ends_one_step_with_all_its_spans() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100):
        rank.span("backward", begin, begin + 50)
        rank.span("optimizer", begin + 10, begin + 12, step=begin // 100)
        rank.span("optimizer", begin + 20, begin + 22, step=begin // 100)
    assert windows(steps_of(rank)) == [[22, 122]]


def test_a_closure_with_its_backward_inside_the_optimizer_is_a_step() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100):
        rank.span("backward", begin + 20, begin + 50, step=begin // 100)
        rank.span("optimizer", begin + 10, begin + 90, step=begin // 100)
    assert windows(steps_of(rank)) == [[90, 190]]


def test_several_backward_passes_before_an_optimizer_are_one_step() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100):
        rank.span("backward", begin, begin + 20)
        rank.span("backward", begin + 30, begin + 50)
        rank.span("optimizer", begin + 60, begin + 90)
    assert steps_of(rank).count == 2


def test_an_optimizer_run_before_any_backward_ends_no_step() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("optimizer", 1, 2)
    rank.span("backward", 10, 20)
    rank.span("optimizer", 30, 40)
    assert steps_of(rank).count == 1


def test_a_step_whose_predecessor_was_dropped_has_no_begin() -> None:
    # The log kept steps 1, 2 and 8, 9: step 8 cannot run from the end of step 2.
    rank = RankBuilder(0, world_size=1)
    for position, step in enumerate((0, 1, 7, 8)):
        rank.span("backward", 100 * position, 100 * position + 50, step=step)
        rank.span("optimizer", 100 * position + 60, 100 * position + 90, step=step)
    steps = steps_of(rank)
    assert steps.numbers.tolist() == [2, 9]
    assert windows(steps) == [[90, 190], [290, 390]]


def test_a_step_left_open_by_a_kill_is_not_counted() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("backward", 0, 50)
    rank.span("optimizer", 60, 90)
    rank.span("backward", 100, 150)
    rank.span("optimizer", 160, None)
    assert steps_of(rank).count == 1


def test_slow_steps_at_the_beginning_are_warm_up() -> None:
    # Without a begin: step 1. Median of the later half: 100. Steps 2 and 3 exceed 125, step 4 does not.
    measured = choose_steps([regular([900, 400, 126, 125, *[100] * 12])])
    assert (measured.first, measured.last, measured.warm_up) == (4, 16, 3)


def test_warm_up_takes_a_quarter_of_the_steps_at_most() -> None:
    # 8 measurable steps, slow for the first four: only 8 // 4 = 2 are left out.
    measured = choose_steps([regular([0, 300, 300, 300, 300, 100, 100, 100, 100])])
    assert measured.first == 4


def test_a_slow_step_in_the_middle_is_used() -> None:
    measured = choose_steps([regular([100] * 8 + [500] + [100] * 8)])
    assert (measured.first, measured.last) == (2, 17)


def test_ranks_that_ended_different_numbers_of_steps_use_those_that_all_have() -> None:
    measured = choose_steps([regular([100] * 9, rank=0), regular([100] * 5, rank=1)])
    assert (measured.count, measured.first, measured.last) == (5, 2, 5)
    assert any("rank 1 the fewest" in caveat for caveat in map(str, measured.caveats))


def with_numbers(*numbers: int, rank: int = 0) -> RankSteps:
    return replace(regular([100] * (len(numbers) + 1), rank=rank), numbers=np.array(numbers), count=max(numbers))


def test_steps_are_used_that_follow_one_another_on_every_rank() -> None:
    # A full log keeps the first steps and the newest ones. In common: 2, 3, 4 and 91 to 95.
    measured = choose_steps([with_numbers(2, 3, 4, *range(90, 96)), with_numbers(2, 3, 4, 5, *range(91, 97), rank=1)])
    assert (measured.first, measured.last) == (91, 95)
    assert "steps: 3 more are known of every rank, but some between were dropped; figures" in str(measured.caveats[-1])
    measured = choose_steps([with_numbers(2, 3, 8, 9)])
    assert (measured.first, measured.last) == (8, 9)


def test_a_rank_that_never_steps_is_named_and_the_others_are_used() -> None:
    idle = RankSteps(rank=1, count=0, numbers=np.zeros(0, int), windows=np.zeros((0, 2), int), threads=())
    measured = choose_steps([regular([100] * 4), idle])
    assert measured.known
    assert any("rank 1 ended no optimizer step" in caveat for caveat in map(str, measured.caveats))


def test_a_single_step_can_not_be_measured() -> None:
    assert not choose_steps([regular([100])]).known


def test_where_the_program_marks_its_steps_only_its_marks_count() -> None:
    # A GAN: two bursts an iteration. The first iteration ends steps 1 and 2 by its optimizers, before the first mark.
    rank = RankBuilder(0, world_size=1)
    for i, begin in enumerate((0, 100, 200)):
        for half in (0, 40):
            step = half // 40 if i == 0 else i + 1
            rank.span("backward", begin + half, begin + half + 20, step=step)
            rank.span("optimizer", begin + half + 20, begin + half + 30, step=step)
        rank.span("step", begin + 90, begin + 90, step=i + 2)
    steps = steps_of(rank)
    assert (steps.rule, steps.count) == ("marks", 3)
    assert steps.numbers.tolist() == [2, 3]
    assert windows(steps) == [[90, 190], [190, 290]]


def test_marks_that_say_how_many_there_were_number_the_steps_whatever_was_dropped_before() -> None:
    rank = RankBuilder(0, world_size=1)
    for i in (41, 42, 43):
        rank.span("step", 100 * i, 100 * i, step=i + 1, microbatch=i)
    steps = steps_of(rank)
    assert (steps.count, steps.numbers.tolist()) == (43, [42, 43])


def test_marks_whose_numbers_cannot_be_are_counted() -> None:
    rank = RankBuilder(0, world_size=1)
    for i, number in enumerate((41, 7, 43)):
        rank.span("step", 100 * i, 100 * i, step=i + 1, microbatch=number)
    assert steps_of(rank).numbers.tolist() == [2, 3]


def test_two_optimizers_with_a_backward_pass_each_make_a_step_each_without_marks() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 50, 100, 150):
        rank.span("backward", begin, begin + 20)
        rank.span("optimizer", begin + 20, begin + 30)
    assert windows(steps_of(rank)) == [[30, 80], [80, 130], [130, 180]]


def test_without_an_optimizer_a_step_runs_from_one_batch_to_the_next_and_the_summary_says_so() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("data", 50, 60, thread=2)
    for begin in (0, 100, 210, 330):
        rank.span("data", begin, begin + 10)
    steps = steps_of(rank)
    assert (steps.rule, steps.threads) == ("data", (1,))
    assert windows(steps) == [[0, 100], [100, 210], [210, 330]]
    assert any("data loader" in caveat for caveat in map(str, choose_steps([steps]).caveats))


def test_two_batches_are_no_steps() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("data", 0, 10)
    rank.span("data", 100, 110)
    assert steps_of(rank).count == 0


def test_without_data_a_step_is_the_period_of_the_operations_cut_at_its_longest_pause() -> None:
    # A broadcast to begin with, then six times all_gather, all_reduce of 8 and of 4 bytes. The pause of 80 lies before
    # the all_gather, so the all_reduce of 4 bytes ends a step: at 30, 130, ..., 530.
    rank = RankBuilder(0, world_size=2)
    rank.op("broadcast", -50, -40, nbytes=8)
    for begin in range(0, 600, 100):
        rank.op("all_gather", begin + 10, begin + 15, nbytes=8)
        rank.op("all_reduce", begin + 18, begin + 20, nbytes=8)
        rank.op("all_reduce", begin + 22, begin + 30, nbytes=4)
    steps = steps_of(rank)
    assert (steps.rule, steps.count, steps.threads) == ("operations", 6, (1,))
    assert windows(steps) == [[begin + 30, begin + 130] for begin in range(0, 500, 100)]
    assert any("period" in caveat for caveat in map(str, choose_steps([steps]).caveats))


def test_operations_behind_the_loop_do_not_hide_its_period() -> None:
    rank = RankBuilder(0, world_size=2)
    for begin in range(0, 600, 100):
        rank.op("all_reduce", begin + 10, begin + 15, nbytes=8)
    rank.op("barrier", 620, 630)
    steps = steps_of(rank)
    assert (steps.rule, steps.count) == ("operations", 6)


def test_operations_that_do_not_repeat_are_no_steps() -> None:
    rank = RankBuilder(0, world_size=2)
    for i in range(20):
        rank.op("all_reduce", 10 * i, 10 * i + 5, nbytes=i)
    assert steps_of(rank).count == 0


def test_ranks_agree_on_the_strongest_rule_and_the_others_have_no_steps() -> None:
    # Rank 1 only serves batches: its data loader makes no steps where rank 0 has an optimizer.
    server = RankBuilder(1, world_size=2)
    for begin in range(0, 500, 100):
        server.span("data", begin, begin + 10)
    by_rank = agree_on_rule({0: regular([100] * 4), 1: steps_of(server)})
    assert {rank: (steps.rule, steps.count) for rank, steps in by_rank.items()} == {
        0: ("optimizer", 4),
        1: ("optimizer", 0),
    }
    measured = choose_steps(list(by_rank.values()))
    assert measured.known
    assert any("rank 1 ended no optimizer step" in caveat for caveat in map(str, measured.caveats))
