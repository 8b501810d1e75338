"""A rank that is late again and again is found by the records of the running job."""

import pytest

from dtprof.analysis.stragglers.late_arrivals import LateArrivals, LateRank
from tests.builders import RankBuilder

MS = 1_000_000


def arrivals(lags_ms: dict[int, list[int]]) -> LateArrivals:
    """Return what three ranks have issued every 50 ms, each later by its lags."""
    found = LateArrivals()
    for rank in range(3):
        builder = RankBuilder(rank, 3)
        for i in range(12):
            lag = lags_ms.get(rank, [0])
            t = (50 * i + lag[i % len(lag)]) * MS
            builder.op("all_reduce", t, t + MS)
        found.take([builder.tables()])
    return found


@pytest.mark.parametrize(
    ("lags_ms", "late"),
    [
        ({1: [20]}, 1),
        ({1: [20, 20, 20, 0]}, 1),  # three of four times
        ({1: [1]}, None),  # a lag that no operation notices
        ({1: [40, 0, 0]}, 1),  # to the first of three operations of each step
        ({1: [20, 0, 0, 0]}, None),  # once in a while
        ({1: [0, 0, 0, 0, 0, 0, 0, 0, 0, 40, 40, 40]}, None),  # a few times
        ({1: [40, 0, 0], 2: [0, 20, 0]}, None),  # another one as often
        ({0: [20, 0, 0], 1: [0, 20, 0], 2: [0, 0, 20]}, None),  # in turns
    ],
)
def test_only_a_rank_that_comes_last_most_of_the_time_is_late(lags_ms: dict[int, list[int]], late: int | None) -> None:
    found = arrivals(lags_ms).find_late()
    assert (found.late if found is not None else None) == late
    assert found is None or found.on_time != late


def test_lateness_is_judged_by_what_came_since_the_last_sampling() -> None:
    seen = arrivals({2: [20]})
    assert seen.find_late() == LateRank(late=2, on_time=0, period_ns=(11 * 50 + 20) * MS // 12)
    seen.forget()
    assert seen.find_late() is None


@pytest.mark.parametrize(("busy_ms", "late"), [(40, LateRank(late=1, on_time=0, same_traffic=False)), (12, None)])
def test_in_a_pipeline_the_stage_that_waits_least_for_messages_is_late(busy_ms: int, late: LateRank | None) -> None:
    found = LateArrivals()
    for rank, wait_ms in ((0, 50 - 10), (1, 50 - busy_ms), (2, 50 - 12)):
        builder = RankBuilder(rank, 3)
        for i in range(12):
            t = 50 * i * MS
            builder.op("recv" if rank else "send", t, t + wait_ms * MS, peer=rank - 1 if rank else 1)
        found.take([builder.tables()])
    assert found.find_late() == late
    found.forget()
    assert found.find_late() is None
