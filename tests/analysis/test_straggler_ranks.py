"""Who is a straggler, and who must not be called one."""

from collections.abc import Callable, Sequence

import pytest

from dtprof.analysis.results import StragglerResult
from dtprof.analysis.run_summary import summarise
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
STEP = 100 * MS


def run_steps(
    num_ranks: int, late_ns: Callable[[int, int], int], num_steps: int = 12, num_buckets: int = 1
) -> tuple[StragglerResult, ...]:
    """Run steps of 100 ms whose gradients are reduced at the end; `late_ns(rank, step)` delays the backward pass."""
    ranks = [RankBuilder(i, world_size=num_ranks) for i in range(num_ranks)]
    for step in range(num_steps):
        begin = step * STEP
        last = max(late_ns(rank, step) for rank in range(num_ranks))
        for rank in ranks:
            late = late_ns(rank.rank, step)
            rank.span("backward", begin + 10 * MS, begin + 61 * MS + last)
            for bucket in range(num_buckets):
                issue = begin + 50 * MS + late + bucket * MS // 10
                done = begin + 60 * MS + last + bucket * MS // 10
                rank.op("all_reduce", issue, done, is_async=True)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    return summarise(MemoryRun(ranks)).stragglers


def test_last_rank_to_arrive_is_blamed_not_the_waiters() -> None:
    # Rank 2 is 20 ms late in every step; three ranks wait 20 ms each: blame 60 ms; 100 / (100 - 20) = 1.25.
    (straggler,) = run_steps(4, lambda rank, _: 20 * MS if rank == 2 else 0)
    assert straggler.rank == 2
    assert straggler.last_share == 1.0
    assert straggler.blame_ns_per_step == 60 * MS
    assert straggler.slowdown == pytest.approx(1.25)


def test_a_lag_of_more_than_the_median_step_is_compared_with_the_mean_step() -> None:
    # Steps of 20 ms and what rank 1 is late: 10 ms in two of three, 400 ms in the third. Mean: 140 of 160 ms.
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    begin = 0
    for step in range(24):
        late = (400 if step % 3 == 2 else 10) * MS
        for rank in ranks:
            own = late * rank.rank
            rank.span("backward", begin, begin + 11 * MS + late)
            rank.op("all_reduce", begin + 10 * MS + own, begin + 11 * MS + late, is_async=True)
            rank.span("optimizer", begin + 11 * MS + late, begin + 20 * MS + late)
        begin += 20 * MS + late
    (straggler,) = summarise(MemoryRun(ranks)).stragglers
    assert straggler.rank == 1
    assert straggler.lag_ns_per_step == pytest.approx(140 * MS, rel=0.2)
    assert straggler.slowdown == pytest.approx(160 / 20, rel=0.2)


def test_a_delay_counts_once_however_many_operations_are_in_flight() -> None:
    # Five buckets 0.1 ms apart, each met by everybody else 20 ms early: the threads stand still from 50.4 to 70 ms,
    # and then 0.1 ms for each further bucket: 20 ms in all.
    (straggler,) = run_steps(2, lambda rank, _: 20 * MS if rank == 1 else 0, num_buckets=5)
    assert straggler.blame_ns_per_step == 20 * MS - 4 * MS // 10


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    assert run_steps(2, lambda rank, step: 20 * MS if rank == step % 2 else 0) == ()


def test_one_bad_step_is_an_event() -> None:
    assert run_steps(4, lambda rank, step: 95 * MS if (rank, step) == (1, 6) else 0) == ()


def test_a_small_delay_is_not_notable() -> None:
    assert run_steps(4, lambda rank, _: 4 * MS if rank == 1 else 0) == ()


def test_two_stragglers_are_both_found_the_costlier_first() -> None:
    delays = {3: 30 * MS, 5: 20 * MS}
    found = run_steps(8, lambda rank, step: delays.get(rank, 0) if step % 2 == rank % 4 // 3 else 0)
    assert [straggler.rank for straggler in found] == [3, 5]


def test_a_straggler_hidden_behind_another_is_listed_with_what_mending_each_and_both_gains() -> None:
    # Of eight ranks 2 is 25 ms late in every step, 5 is 15: all wait for 2, rank 5 too, 10 ms. Without rank 2 all wait
    # for 5: 10 ms gained of 100; without rank 5 nothing; without both 25.
    first, second = run_steps(8, lambda rank, _: {2: 25 * MS, 5: 15 * MS}.get(rank, 0))
    assert (first.rank, first.blame_ns_per_step, first.last_share) == (2, 6 * 25 * MS + 10 * MS, 1.0)
    assert (first.lag_ns_per_step, first.slowdown) == (10 * MS, pytest.approx(100 / 90))
    assert (second.rank, second.blame_ns_per_step, second.last_share) == (5, 0, 0.0)
    assert (second.lag_ns_per_step, second.slowdown) == (0, 1.0)
    assert (second.together_ns_per_step, second.slowdown_together) == (25 * MS, pytest.approx(100 / 75))
    assert (second.phase, second.phases_ns) == ("backward", {"backward": 15 * MS})


def test_ranks_equally_slow_come_last_in_turns_and_are_all_listed() -> None:
    # Of six ranks 1 and 4 are 20 ms late in every step, in turns 1 ms more: each alone gains at most 1.
    found = run_steps(6, lambda rank, step: 20 * MS + (step + rank // 4) % 2 * MS if rank in (1, 4) else 0)
    assert sorted(one.rank for one in found) == [1, 4]
    assert max(one.lag_ns_per_step or 0 for one in found) < MS
    assert found[-1].together_ns_per_step == 21 * MS


def test_a_late_root_is_blamed_by_those_who_were_done_before_the_last_rank_came() -> None:
    # Root 0 comes 20 ms late; ranks 1 and 2 wait for it and are done 1 ms later; rank 3 comes 5 ms after that and is
    # last, but nobody waits for it. Blame of rank 0: 2 * 20 ms a step; rank 3: none.
    ranks = [RankBuilder(i, world_size=4) for i in range(4)]
    for step in range(8):
        for rank in ranks:
            begin = step * STEP
            rank.span("backward", begin + 10 * MS, begin + 20 * MS)
            issue = begin + {0: 50, 1: 30, 2: 30, 3: 56}[rank.rank] * MS
            done = begin + {0: 51, 1: 51, 2: 51, 3: 57}[rank.rank] * MS
            rank.op("broadcast", issue, done, peer=0)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    # But rank 3 itself works 56 ms, with or without rank 0: only without both is a step 20 ms shorter.
    root, other = summarise(MemoryRun(ranks)).stragglers
    assert (root.rank, root.blame_ns_per_step, root.lag_ns_per_step) == (0, 40 * MS, 0)
    assert (other.rank, other.blame_ns_per_step, other.together_ns_per_step) == (3, 0, 20 * MS)


def test_who_paid_and_since_when_is_reported() -> None:
    # Steps are numbered from 1: rank 1 is late from the sixth on. Three ranks wait 20 ms in 7 of 11 measured steps.
    (straggler,) = run_steps(4, lambda rank, step: 20 * MS if rank == 1 and step >= 5 else 0)
    assert straggler.since_step == 6
    assert straggler.blame_ns_per_step == 60 * MS * 7 // 11
    assert [(waiter.rank, waiter.wait_ns) for waiter in straggler.waiters] == [
        (rank, 20 * MS * 7 // 11) for rank in (0, 2, 3)
    ]


@pytest.mark.parametrize(("phase", "cause"), [("data", "input"), ("garbage_collection", "garbage"), ("forward", None)])
def test_the_phase_of_the_excess_and_its_cause_are_named(phase: str, cause: str | None) -> None:
    ranks = [RankBuilder(i, world_size=3) for i in range(3)]
    for rank in ranks:
        for step in range(8):
            begin, late = step * STEP, 20 * MS if rank.rank == 0 else 0
            rank.span(phase, begin + 5 * MS, begin + 10 * MS + late)
            rank.span("backward", begin + 10 * MS + late, begin + 50 * MS + late)
            rank.op("all_reduce", begin + 50 * MS + late, begin + 75 * MS)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    (straggler,) = summarise(MemoryRun(ranks)).stragglers
    assert (straggler.rank, straggler.phase, straggler.phases_ns) == (0, phase, {phase: 20 * MS})
    assert cause is None if straggler.cause is None else straggler.cause.startswith(str(cause))


def test_a_rank_that_another_group_held_up_is_not_to_blame() -> None:
    # tp: {0, 1}, {2, 3}; dp: {0, 2}, {1, 3}. Rank 3 takes 20 ms more before the all_reduce over tp; 2 waits for it
    # there, and comes late to the one over dp, as 3 does: 0 waits 20 ms for 2, and 1 for 3. All three waits are 3's.
    ranks = [RankBuilder(i, world_size=4) for i in range(4)]
    groups = [
        (rank.group("tp", (0, 1) if rank.rank < 2 else (2, 3)), rank.group("dp", (rank.rank % 2, rank.rank % 2 + 2)))
        for rank in ranks
    ]
    for step in range(8):
        for rank, (tp, dp) in zip(ranks, groups, strict=True):
            begin, pair_late = step * STEP, 20 * MS if rank.rank >= 2 else 0
            late = 20 * MS if rank.rank == 3 else 0
            rank.op("all_reduce", begin + 20 * MS + late, begin + 21 * MS + pair_late, group=tp)
            rank.span("backward", begin + 30 * MS + pair_late, begin + 40 * MS + pair_late)
            rank.op("all_reduce", begin + 41 * MS + pair_late, begin + 62 * MS, group=dp)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    (straggler,) = summarise(MemoryRun(ranks)).stragglers
    assert (straggler.rank, straggler.blame_ns_per_step, straggler.last_share) == (3, 60 * MS, 1.0)
    assert {waiter.rank: waiter.wait_ns for waiter in straggler.waiters} == {0: 20 * MS, 1: 20 * MS, 2: 20 * MS}


def run_pipeline(action_ns: Sequence[int], num_steps: int = 8) -> tuple[StragglerResult, ...]:
    """Run GPipe with two microbatches over stages whose forwards and backwards take these times, then an all_reduce."""
    num_ranks = len(action_ns)
    ranks = [RankBuilder(i, world_size=num_ranks) for i in range(num_ranks)]
    now = [10 * MS] * num_ranks
    for _ in range(num_steps):
        for phase, order in (("pp_forward", range(num_ranks)), ("pp_backward", range(num_ranks - 1, -1, -1))):
            for microbatch in range(2):
                for at, stage in enumerate(order):
                    rank = ranks[stage]
                    if at:
                        issued, sent = now[stage], now[order[at - 1]]
                        now[stage] = max(issued, sent + MS // 10)
                        rank.op("recv", issued, now[stage], peer=order[at - 1], tag=len(phase))
                    rank.span(phase, now[stage], now[stage] + action_ns[stage], stage=stage, microbatch=microbatch)
                    now[stage] += action_ns[stage]
                    if at + 1 < num_ranks:
                        rank.op("send", now[stage], now[stage], peer=order[at + 1], tag=len(phase))
        end = max(now) + MS
        for stage, rank in enumerate(ranks):
            rank.span("backward", now[stage], now[stage])
            rank.op("all_reduce", now[stage], end)
            rank.span("optimizer", end, end + MS)
            now[stage] = end + MS
    return summarise(MemoryRun(ranks)).stragglers


def test_the_first_stage_of_a_pipeline_comes_last_and_is_not_to_blame() -> None:
    assert run_pipeline([10 * MS] * 4) == ()


def test_a_slow_stage_is_to_blame_for_no_more_than_it_works_longer() -> None:
    # Stage 1 takes 10 ms more in each of 4 actions: 40 ms a step, and none of the two others waits longer for it.
    (straggler,) = run_pipeline([10 * MS, 20 * MS, 10 * MS])
    assert (straggler.rank, straggler.last_share) == (1, 1.0)
    assert straggler.blame_ns_per_step == 2 * 40 * MS
    assert straggler.lag_ns_per_step == pytest.approx(40 * MS, rel=1e-3)


@pytest.mark.parametrize(("num_steps", "late_ms", "listed"), [(4, 8, []), (4, 25, [2]), (12, 8, [2]), (12, 1, [])])
def test_of_few_steps_only_a_long_lag_is_more_than_chance(num_steps: int, late_ms: int, listed: list[int]) -> None:
    found = run_steps(4, lambda rank, _: late_ms * MS if rank == 2 else 0, num_steps)
    assert [straggler.rank for straggler in found] == listed
