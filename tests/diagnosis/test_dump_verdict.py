"""Verdicts on Flight Recorder dumps: every fault beside a sound job that looks like it."""

from pathlib import Path

import pytest

from tests.diagnosis.dump_builder import Rank, job, verdict_on, write

ROUNDS = 4


def steps(rank: Rank, rounds: int = ROUNDS) -> Rank:
    """Issue a loop: two reductions, a barrier."""
    for _ in range(rounds):
        rank.op("all_reduce", line=10).op("all_reduce", line=20, size=2).op("all_reduce_barrier", line=30, size=1)
    return rank


@pytest.mark.parametrize("as_json", [False, True])
def test_rank_that_never_came_is_blamed_with_its_last_line(tmp_path: Path, as_json: bool) -> None:
    ranks = [steps(rank) for rank in job(4)]
    for rank in ranks:
        if rank.rank != 2:
            rank.op("all_reduce", line=10, done=False)
    verdict = verdict_on(write(tmp_path, ranks, as_json=as_json))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-skipped-collective", (2,))
    assert finding.waiting_ranks == (0, 1, 3)
    assert (finding.op, finding.seq) == ("all_reduce", 13)  # after 4 rounds of 3, torch counting from 1
    assert finding.culprit_call_sites[2].line == 30
    assert {site.line for site in finding.call_sites.values()} == {10}


def test_missing_dump_is_evidence_against_its_rank(tmp_path: Path) -> None:
    ranks = [steps(rank).op("all_reduce", line=10, done=False) for rank in job(4)]
    verdict = verdict_on(write(tmp_path, [rank for rank in ranks if rank.rank != 1]))
    (finding,) = verdict.findings
    assert (finding.culprit_ranks, verdict.ranks_missing) == ((1,), (1,))
    assert finding.confidence < 0.9
    assert "left no dump" in finding.evidence[0]


def test_missing_dumps_are_not_blamed_where_a_rank_with_a_dump_holds_the_job_up(tmp_path: Path) -> None:
    ranks = [steps(rank) for rank in job(4)]
    for rank in ranks:
        if rank.rank != 2:
            rank.op("all_reduce", line=10, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks[:3])).findings
    assert finding.culprit_ranks == (2,)


def test_most_dumps_missing_is_no_reason_to_blame_anyone(tmp_path: Path) -> None:
    ranks = [steps(rank).op("all_reduce", line=10, done=False) for rank in job(8)]
    verdict = verdict_on(write(tmp_path, ranks[:2]))
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert "ranks 2-7 left no dump" in " ".join(verdict.cannot_tell)


def test_skipped_collective_is_distinguished_from_what_the_rank_went_on_to(tmp_path: Path) -> None:
    ranks = [steps(rank) for rank in job(4)]
    for rank in ranks:
        rank.op("all_reduce", line=10)
        if rank.rank == 3:
            rank.op("all_reduce_barrier", line=30, size=1, done=False)  # goes on without the one at line 20
        else:
            rank.op("all_reduce", line=20, size=2, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (3,))
    assert finding.seq == 14
    assert finding.culprit_call_sites[3].line == 30


def test_line_shift_shows_where_a_rank_that_is_behind_left_something_out(tmp_path: Path) -> None:
    ranks = job(3)
    for rank in ranks:
        for round_ in range(6):
            rank.op("all_reduce", line=10)
            if not (rank.rank == 1 and round_ == 2):
                rank.op("all_reduce", line=20)
            rank.op("all_reduce", line=30)
    for rank in ranks:
        if rank.rank != 1:
            rank.entries[-1].update(state="scheduled", time_discovered_completed_ns=None, retired=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (1,), 8)


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("size-mismatch", {"size": 9}),
        ("dtype-mismatch", {"dtype": "Half"}),
    ],
)
def test_arguments_that_do_not_agree_are_named(tmp_path: Path, kind: str, odd: dict[str, int]) -> None:
    ranks = [steps(rank) for rank in job(4)]
    for rank in ranks:
        rank.op("all_reduce", line=10, done=False, **(odd if rank.rank == 1 else {}))  # type: ignore[arg-type]
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


def test_other_operation_at_the_same_position_is_an_order_mismatch(tmp_path: Path) -> None:
    ranks = job(4)
    for rank in ranks:
        rank.op("broadcast" if rank.rank == 0 else "all_reduce", line=1 + rank.rank // 3, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (0,))


def test_mismatch_that_the_back_end_let_pass_is_a_risk(tmp_path: Path) -> None:
    ranks = job(4)
    for rank in ranks:
        rank.op("all_reduce", dtype="Half" if rank.rank == 2 else "Float", line=5)
    verdict = verdict_on(write(tmp_path, ranks))
    assert verdict.outcome == "risk"
    assert (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == ("dtype-mismatch", (2,))


def test_groups_entered_in_opposite_order_are_a_cycle_without_a_culprit(tmp_path: Path) -> None:
    ranks = job(2, a=[0, 1], b=[0, 1])
    ranks[0].op("all_reduce", group="a", line=1, done=False)
    ranks[1].op("all_reduce", group="b", line=2, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("group-order-inversion", (0, 1))


def test_of_groups_issued_in_opposite_order_without_waiting_the_odd_rank_is_named(tmp_path: Path) -> None:
    ranks = job(3, a=[0, 1, 2], b=[0, 1, 2])
    for rank in ranks:
        for group in "ba" if rank.rank == 2 else "ab":
            rank.op("all_reduce", group=group, line=7, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("group-order-inversion", (2,))


def test_skip_that_shows_as_a_cycle_of_groups_is_called_a_skip(tmp_path: Path) -> None:
    ranks = job(3, a=[0, 1, 2])
    for rank in ranks:
        for _ in range(3):
            rank.op("all_reduce", group="a", line=10).op("all_reduce_barrier", line=20, size=1)
        if rank.rank == 1:
            rank.op("all_reduce_barrier", line=20, size=1, done=False)
        else:
            rank.op("all_reduce", group="a", line=10, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))


def test_chain_over_groups_leads_to_the_rank_that_waits_for_nothing(tmp_path: Path) -> None:
    ranks = job(4, a=[0, 1], b=[1, 2], c=[2, 3])
    ranks[0].op("all_reduce", group="a", done=False)
    ranks[1].op("all_reduce", group="b", done=False)
    ranks[2].op("all_reduce", group="c", done=False)
    ranks[3].op("all_reduce", group="0")  # only so that its dump is not empty
    for rank in ranks[:3]:
        rank.op("all_reduce", group="0")
        rank.entries.insert(0, rank.entries.pop())
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert finding.culprit_ranks == (3,)


def test_ranks_that_both_receive_first_are_a_cycle(tmp_path: Path) -> None:
    ranks = job(2)
    ranks[0].op("recv 0<-1", line=3, done=False)
    ranks[1].op("recv 1<-0", line=3, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-deadlock-cycle", (0, 1))


def test_a_receive_without_a_send_blames_the_peer(tmp_path: Path) -> None:
    ranks = job(2)
    ranks[0].op("recv 0<-1", line=3, done=False)
    ranks[1].op("all_reduce", group="0").entries.clear()
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-unmatched", (1,))


def test_a_transfer_of_another_size_is_a_mismatch(tmp_path: Path) -> None:
    ranks = job(2)
    ranks[0].op("send 0->1", size=8, done=False)
    ranks[1].op("recv 1<-0", size=4, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert finding.kind == "p2p-size-mismatch"


def test_all_in_and_none_done_is_a_stall_of_the_back_end(tmp_path: Path) -> None:
    ranks = [steps(rank).op("all_reduce", line=10, done=False) for rank in job(4)]
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("backend-stall", ())


def test_all_in_and_one_not_done_is_its_own_device(tmp_path: Path) -> None:
    ranks = [steps(rank).op("all_reduce", line=10, done=rank.rank != 1) for rank in job(4)]
    for rank in ranks:
        if rank.rank != 1:
            rank.op("all_reduce", line=20, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (1,))


def test_an_operation_scheduled_but_never_started_blames_its_device(tmp_path: Path) -> None:
    ranks = [
        steps(rank).op("all_reduce", line=10, done=False, state="scheduled" if rank.rank == 3 else "started")
        for rank in job(4)
    ]
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (3,))
    assert "never began" in finding.summary


def test_inside_the_call_is_distinguished_from_never_called(tmp_path: Path) -> None:
    ranks = [rank.op("all_reduce").op("all_reduce", line=10, done=False) for rank in job(4)]
    for rank in ranks:
        enqueued = 1 if rank.rank == 2 else 2
        rank.status = {"0": {"last_enqueued_collective": enqueued, "last_completed_collective": 1}}
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (2,))
    assert "inside the call" in finding.summary


def test_call_that_one_rank_makes_alone_is_its_own(tmp_path: Path) -> None:
    ranks = [steps(rank) for rank in job(4)]
    ranks[0].op("all_reduce_barrier", line=55, size=1, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert finding.culprit_ranks == (0,)
    assert finding.confidence < 0.7


def test_status_tells_how_far_a_rank_came_whose_entries_are_gone(tmp_path: Path) -> None:
    # Only operations that have not ended are in these dumps; numbers of groups are the process's own.
    ranks = job(3, **{"7": [0, 1, 2]})
    for rank in ranks:
        rank.first_id = 500
        seq = 40 if rank.rank == 1 else 41
        rank.status = {
            "0": {"last_enqueued_collective": 9, "last_completed_collective": 9},
            "4": {"last_enqueued_collective": seq, "last_completed_collective": 40},
        }
        if rank.rank != 1:
            rank.op("all_reduce", group="7", done=False)
            rank.entries[0].update(collective_seq_id=41, pg_id=4)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.culprit_ranks, finding.group and finding.group.name) == ((1,), "7")


def test_older_transfer_explains_why_all_in_does_not_end(tmp_path: Path) -> None:
    ranks = job(3, t=[0, 1])
    for rank in ranks[:2]:
        rank.op("send 0->2" if rank.rank == 0 else "send 1->2", done=False)
        rank.op("all_reduce", group="t", done=False)
    ranks[2].op("all_reduce").entries.clear()
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert finding.culprit_ranks == (2,)


def test_transfer_that_has_ended_on_the_other_side_only_is_the_device_of_this_one(tmp_path: Path) -> None:
    ranks = job(2)
    ranks[0].op("send 0->1").op("send 0->1")
    ranks[1].op("recv 1<-0").op("recv 1<-0", done=False)
    ranks[0].op("all_reduce", done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert finding.culprit_ranks == (1,)


def test_subgroup_calls_between_hide_no_skip(tmp_path: Path) -> None:
    # Rank 3 leaves out the barrier; what ranks 0-1 and 2-3 do in groups of their own before it tells nothing.
    ranks = job(4, a=[0, 1], b=[2, 3])
    for rank in ranks:
        for round_ in range(3):
            rank.op("broadcast", group="a" if rank.rank < 2 else "b", line=10)
            if round_ == 2 and rank.rank == 3:
                rank.op("all_reduce", line=30, size=2, done=False)
                break
            rank.op("all_reduce_barrier", line=20, size=1, done=round_ < 2)
            if round_ < 2:
                rank.op("all_reduce", line=30, size=2)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (3,), 5)


def test_next_round_issued_ahead_hides_no_skip(tmp_path: Path) -> None:
    # Rank 1 skips line 10 of its last round, and has issued line 10 of the next one already.
    ranks = [steps(rank) for rank in job(4)]
    for rank in ranks:
        if rank.rank != 1:
            rank.op("all_reduce", line=10, done=False)
        else:
            rank.op("all_reduce", line=20, size=2, done=False).op("all_reduce_barrier", line=30, size=1, done=False)
            rank.op("all_reduce", line=10, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (1,), 13)


def test_of_two_ranks_the_skipper_is_the_one_that_came_as_it_never_did_before(tmp_path: Path) -> None:
    ranks = [steps(rank) for rank in job(2)]
    ranks[0].op("all_reduce", line=20, size=2, done=False)  # always from line 10 before
    ranks[1].op("all_reduce", line=10, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (0,), 13)


def test_mismatch_that_a_device_let_pass_explains_a_later_hang(tmp_path: Path) -> None:
    ranks = [steps(rank).op("all_reduce", line=10, size=9 if rank.rank == 2 else 8) for rank in job(4)]
    for rank in ranks:
        rank.op("all_reduce", line=20, size=2, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("size-mismatch", (2,), 13)
    assert finding.waiting_ranks == (0, 1, 3)


def test_rank_without_a_dump_is_not_blamed_where_another_dump_is_unreadable(tmp_path: Path) -> None:
    paths = write(tmp_path, [steps(rank).op("all_reduce", line=10, done=False) for rank in job(8)])
    paths[1].write_bytes(b"\x80\x02}")
    verdict = verdict_on(paths[:7])
    assert (verdict.outcome, verdict.findings, verdict.ranks_missing) == ("unknown", (), (1, 7))


def test_transfer_that_neither_device_ends_is_a_stall_of_the_back_end(tmp_path: Path) -> None:
    ranks = job(2)
    ranks[0].op("send 0->1", line=4, done=False)
    ranks[1].op("recv 1<-0", line=5, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("backend-stall", (), (0, 1))


def test_transfer_of_another_type_of_the_same_size_is_named(tmp_path: Path) -> None:
    ranks = job(2)
    ranks[0].op("send 0->1", dtype="Float", done=False)
    ranks[1].op("recv 1<-0", dtype="Int", done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert finding.kind == "p2p-size-mismatch"
    assert "32 bytes of float32" in finding.summary
    assert "32 of int32" in finding.summary


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_groups_in_opposite_order_are_named_with_and_without_times_of_begins(tmp_path: Path, state: str) -> None:
    ranks = [steps(rank) for rank in job(3, a=[0, 1, 2], b=[0, 1, 2])]
    for rank in ranks:
        first, second = ("b", "a") if rank.rank == 1 else ("a", "b")
        rank.op("all_reduce", group=first, line=40, done=False, state=state)
        rank.op("all_reduce", group=second, line=50, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("group-order-inversion", (1,))


def test_calls_of_one_line_that_differ_are_named_by_their_callers(tmp_path: Path) -> None:
    ranks = [steps(rank) for rank in job(3)]
    for rank in ranks:
        is_odd = rank.rank == 1
        rank.op("all_reduce", line=40, called_at=66).op("all_reduce", line=40, called_at=77, size=3)
        rank.op("all_reduce", line=40, called_at=77 if is_odd else 66, size=3 if is_odd else 8, done=False)
    (finding,) = verdict_on(write(tmp_path, ranks)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == 77
    assert {site.line for site in finding.call_sites.values()} == {66}
