"""Hand-built jobs in which ranks wait for one another: messages, groups, batches, pipelines, groups being made."""

from collections.abc import Sequence

import pytest

from dtprof.records import events
from dtprof.records.schema import FLAG
from dtprof.records.tables import Pipeline
from tests.builders import RankBuilder
from tests.diagnosis.judging import gradients, judge, loss, ranks_in_step


def message(
    rank: RankBuilder,
    name: str,
    peer: int,
    t: int,
    done: int | None = None,
    *,
    line: int,
    tag: int = 0,
    nbytes: int = 8,
) -> None:
    site = rank.site(name, line=line, function="exchange")
    rank.op(name, t, done, returned=t + 1, peer=peer, tag=tag, site=site, nbytes=nbytes)


def pair(world_size: int = 2) -> list[RankBuilder]:
    return [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]


def test_ranks_that_all_receive_before_they_send_are_a_cycle_of_messages() -> None:
    ranks = pair(3)
    for rank in ranks:
        message(rank, "recv", (rank.rank - 1) % 3, 100, line=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-deadlock-cycle", (0, 1, 2), ())
    assert {site.line for site in finding.culprit_call_sites.values()} == {8}


def test_a_chain_of_messages_that_one_late_rank_begins_is_no_cycle() -> None:
    ranks = pair(3)
    message(ranks[1], "recv", 0, 100, line=8)
    message(ranks[2], "recv", 1, 100, line=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-stuck", (0,), (1, 2))


def test_other_tags_at_both_ends_are_named_with_the_end_that_never_used_its_tag_before() -> None:
    ranks = pair()
    for step in range(3):
        message(ranks[0], "send", 1, step * 100, step * 100 + 9, line=4, tag=7)
        message(ranks[1], "recv", 0, step * 100, step * 100 + 9, line=5, tag=7)
    message(ranks[0], "send", 1, 300, line=4, tag=8)
    message(ranks[1], "recv", 0, 300, line=5, tag=7)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-tag-mismatch", (0,), (1,))


def test_a_message_whose_peer_waits_in_a_barrier_is_unmatched() -> None:
    ranks = pair(3)
    message(ranks[2], "recv", 0, 100, line=4)
    for rank in ranks[:2]:
        rank.op("barrier", 200, None, returned=201, site=rank.site("barrier", line=9))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-unmatched", (0,), (1, 2))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_turns_to_another_peer_than_ever_is_blamed_and_not_that_peer(late: int) -> None:
    ranks = pair(3)
    for t in (0, 100, 200):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
    message(ranks[0], "send", 1, 300 + 5 * (late == 0), line=4)
    message(ranks[1], "recv", 2, 300 + 5 * (late == 1), line=5)
    ranks[2].op("barrier", 250)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("p2p-unmatched", (1,))


@pytest.mark.parametrize("received", [8, 16])
def test_a_message_that_is_larger_than_what_is_received_is_a_size_mismatch(received: int) -> None:
    ranks = pair()
    message(ranks[0], "send", 1, 100, line=4, nbytes=16)
    message(ranks[1], "recv", 0, 100, line=5, nbytes=received)
    kinds = [finding.kind for finding in judge(ranks, exit_status=None).findings]
    assert (kinds == ["p2p-size-mismatch"]) == (received == 8)


def test_a_message_that_passed_into_a_larger_buffer_is_reported_though_the_job_went_well() -> None:
    ranks = pair()
    message(ranks[0], "send", 1, 100, 150, line=4, nbytes=8)
    message(ranks[1], "recv", 0, 100, 150, line=5, nbytes=16)
    verdict = judge(ranks, exit_status=0, stalled=False)
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == ("risk", ["p2p-size-mismatch"])


def test_messages_in_a_ring_that_met_are_healthy() -> None:
    ranks = pair(3)
    for rank in ranks:
        rank.op("send", 100, 190, is_async=True, waits=(110, 190), peer=(rank.rank + 1) % 3, nbytes=8)
        rank.op("recv", 101, 180, is_async=True, waits=(102, 110), peer=(rank.rank - 1) % 3, nbytes=8)
    assert judge(ranks, exit_status=0, stalled=False).findings == ()


def test_of_two_ends_with_tags_not_used_before_the_one_that_breaks_its_row_is_named() -> None:
    ranks = pair()
    for step in range(3):
        message(ranks[0], "send", 1, step * 100, step * 100 + 9, line=4, tag=step)
        message(ranks[1], "recv", 0, step * 100, step * 100 + 9, line=5, tag=step)
    message(ranks[0], "send", 1, 300, line=4, tag=3)
    message(ranks[1], "recv", 0, 300, line=5, tag=4)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-tag-mismatch", (1,), (0,))


def in_two_groups(orders: Sequence[str], *, done: bool, lines: Sequence[int] = (30, 40)) -> list[RankBuilder]:
    """Return ranks that enter groups a and b after two whole steps; each waits in the first of its order."""
    ranks = ranks_in_step(len(orders), 2)
    for rank, order in zip(ranks, orders, strict=True):
        ids = {name: rank.group(name, range(len(orders)), name) for name in "ab"}
        for i, name in enumerate(order):
            if done or i == 0:
                site = rank.site("all_reduce", line=lines[order != "ab"])
                t = 2000 + 10 * i
                end = t + 100 if done else None
                waits = (t + 50, t + 100) if done else None
                rank.op("all_reduce", t, end, is_async=True, waits=waits, group=ids[name], site=site, nbytes=8)
    return ranks


def test_groups_entered_in_opposite_order_are_a_cycle_with_the_odd_rank_as_culprit() -> None:
    finding = judge(in_two_groups(["ab", "ab", "ba"], done=False), exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-order-inversion", (2,), (0, 1))
    assert finding.culprit_call_sites[2].line == 40


def test_the_same_inversion_that_went_well_is_a_risk_and_the_same_order_is_none() -> None:
    verdict = judge(in_two_groups(["ab", "ab", "ba"], done=True), exit_status=0, stalled=False)
    assert (verdict.outcome, verdict.findings[0].kind) == ("risk", "group-order-risk")
    assert verdict.findings[0].severity == "warning"
    assert judge(in_two_groups(["ab", "ab", "ab"], done=True), exit_status=0, stalled=False).findings == ()


def test_groups_that_two_threads_of_a_rank_enter_in_any_order_are_no_risk() -> None:
    ranks = in_two_groups(["ab", "ab", "ab"], done=True)
    for rank in ranks:
        for i in range(4):
            late = (i + rank.rank) % 2
            rank.op("all_reduce", 3000 + 10 * i, 3100, thread=1, group=1, nbytes=8)
            rank.op("all_reduce", 2999 + 10 * i + 5 * late, 3100, thread=2, group=2, nbytes=8)
    assert judge(ranks, exit_status=0, stalled=False).findings == ()


def test_a_line_that_always_used_one_group_and_now_another_is_the_wrong_group() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = [rank.group(name, range(3), name) for name in "ab"]
        site = rank.site("all_reduce", line=30)
        for step in range(3):
            rank.op("all_reduce", step * 100, step * 100 + 9, group=groups[0], site=site, nbytes=8)
        rank.op("all_reduce", 300, None, returned=301, group=groups[rank.rank == 1], site=site, nbytes=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("wrong-group", (1,), (0, 2))


def test_a_line_that_uses_the_group_of_the_next_line_is_in_the_wrong_order() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        groups = [rank.group(name, range(3), name) for name in "ab"]
        sites = [rank.site("all_reduce", line=30 + i) for i in range(2)]
        for t in (0, 100, 200):
            for i in range(2):
                rank.op("all_reduce", t + 10 * i, t + 10 * i + 9, group=groups[i], site=sites[i], nbytes=8)
        rank.op("all_reduce", 300, None, returned=301, group=groups[rank.rank == 1], site=sites[0], nbytes=8)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-order-inversion", (1,), (0, 2))


def test_a_call_on_the_wrong_group_that_a_peer_met_is_found_where_ranks_wait_for_it_at_its_line() -> None:
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", rows[rank.rank // 2])
        column = rank.group(f"column{rank.rank % 2}", columns[rank.rank % 2])
        first, second = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, group=row, site=first)
            rank.op("all_reduce", t + 20, t + 29, group=column, site=second)
        rank.op("all_reduce", 300, 309, group=row, site=first)
        if rank.rank == 3:  # on its row instead of its column: that meets the next call of rank 2
            rank.op("all_reduce", 320, 409, group=row, site=second)
            rank.op("all_reduce", 420, group=row, site=first)
        elif rank.rank == 1:
            rank.op("all_reduce", 320, group=column, site=second)
        else:
            rank.op("all_reduce", 320, 329, group=column, site=second)
            rank.op("all_reduce", 400, 409 if rank.rank == 2 else None, group=row, site=first)
    rank = ranks[2]
    rank.op("all_reduce", 420, group=2, site=rank.site("all_reduce", line=31))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("wrong-group", (3,), "all_reduce")
    assert finding.culprit_call_sites[3].line == 31
    assert finding.group is not None
    assert finding.group.name == "column1"


def with_loaders(batches: Sequence[int], *, exhausted: Sequence[bool]) -> list[RankBuilder]:
    ranks = ranks_in_step(len(batches), 3)
    for rank, count, out in zip(ranks, batches, exhausted, strict=True):
        for i in range(count):
            rank.span(events.DATA, 10 * i, 10 * i + 5)
        if out:
            rank.span(events.DATA, 3000, 3001, flags=FLAG["skipped"])
    return ranks


def test_a_rank_that_ran_out_of_batches_while_its_peers_train_on_has_uneven_inputs() -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, True, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("uneven-inputs", (1,), (0, 2))


def test_where_events_were_dropped_batches_and_groups_are_compared_but_not_counted() -> None:
    ranks = with_loaders([1, 3, 2], exhausted=[False, True, False])  # of what rank 0 took, most was dropped
    ranks[0].dropped_events = 100
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("uneven-inputs", (1,))
    assert finding.summary.startswith("Rank 1 ran out of batches, and left the loop")
    assert "nobody knows how many" in finding.evidence[0]

    ranks = ranks_in_step(3, 1)
    ranks[2].dropped_events = 100
    for rank in ranks[:2]:
        rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    for i in range(3):  # kept by chance
        ranks[2].span(events.NEW_GROUP, 1100 + 10 * i, 1105 + 10 * i, site=ranks[2].site(line=60))
    loss(ranks[2], 1200, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (2,), (0, 1))
    assert not any("made" in fact for fact in finding.evidence)


def test_a_rank_that_leaves_with_batches_left_has_exited() -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, False, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    assert judge(ranks, exit_status=None).findings[0].kind == "rank-exited"


@pytest.mark.parametrize("plan", ["GPipe", "1F1B"])
def test_stages_with_other_numbers_of_microbatches_or_other_schedules_disagree(plan: str) -> None:
    ranks = pair()
    for rank in ranks:
        wrong = rank.rank == 1
        rank.pipelines[1] = Pipeline(
            schedule=plan if wrong else "GPipe", num_stages=2, stages=(rank.rank,), num_microbatches=4
        )
        count = 3 if wrong and plan == "GPipe" else 4
        rank.span(events.PP_STEP, 0, 100 if wrong else None, microbatch=1)
        for microbatch in range(count):
            rank.span(events.PP_FORWARD, microbatch * 10, microbatch * 10 + 5, stage=rank.rank, microbatch=microbatch)
    message(ranks[0], "recv", 1, 60, line=4)
    loss(ranks[1], 200, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert finding.kind == "pipeline-schedule-mismatch"
    assert (1 in finding.culprit_ranks) or plan == "1F1B"


def test_a_group_that_one_rank_does_not_make_is_named_with_the_line_of_the_others() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1100, 1150)
        if rank.rank == 2:
            loss(rank, 1200, done=False)
        else:
            rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (2,), (0, 1))
    assert {site.line for site in finding.call_sites.values()} == {70}


def test_lines_at_which_ranks_made_one_group_together_may_differ() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1100, 1150, site=rank.site(line=60 + rank.rank))
        rank.group("1", range(3))
        if rank.rank == 2:
            loss(rank, 1200, done=False)
        else:
            rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("group-creation-mismatch", (2,))
    assert {site.line for site in finding.call_sites.values()} == {70}


def test_an_operation_of_a_group_that_the_records_have_lost_is_no_error() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.op("all_reduce", 1200, group=7, site=rank.site("all_reduce", line=70))
    assert judge(ranks, exit_status=None).outcome in ("hang", "unknown")


def test_ranks_that_make_different_groups_at_a_time_differ_in_their_numbers() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        for _ in range(1 + (rank.rank != 2)):
            rank.span(events.NEW_GROUP, 1100, 1150, site=rank.site(line=60))
        rank.span(events.NEW_GROUP, 1200, site=rank.site(line=70))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (2,), (0, 1))


def test_a_rank_that_makes_another_group_than_the_others_at_its_place_is_named() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.span(events.NEW_GROUP, 1200, site=rank.site(line=60 if rank.rank == 1 else 70))
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("group-creation-mismatch", (1,), (0, 2))
    assert finding.culprit_call_sites[1].line == 60
