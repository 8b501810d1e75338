"""However many ranks, groups and phases a node has, what it tells stays small, and names who matters."""

import re

import numpy as np
import pytest
from prometheus_client.utils import floatToGoString

from dtprof.interchange.metric_families import exposition
from dtprof.monitor.prometheus.job_metrics import choose_ranks, list_metrics
from dtprof.monitor.prometheus.metric_catalogue import MAX_NAMES, MAX_RANKS, OTHER
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.monitor.prometheus.node_tally import NodeTally
from dtprof.monitor.prometheus.step_counts import StepCounter
from dtprof.records.run_follower import Growth
from dtprof.records.tables import OPERATION, SPAN, RankTables
from tests.builders import RankBuilder

MS = 1_000_000
NUM_RANKS = 1024
LATE = 777


def growth(tables: RankTables, *, lost: int = 0) -> Growth:
    """Return what a follower gives of records that have all settled."""
    none = np.zeros(0, OPERATION)
    return Growth(
        tables=tables, newest_ns=tables.last_ns, open_operations=none, open_spans=np.zeros(0, SPAN), lost=lost
    )


def rank_of_many(number: int) -> RankTables:
    rank = RankBuilder(number, world_size=NUM_RANKS)
    for other in range(2 * MAX_NAMES):
        rank.op("all_reduce", 10 * other, 10 * other + 5, group=rank.group(f"{other}", (number,), f"group {other}"))
        rank.span(f"phase:{other}", 10 * other, 10 * other + 5)
    rank.op("all_reduce", MS + (9 * MS if number == LATE else number), 20 * MS, group=0)
    return rank.tables()


def test_a_node_of_1024_ranks_tells_little_and_names_the_late_one() -> None:
    tally = NodeTally()
    tally.take({number: growth(rank_of_many(number)) for number in range(NUM_RANKS)})
    shown = choose_ranks(tally, ())
    assert len(shown) <= MAX_RANKS
    assert shown[0] == LATE
    text = exposition(list_metrics(tally, NodeState(run="run", host="host"), shown=shown, cpu_s=0.0)).decode()
    assert len(text.splitlines()) < 500
    # It came 9 ms after the others, which came one after the other within 1,023 ns.
    waited_s = (NUM_RANKS - 1) * 0.009 - (NUM_RANKS * (NUM_RANKS - 1) / 2 - LATE) / 1e9
    assert f'dtprof_rank_waited_for_seconds_total{{rank="{LATE}"}} {waited_s!r}' in text
    counted = NUM_RANKS * (2 * MAX_NAMES + 1)
    assert f"dtprof_events_total {floatToGoString(counted + NUM_RANKS * 2 * MAX_NAMES)}\n" in text
    assert int(tally.sums["count"].sum()) == counted
    assert (len(tally.groups.values), tally.groups.values[-1]) == (MAX_NAMES + 1, OTHER)
    assert f'dtprof_phase_seconds_total{{phase="{OTHER}"}}' in text


def test_names_that_read_alike_once_they_are_cut_are_one() -> None:
    tally = NodeTally()
    rank = RankBuilder(0, world_size=1)
    for ending in ("x", "y"):
        rank.span(f"phase:{'a' * 200}{ending}", 0, MS)
    rank.span("phase:\ud800", 0, MS)
    for number in range(2 * MAX_NAMES):
        rank.span("phase:other" if number == 3 else f"phase:{number}", 0, MS)
    tally.take({0: growth(rank.tables())})
    text = exposition(list_metrics(tally, NodeState(run="run", host="host"), shown=(0,), cpu_s=0.0)).decode()
    phases = re.findall(r'^dtprof_phase_seconds_total\{phase="(.*)"\} (.*)$', text, re.MULTILINE)
    assert len({name for name, _ in phases}) == len(phases) == MAX_NAMES
    assert dict(phases)["a" * 117 + "..."] == "0.002"
    assert dict(phases)["?"] == "0.001"
    told = MAX_NAMES - 3  # by a name of their own, beside these two and OTHER
    assert float(dict(phases)[OTHER]) == pytest.approx((2 * MAX_NAMES - told) / 1000)


def test_ranks_once_shown_stay_and_others_follow_up_to_the_bound() -> None:
    tally = NodeTally()
    tally.take({number: growth(RankBuilder(number, world_size=40).tables()) for number in range(40)})
    shown: tuple[int, ...] = ()
    for look in range(30):
        tally.ranks[39 - look].waited_for_ns = 1000 + look
        before, shown = shown, choose_ranks(tally, shown)
        assert shown[: len(before)] == before
        assert 39 - look in shown or len(before) == MAX_RANKS
    assert len(set(shown)) == len(shown) == MAX_RANKS


def test_a_restarted_rank_counts_anew_and_what_is_reported_the_node_goes_on() -> None:
    tally = NodeTally()
    for attempt in range(2):
        rank = RankBuilder(0, world_size=1, attempt=attempt)
        for step in range(3):
            rank.span("backward", step * 100 * MS, step * 100 * MS + 10)
            rank.span("optimizer", step * 100 * MS + 20, step * 100 * MS + 30)
        tally.take({0: growth(rank.tables())})
    assert tally.ranks[0].steps.num_ended == 3
    text = exposition(list_metrics(tally, NodeState(run="run", host="host"), shown=(0,), cpu_s=0.0)).decode()
    assert "dtprof_step_duration_seconds_count 4.0\n" in text
    assert "dtprof_step_duration_seconds_sum 0.4\n" in text
    assert "dtprof_events_total 12.0\n" in text


def collectives(rank: int, attempt: int, begin: int, seqs: range) -> Growth:
    """Return collectives of which each begins 10 ns after the one before, and ends 1 us after the first began."""
    builder = RankBuilder(rank, world_size=2, attempt=attempt)
    for number, seq in enumerate(seqs):
        builder.op("all_reduce", begin + 10 * number, begin + 1000, seq=seq)
    return growth(builder.tables())


def test_operations_of_two_attempts_do_not_meet() -> None:
    tally = NodeTally()
    tally.take({0: collectives(0, 0, 0, range(2)), 1: collectives(1, 0, 5, range(1))})
    tally.take({0: collectives(0, 1, 50_000, range(2)), 1: collectives(1, 0, 15, range(1, 2))})
    tally.take({0: collectives(0, 1, 0, range(0)), 1: collectives(1, 1, 50_007, range(2))})
    assert [tally.ranks[rank].waited_for_ns for rank in range(2)] == [0, 7 + 7]
    assert tally.sums["wait_ns"].sum() == 5 + 7 + 7


def test_times_of_operations_that_are_not_seen_to_complete_are_absent() -> None:
    # As with NCCL: 3 operations that return at once, of which nobody knows when they were done; and a barrier of gloo.
    rank = RankBuilder(0, world_size=2)
    for number in range(3):
        rank.op("all_reduce", number * MS, is_async=True, flags=0)
    rank.op("barrier", 4 * MS, 5 * MS)
    tally = NodeTally()
    tally.take({0: growth(rank.tables())})
    text = exposition(list_metrics(tally, NodeState(run="run", host="host"), shown=(0,), cpu_s=0.0)).decode()
    assert 'dtprof_operations_total{group="default",op="all_reduce"} 3.0' in text
    for name in ("duration", "blocked", "wait"):
        assert f'dtprof_operation_{name}_seconds_total{{group="default",op="all_reduce"}}' not in text
    for name in ("duration", "blocked"):
        assert f'dtprof_operation_{name}_seconds_total{{group="default",op="barrier"}} 0.001' in text
    # No collective has ended on both ranks: for whom this one waits is not known.
    assert "dtprof_rank_blocked_seconds_total" in text
    assert "dtprof_rank_wait_seconds_total{" not in text
    assert "dtprof_rank_waited_for_seconds_total{" not in text


def steps_of(rank: RankBuilder) -> tuple[int, int, int]:
    """Return steps ended, those with a duration, and their sum, of spans that come one by one."""
    tables, counter = rank.tables(), StepCounter()
    for number in range(len(tables.spans)):
        counter.add(tables.spans[number : number + 1], tables.ops)
    counts, total_ns = counter.durations()
    return counter.num_ended, sum(counts), total_ns


def test_optimizers_in_a_row_end_one_step() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("optimizer", 0, 5)  # before any backward pass: no step
    for begin in (10, 110, 230):
        rank.span("backward", begin, begin + 20)
        rank.span("optimizer", begin + 30, begin + 40)
        rank.span("optimizer", begin + 50, begin + 60)
    assert steps_of(rank) == (3, 2, 100 + 120)


def test_steps_that_the_program_marks_are_those_that_count() -> None:
    rank = RankBuilder(0, world_size=1)
    for step, begin in enumerate((0, 100, 300)):
        rank.span("backward", begin, begin + 20, step=2 * step)
        rank.span("optimizer", begin + 30, begin + 40, step=2 * step)
        rank.span("backward", begin + 50, begin + 60, step=2 * step)
        rank.span("optimizer", begin + 70, begin + 80, step=2 * step)
        rank.span("step", begin + 90, begin + 90, step=step + 1)
    assert steps_of(rank)[1:] == (2, 300)
