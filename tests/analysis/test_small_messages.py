"""Operations better joined: many, small, and in the way."""

from dtprof.analysis.results import SmallMessages
from dtprof.analysis.run_summary import summarise
from tests.builders import MemoryRun, RankBuilder

STEP = 1_000_000
NUM_STEPS = 5


def found_in(*, count: int, nbytes: int, took: int) -> tuple[SmallMessages, ...]:
    """Return what is found in a job of two ranks with so many synchronous all_reduces a step."""
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        group = rank.group("1", (0, 1), "dp")
        for step in range(NUM_STEPS):
            at = step * STEP
            rank.span("backward", at + 1, at + 100)
            for number in range(count):
                begin = at + 1_000 + number * 2 * took
                rank.op("all_reduce", begin, begin + took, group=group, nbytes=nbytes)
            rank.span("optimizer", at + STEP - 1_000, at + STEP - 100)
    return summarise(MemoryRun(ranks)).small_messages


def test_many_small_operations_that_hold_up_the_program_are_reported() -> None:
    # 50 of 400 ns in steps of 1 ms: 20 us, 2 %.
    assert found_in(count=50, nbytes=4096, took=400) == (
        SmallMessages(
            axis="dp", op="all_reduce", api=None, groups=1, count_per_step=50, bytes=4096, exposed_ns_per_step=20_000
        ),
    )


def test_few_large_and_fast_operations_are_not() -> None:
    assert found_in(count=10, nbytes=4096, took=4_000) == ()
    assert found_in(count=50, nbytes=1 << 20, took=400) == ()
    assert found_in(count=50, nbytes=4096, took=100) == ()
