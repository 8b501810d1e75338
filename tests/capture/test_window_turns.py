"""Turns of profiler windows: ranks in turn by the clock, bounded in time and disk."""

import pytest

from dtprof import settings
from dtprof.capture.window_turns import WindowTurns
from dtprof.errors import UsageError

S = 1_000_000_000


def turns(rank: int, ranks: tuple[int, ...] = (0, 1, 2)) -> WindowTurns:
    return WindowTurns(every_ns=10 * S, ranks=ranks, rank=rank)


def due_at(own: WindowTurns, seconds: list[int]) -> list[int]:
    return [second for second in seconds if own.is_due(second * S)]


def test_ranks_take_turns_one_after_the_other() -> None:
    # Turns of 10 s: 0 to 9 is turn 0, of rank 0; 10 to 19 of rank 1; 20 to 29 of rank 2; 30 to 39 of rank 0 again.
    seconds = list(range(0, 70, 2))
    assert due_at(turns(0), seconds) == [30, 60]  # not in the turn in which the job began
    assert due_at(turns(1), seconds) == [10, 40]
    assert due_at(turns(2), seconds) == [20, 50]


def test_chosen_ranks_share_the_turns() -> None:
    assert due_at(turns(4, (4, 9)), list(range(0, 60, 2))) == [20, 40]
    assert due_at(turns(9, (4, 9)), list(range(0, 60, 2))) == [10, 30, 50]


def test_steps_longer_than_a_turn_take_a_window_late_and_once() -> None:
    # Rank 1's turns begin at 10, 40, 70, 100: passed at 45 (two of them), and at 130 (three).
    assert due_at(turns(1), [0, 45, 46, 60, 130, 131]) == [45, 130]


def test_a_clock_that_jumps_takes_at_most_one_window() -> None:
    own = turns(1)
    assert due_at(own, [5, 1_000_000, 1_000_001]) == [1_000_000]
    assert due_at(own, [4, 5]) == []  # back
    assert due_at(own, [11]) == [11]


def test_windows_take_one_hundredth_of_the_time_at_most() -> None:
    own = turns(0)
    assert own.refusal(0, 1) == ""  # the first is taken whatever it costs
    own.charge(100 * S, 101 * S)
    # 1 s on each of 3 ranks: 1 % of 300 s.
    assert "1 % of the time" in own.refusal(399 * S, 1)
    assert own.refusal(401 * S, 1) == ""
    own.charge(401 * S, 402 * S)
    assert "1 % of the time" in own.refusal(699 * S, 1)
    assert own.refusal(701 * S, 1) == ""


def test_no_window_begins_where_the_last_one_would_find_no_room() -> None:
    own = turns(0)
    own.keep(1000)
    own.keep(400)
    assert own.refusal(0, 1000) == ""
    assert "--max-trace-mb" in own.refusal(0, 999)


def test_times_are_read_with_their_unit() -> None:
    assert [settings.parse_trace_every(text) for text in ("90", "90s", "10m", "1.5h", " 2 m ")] == [
        90,
        90,
        600,
        5400,
        120,
    ]
    for text in ("", "0", "0.5s", "ten", "-1m", "1d", "200h", "1e3"):
        with pytest.raises(UsageError, match="expected a time from 1s to 168h"):
            settings.parse_trace_every(text)
