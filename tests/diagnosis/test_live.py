"""Mismatches seen while ranks run: each look takes what is new, in pieces that end anywhere."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.live import MAX_KEPT, WINDOW, LiveComparison
from dtprof.tables import RankTables
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
            grown.append(replace(tables, operations=tables.operations[first:last]))
        found += comparison.take(grown)
    return found + comparison.take([], is_last=True)


def job(count: int = 2) -> list[RankBuilder]:
    return [RankBuilder(rank, world_size=count) for rank in range(count)]


def test_another_reduction_that_the_back_end_let_pass_is_told_of_once_with_both_lines() -> None:
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


def test_another_root_and_another_size_are_told_of() -> None:
    for name, arguments in (("root-mismatch", {"peer": 1}), ("size-mismatch", {"nbytes": 16})):
        ranks = job(3)
        for rank in ranks:
            for step in range(30):
                usual = {"peer": 0, "nbytes": 8}
                chosen = usual | arguments if rank.rank == 1 and step == 20 else usual
                rank.op("broadcast", step * 100, step * 100 + 10, **chosen)  # type: ignore[arg-type]
        assert [(finding.kind, finding.seq) for finding in looks(ranks)] == [(name, 20)]


def test_a_rank_that_left_a_call_out_and_goes_on_is_told_of() -> None:
    ranks = job(3)
    for rank in ranks:
        for step in range(40):
            for line in (5, 6):
                if (rank.rank, step, line) != (1, 15, 6):
                    t = step * 100 + line * 10
                    rank.op("all_reduce", t, t + 5, nbytes=8, site=rank.site(line=line), step=step)
    (finding,) = looks(ranks)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 31)


def test_a_program_that_is_right_is_never_told_of() -> None:
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


@pytest.mark.parametrize("each", [7, 2 * WINDOW, 10 * WINDOW])
def test_however_much_comes_between_two_looks_a_mismatch_is_told_of(each: int) -> None:
    ranks = job(2)
    for rank in ranks:
        for step in range(4 * WINDOW):
            odd = rank.rank == 1 and step == WINDOW // 2
            rank.op("all_reduce", step * 10, step * 10 + 5, nbytes=8, reduce_op="max" if odd else "sum")
    (finding,) = looks(ranks, each=each)
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("reduce-op-mismatch", (1,), WINDOW // 2)


def test_another_size_is_told_of_among_lines_and_uneven_splits_that_differ_by_right() -> None:
    ranks = job(2)
    for rank in ranks:
        rank.sizes[5] = ((3, 4), (2, 4)) if rank.rank else ((1, 2), (1, 3))
        for step in range(3 * WINDOW):
            t = step * 100
            rank.op("all_to_all", t, t + 5, nbytes=28, tag=5, site=rank.site(line=rank.rank))
            wrong = rank.rank == 1 and step == 2 * WINDOW
            rank.op("all_reduce", t + 10, t + 15, nbytes=16 if wrong else 8, site=rank.site(line=9))
    (finding,) = looks(ranks, each=500)
    assert (finding.kind, finding.seq) == ("size-mismatch", 4 * WINDOW + 1)


def test_memory_stays_bounded_while_one_rank_never_comes() -> None:
    ranks = job(2)
    for step in range(2 * MAX_KEPT):
        ranks[0].op("all_reduce", step * 10, step * 10 + 5, nbytes=8)
    ranks[1].op("all_reduce", 0, 5, nbytes=8)
    tables = [rank.tables() for rank in ranks]
    comparison = LiveComparison()
    for begin in range(0, 2 * MAX_KEPT, 500):
        part = replace(tables[0], operations=tables[0].operations[begin : begin + 500])
        assert comparison.take([part, *([tables[1]] if not begin else [])]) == []
    kept = comparison._newest[0].operations
    assert len(kept) == MAX_KEPT
    assert kept.base is None
    assert isinstance(kept, np.ndarray)
