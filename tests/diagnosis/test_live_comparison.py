"""Mismatches seen while ranks run: each look takes what is new, in pieces that end anywhere."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dtprof.diagnosis import live_comparison
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.live_comparison import LiveComparison
from dtprof.records.tables import RankTables
from tests.builders import RankBuilder


def looks(ranks: Sequence[RankBuilder | RankTables], *, each: int = 7) -> list[Finding]:
    """Give a comparison the operations of ranks in pieces, those of later ranks a piece behind."""
    comparison = LiveComparison()
    whole = [rank if isinstance(rank, RankTables) else rank.tables() for rank in ranks]
    longest = max(len(tables.operations) for tables in whole)
    found: list[Finding] = []
    for begin in range(0, longest + len(whole) * each, each):
        grown = []
        for late, tables in enumerate(whole):
            first = max(0, begin - late * each)
            last = max(0, begin + each - late * each)
            ends = np.r_[0, tables.operations["issued_ns"], np.iinfo(np.int64).max]
            begin_ns, end_ns = (int(ends[min(i, len(ends) - 2) + (i > 0)]) for i in (first, last))
            started = tables.spans["begin_ns"]
            spans = tables.spans[(begin_ns <= started) & (started < end_ns)]
            grown.append(replace(tables, operations=tables.operations[first:last], spans=spans))
        found += comparison.take(grown)
    return found + comparison.take([], is_last=True)


def job(count: int = 2) -> list[RankBuilder]:
    return [RankBuilder(rank, world_size=count) for rank in range(count)]


def test_another_reduction_that_the_back_end_let_pass_is_reported_once_with_both_lines() -> None:
    ranks = job(3)
    for rank in ranks:
        for step in range(40):
            odd = rank.rank == 2 and step in (11, 12)
            site = rank.site(line=9 if odd else 5)
            t = step * 100
            rank.op("all_reduce", t, t + 10, nbytes=8, reduce_op="max" if odd else "sum", site=site, step=step)
    (finding,) = looks(ranks)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("reduce-op-mismatch", (2,), 11)
    assert {site.line for site in finding.culprit_call_sites.values()} == {9}
    assert {site.line for site in finding.call_sites.values()} == {5}


def test_a_group_made_again_is_compared_by_itself_and_reported_once_for_each_instance() -> None:
    ranks = job(3)
    for rank in ranks:
        for instance in range(3):
            group = rank.group("1", (0, 1, 2))
            for step in range(20):
                odd = instance > 0 and rank.rank == instance and step == 5
                t = (instance * 20 + step) * 100
                rank.op("broadcast", t, t + 10, nbytes=8, peer=1 if odd else 0, group=group, step=step)
    told = [(finding.kind, finding.culprit_ranks, finding.seq) for finding in looks(ranks, each=100)]
    assert told == [("root-mismatch", (1,), 5), ("root-mismatch", (2,), 5)]


def test_another_root_and_another_size_are_reported() -> None:
    for name, arguments in (("root-mismatch", {"peer": 1}), ("size-mismatch", {"nbytes": 16})):
        ranks = job(3)
        for rank in ranks:
            for step in range(30):
                usual = {"peer": 0, "nbytes": 8}
                chosen = usual | arguments if rank.rank == 1 and step == 20 else usual
                rank.op("broadcast", step * 100, step * 100 + 10, **chosen)  # type: ignore[arg-type]
        assert [(finding.kind, finding.seq) for finding in looks(ranks)] == [(name, 20)]


def test_another_size_of_an_all_gather_is_reported_where_all_are_gathered_into_one_tensor() -> None:
    ranks = job(3)
    for rank in ranks:
        for step in range(30):
            odd = rank.rank == 1 and step == 20
            rank.op("all_gather", step * 100, step * 100 + 10, nbytes=16 if odd else 8)
    assert looks(ranks) == []  # into a list: each may bring what it likes
    whole = [rank.tables() for rank in ranks]
    (finding,) = looks([replace(tables, raw_ops=("_allgather_base_",) * len(tables.ops)) for tables in whole])
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("size-mismatch", (1,), 20)


def test_a_rank_that_left_a_call_out_and_goes_on_is_reported() -> None:
    ranks = job(3)
    for rank in ranks:
        for step in range(40):
            for line in (5, 6):
                if (rank.rank, step, line) != (1, 15, 6):
                    t = step * 100 + line * 10
                    rank.op("all_reduce", t, t + 5, nbytes=8, site=rank.site(line=line), step=step)
    (finding,) = looks(ranks)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 31)


@pytest.mark.parametrize("kept", [live_comparison.MAX_KEPT, 300])
def test_an_optimizer_step_skipped_is_reported_as_such(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_comparison, "MAX_KEPT", kept)
    monkeypatch.setattr(live_comparison, "MIN_KEPT", kept // 3)
    ranks = job(3)
    for rank in ranks:
        for batch in range(200):
            t = batch * 100
            rank.span("forward", t, t + 5, step=batch)
            step = batch - (rank.rank == 1 and batch > 150)
            rank.op("all_reduce", t + 10, t + 15, nbytes=8, site=rank.site(line=5), step=step)
    (finding,) = looks(ranks, each=20)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 151)
    assert finding.summary.startswith("Rank 1 skipped an optimizer step: at #151 of ")


def test_a_program_that_is_right_is_never_reported() -> None:
    """Other lines by rank, subgroups, uneven sizes where they may be, messages, ranks far apart, a restart."""
    ranks = job(4)
    for rank in ranks:
        pair = rank.group("p", (0, 1) if rank.rank < 2 else (2, 3))
        for step in range(60):
            t = step * 1000
            rank.op("broadcast", t, t + 10, nbytes=8, peer=0, site=rank.site(line=3 if rank.rank else 2), step=step)
            rank.op("all_reduce", t + 100, t + 110, nbytes=8, group=pair, site=rank.site(line=4 + rank.rank), step=step)
            rank.op("all_gather", t + 200, t + 210, nbytes=8 * (rank.rank + 1), site=rank.site(line=9), step=step)
            if rank.rank < 2:
                name, peer = ("send", 1) if rank.rank == 0 else ("recv", 0)
                rank.op(name, t + 300, t + 310, nbytes=8, peer=peer, site=rank.site(line=11), step=step)
    assert looks(ranks, each=3) == []
    assert looks(ranks, each=100) == []
    restarted = [replace(rank.tables(), attempt=1) for rank in ranks]
    comparison = LiveComparison()
    old = [rank.tables() for rank in ranks]
    assert comparison.take([old[0], replace(old[1], operations=old[1].operations[:30])]) == []
    assert comparison.take([restarted[0], old[1], *old[2:]]) == []
    assert comparison.take(restarted[1:]) == []


def test_a_call_that_was_refused_on_one_rank_does_not_shift_the_rest() -> None:
    ranks = job(2)
    for rank in ranks:
        for step in range(30):
            if rank.rank == 1 and step == 10:
                rank.op("all_reduce", step * 100 - 50, step * 100 - 49, nbytes=4, state="failed")
            rank.op("broadcast" if step % 2 else "all_reduce", step * 100, step * 100 + 10, nbytes=8, peer=0)
    assert looks(ranks) == []


@pytest.mark.parametrize("each", [100, 1000, 10_000])
def test_however_much_comes_between_two_polls_a_mismatch_is_reported(each: int) -> None:
    ranks = job(2)
    for rank in ranks:
        for step in range(3000):
            odd = rank.rank == 1 and step == 700
            rank.op("all_reduce", step * 10, step * 10 + 5, nbytes=8, reduce_op="max" if odd else "sum")
    (finding,) = looks(ranks, each=each)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("reduce-op-mismatch", (1,), 700)


def test_another_size_is_reported_among_lines_and_uneven_splits_that_differ_by_right() -> None:
    ranks = job(2)
    for rank in ranks:
        rank.sizes[5] = ((3, 4), (2, 4)) if rank.rank else ((1, 2), (1, 3))
        for step in range(2000):
            t = step * 100
            rank.op("all_to_all", t, t + 5, nbytes=28, tag=5, site=rank.site(line=rank.rank))
            wrong = rank.rank == 1 and step == 1500
            rank.op("all_reduce", t + 10, t + 15, nbytes=16 if wrong else 8, site=rank.site(line=9))
    (finding,) = looks(ranks, each=500)
    assert (finding.kind, finding.seq) == ("size-mismatch", 3001)


def repeated(tables: RankTables, times: int, begin: int = 0) -> RankTables:
    """Return a rank that makes its operations again and again, as far as its groups, lines and steps go."""
    rows = np.tile(tables.operations, times)
    turns = np.repeat(np.arange(begin, begin + times), len(tables.operations))
    per_group = {group: int((tables.operations["group"] == group).sum()) for group in tables.groups}
    rows["seq"] += turns * np.array([per_group[group] for group in rows["group"].tolist()])
    rows["step"] += turns
    return replace(tables, operations=rows)


def many_groups(count: int, *, world_size: int = 4) -> list[RankTables]:
    """Return ranks that call each of many groups once, from lines of their own."""
    ranks = job(world_size)
    for rank in ranks:
        for number in range(count):
            group = rank.group(f"g{number}", tuple(range(world_size)))
            rank.op("all_reduce", number, number + 1, nbytes=8, group=group, site=rank.site(line=100 * rank.rank + 5))
    return [rank.tables() for rank in ranks]


def changed(tables: RankTables, row: int, **values: int) -> RankTables:
    rows = tables.operations.copy()
    for name, value in values.items():
        rows[name][row] = value
    return replace(tables, operations=rows)


def test_among_very_many_groups_with_lines_of_their_own_a_poll_stays_cheap_and_misses_nothing() -> None:
    whole = many_groups(300)
    comparison = LiveComparison()
    began_s = time.thread_time()
    for look in range(5):
        assert comparison.take([repeated(tables, 10, 10 * look) for tables in whole]) == []
    told = comparison.take([changed(repeated(t, 10, 50), 1777, numel=4 if t.rank == 2 else 2) for t in whole])
    assert time.thread_time() - began_s < 30  # 1 s here; deciding on each group by itself took minutes
    assert [(one.kind, one.culprit_ranks, one.seq) for one in told] == [("size-mismatch", (2,), 50 + 1777 // 300)]


def test_a_rank_whose_log_is_seen_later_than_those_of_the_others_is_compared_too() -> None:
    ranks = job(3)
    for rank in ranks:
        for step in range(20):
            rank.op("broadcast", step * 10, step * 10 + 5, nbytes=8, peer=1 if rank.rank == 2 and step == 0 else 0)
    whole = [rank.tables() for rank in ranks]
    comparison = LiveComparison()
    assert comparison.take(whole[:2]) == []
    (finding,) = comparison.take(whole[2:])
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("root-mismatch", (2,), 0)


def test_the_odd_one_is_not_named_before_all_of_this_host_are_seen() -> None:
    ranks = job(5)  # the last runs on another host
    for rank in ranks:
        for step in range(20):
            rank.op("broadcast", step * 10, step * 10 + 5, nbytes=8, peer=0 if rank.rank == 0 and step == 7 else 1)
    whole = [rank.tables() for rank in ranks[:4]]
    comparison = LiveComparison()
    assert comparison.take(whole[:2]) == []
    (finding,) = comparison.take(whole[2:])
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("root-mismatch", (0,), 7)


def test_handles_waited_for_late_settle_out_of_order() -> None:
    ranks = job(2)
    for rank in ranks:
        for step in range(20):
            rank.op("all_reduce", step * 10, step * 10 + 5, nbytes=16 if (rank.rank, step) == (1, 3) else 8)
    whole = [rank.tables() for rank in ranks]
    late = [replace(tables, operations=tables.operations[3:4]) for tables in whole]
    early = [replace(tables, operations=np.delete(tables.operations, 3)) for tables in whole]
    comparison = LiveComparison()
    assert comparison.take(early) == []
    assert comparison.take(late[:1]) == []
    (finding,) = comparison.take(late[1:])
    assert (finding.kind, finding.seq) == ("size-mismatch", 3)


def test_uneven_splits_are_compared_at_every_position() -> None:
    ranks = job(3)
    for rank in ranks:
        for number in range(40):  # rank a sends b (a + b + number) elements
            sizes = tuple(rank.rank + other + number for other in range(3))
            rank.sizes[number + 1] = (sizes, sizes)
        rank.sizes[50] = ((9, 9, 9), (9, 9, 9))
        for step in range(2500):
            tag = 50 if (rank.rank, step) == (1, 2345) else step % 40 + 1
            rank.op("all_to_all", step * 10, step * 10 + 5, nbytes=28, tag=tag)
    (finding,) = looks(ranks, each=300)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("split-size-mismatch", (1,), 2345)


def test_a_rank_that_falls_out_of_step_late_is_reported_though_lines_differed_by_rank_at_the_start() -> None:
    ranks = job(3)
    for rank in ranks:
        for step in range(1000):
            for line in (5, 6):
                if (rank.rank, step, line) != (1, 900, 6):
                    t = step * 100 + line * 10
                    rank.op("all_reduce", t, t + 5, nbytes=8, site=rank.site(line=line), step=step)
            if step < 30:
                t = step * 100 + 90
                rank.op("all_reduce", t, t + 5, nbytes=8, site=rank.site(line=50 + rank.rank), step=step)
    (finding,) = looks(ranks, each=300)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 1831)


def test_a_rank_out_of_step_in_several_groups_is_reported_once() -> None:
    ranks = job(3)
    for rank in ranks:
        groups = [rank.group(name, (0, 1, 2)) for name in "abc"]
        for step in range(100):
            for at, group in enumerate(groups):
                if (rank.rank, step) != (1, 40):
                    t = step * 100 + at * 10
                    rank.op("all_reduce", t, t + 5, nbytes=8, group=group, site=rank.site(line=at), step=step)
    assert [finding.kind for finding in looks(ranks)] == ["step-mismatch"]


def test_a_thread_beside_the_one_that_makes_steps_keeps_no_pace_with_them() -> None:
    ranks = job(2)
    for rank in ranks:
        beat = rank.group("heartbeat", (0, 1))
        for step in range(60):
            rank.span("step", step * 100, step * 100 + 90, step=step)
            rank.op("all_reduce", step * 100, step * 100 + 10, nbytes=8, step=step)
            late = rank.rank == 1 and step > 20
            t = step * 100 + 50
            rank.op("all_reduce", t, t + 5, nbytes=8, group=beat, step=step - late, thread=2, site=rank.site(line=7))
    assert looks(ranks) == []
    without_steps = [replace(rank.tables(), spans=rank.tables().spans[:0]) for rank in ranks]
    (finding,) = looks(without_steps)
    assert finding.kind == "step-mismatch"  # as it must be where the same calls make the steps


def test_memory_stays_bounded_while_one_rank_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_comparison, "MAX_KEPT", 6000)
    monkeypatch.setattr(live_comparison, "MAX_OPEN", 3000)
    ranks = job(2)
    for step in range(20):
        ranks[0].op("all_reduce", step * 10, step * 10 + 5, nbytes=8)
    ranks[1].op("all_reduce", 0, 5, nbytes=8)
    tables = [rank.tables() for rank in ranks]
    comparison = LiveComparison()
    for begin in range(0, 400, 20):
        part = repeated(tables[0], 20, begin)
        assert comparison.take([part, *([tables[1]] if not begin else [])]) == []
    kept = comparison._ranks[0].tables.operations
    assert len(kept) == 3000
    assert kept.base is None
    assert len(comparison._open) == 3000
