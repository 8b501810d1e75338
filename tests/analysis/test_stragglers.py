"""Who is a straggler, and who must not be called one."""

from collections.abc import Callable

import pytest

from dtprof.analysis.results import StragglerResult
from dtprof.analysis.summary import summarise
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
    (straggler,) = summarise(MemoryRun(ranks)).stragglers
    assert (straggler.rank, straggler.blame_ns_per_step) == (0, 40 * MS)
