"""Flight Recorder dumps of sound jobs: nothing may be found in them."""

import os
from pathlib import Path

from dtprof.diagnosis.findings import Verdict
from tests.diagnosis.dump_builder import BEGIN_NS, Rank, job, verdict_on, write


def sound(folder: Path, ranks: list[Rank]) -> Verdict:
    verdict = verdict_on(write(folder, ranks))
    assert (verdict.outcome, verdict.findings) == ("healthy", ()), verdict
    return verdict


def test_a_job_whose_operations_all_ended_is_healthy(tmp_path: Path) -> None:
    sound(tmp_path, [rank.op("all_reduce", line=1).op("broadcast", line=2) for rank in job(4)])


def test_last_operations_of_one_rank_alone_are_no_finding(tmp_path: Path) -> None:
    ranks = job(2, a=[0, 1])
    for rank in ranks:
        for _ in range(3 + rank.rank):
            rank.op("all_reduce", group="a")
    sound(tmp_path, ranks)


def test_sizes_that_may_differ_are_no_mismatch(tmp_path: Path) -> None:
    ranks = job(3)
    for rank in ranks:
        rank.op("all_to_all", size=5 + rank.rank).op("gather", size=4, out=12 if rank.rank == 0 else 0)
        rank.op("all_gather", size=3 + rank.rank).op("scatter", size=9 if rank.rank == 0 else 0, out=3)
    sound(tmp_path, ranks)


def test_lines_that_depend_on_the_rank_are_no_mismatch(tmp_path: Path) -> None:
    ranks = job(3)
    for rank in ranks:
        for _ in range(5):
            rank.op("broadcast", line=10 if rank.rank == 0 else 12)
    sound(tmp_path, ranks)


def test_a_ring_buffer_that_lost_its_beginning_on_some_ranks_shows_no_skip(tmp_path: Path) -> None:
    ranks = job(3, a=[0, 1])
    for rank in ranks:
        for i in range(30):
            rank.op("all_reduce", size=1 + i % 4)
            if rank.rank < 2:
                rank.op("broadcast", group="a", size=i)
        del rank.entries[: 7 * rank.rank]
    sound(tmp_path, ranks)


def test_coalesced_transfers_that_stay_scheduled_are_no_hang(tmp_path: Path) -> None:
    # torch sets the state of the whole only: the entry named coalesced.
    ranks = job(2)
    for rank in ranks:
        me, other = rank.rank, 1 - rank.rank
        for _ in range(3):
            rank.op(f"send {me}->{other}", done=False)
            rank.op(f"recv {me}<-{other}", done=False, same_seq=True)
            rank.op("coalesced", same_seq=True)
    sound(tmp_path, ranks)


def test_coalesced_collectives_cut_by_the_ring_buffer_are_no_mismatch(tmp_path: Path) -> None:
    ranks = job(2)
    for rank in ranks:
        for _ in range(4):
            rank.op("_all_gather_base", size=4, done=False)
            rank.op("_all_gather_base", size=9, done=False, same_seq=True)
            rank.op("coalesced", same_seq=True)
    del ranks[1].entries[0]
    sound(tmp_path, ranks)


def test_operations_that_gloo_retired_are_no_hang(tmp_path: Path) -> None:
    ranks = job(2, backend="gloo")
    for rank in ranks:
        for _ in range(3):
            rank.op("all_reduce", done=False)
            rank.entries[-1]["retired"] = True
    verdict_on(write(tmp_path, ranks))
    sound(tmp_path, ranks)


def test_dumps_of_a_job_that_goes_on_show_a_moment(tmp_path: Path) -> None:
    ranks = job(4)
    for rank in ranks:
        rank.op("all_reduce").op("all_reduce")
        if rank.rank != 1:
            rank.op("all_reduce", done=False)
    paths = write(tmp_path, ranks)
    for path in paths:
        os.utime(path, ns=(BEGIN_NS + 3_000_000,) * 2)  # 1.5 ms after the second all_reduce was seen to end
    verdict = verdict_on(paths)
    assert (verdict.outcome, verdict.findings) == ("healthy", ())
    assert "a moment" in verdict.cannot_tell[0]


def test_groups_of_one_name_with_other_members_are_not_compared(tmp_path: Path) -> None:
    ranks = job(4)
    for rank in ranks:
        members = [0, 1] if rank.rank < 2 else [2, 3]
        rank.groups["1"] = ("tp", members)
        for _ in range(2 + rank.rank // 2):
            rank.op("all_reduce", group="1", size=1 + rank.rank // 2)
    sound(tmp_path, ranks)


def test_unnamed_groups_of_old_versions_are_not_compared(tmp_path: Path) -> None:
    ranks = job(2)
    for rank in ranks:
        rank.op("all_reduce", size=1 + rank.rank)
        for entry in rank.entries:
            entry.update(pg_id=3, process_group=None)
    sound(tmp_path, ranks)
