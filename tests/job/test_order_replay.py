"""Orders of collectives of several groups that would hang if each call blocked."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.job import order_replay
from dtprof.job.group_collectives import group_tables
from dtprof.job.order_replay import find_ring
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job

MEMBERS = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}


def job_of(programs: dict[int, str], *, threads: bool = False) -> JobState:
    """Return ranks that make a collective for each letter, one after the other; or each in a thread of its own."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in programs]
    for rank in ranks:
        groups = {name: rank.group(name, members) for name, members in MEMBERS.items() if rank.rank in members}
        for at, name in enumerate(programs[rank.rank]):
            thread = 1 + "abc".index(name) if threads else 1
            rank.op("all_reduce", 10 * at, 10 * at + 5, group=groups[name], thread=thread, nbytes=8)
    return build_job(ranks, exit_status=0, stalled=False)


@pytest.mark.parametrize(
    ("programs", "ring"),
    [
        ({0: "ac", 1: "ba", 2: "cb"}, {0: "a", 1: "b", 2: "c"}),  # each waits for the next in its first call
        ({0: "ac", 1: "ab", 2: "cb"}, {}),  # 0 and 1 meet in a, then 0 and 2 in c, then 1 and 2 in b
        ({0: "acac", 1: "abba", 2: "cbcb"}, {0: "a", 1: "b", 2: "c"}),  # after one round in order
        ({0: "aa", 1: "aab", 2: "b"}, {}),
        ({0: "ac", 1: "a", 2: "c"}, {}),
    ],
)
def test_ranks_wait_in_a_ring_where_each_first_call_needs_the_second_of_another(
    programs: dict[int, str], ring: dict[int, str]
) -> None:
    found = find_ring(group_tables(job_of(programs).ranks))
    assert {rank: group.name for rank, (group, _) in found.items()} == ring


def test_threads_of_their_own_wait_in_no_ring() -> None:
    assert find_ring(group_tables(job_of({0: "ac", 1: "ba", 2: "cb"}, threads=True).ranks)) == {}


def test_calls_in_the_order_of_their_arrival_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call ends before the next begins, on all three: the order of arrival is one in which all end."""
    monkeypatch.setattr(order_replay, "_order_of_threads", None)
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for at, name in enumerate("abcabc"):
        for rank in MEMBERS[name]:
            group = ranks[rank].group(name, MEMBERS[name])
            ranks[rank].op("all_reduce", 10 * at, 10 * at + 5, group=group, nbytes=8)
    assert find_ring(group_tables(build_job(ranks, exit_status=0, stalled=False).ranks)) == {}
