"""Hand-built jobs in which a rank takes an odd turn: to another peer or group, out of step, out of the job."""

import pytest

from tests.builders import RankBuilder
from tests.diagnosis.judging import CONNECTION_LOST, STEP, gradients, judge, ranks_in_step
from tests.diagnosis.test_wait_graph import message, pair

LIMIT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation"
)
WELL = dict.fromkeys(range(3), (0, 9000))


def test_calls_of_a_thread_that_makes_no_steps_need_not_meet_in_the_same_step() -> None:
    def verdict(thread: int) -> str:
        ranks = [RankBuilder(rank, 3) for rank in range(3)]
        for rank in ranks:
            own = rank.group("own", range(3))
            line = rank.site("all_gather", line=30)
            for step in range(5):
                gradients(rank, step * STEP, done=True)
                rank.span("optimizer", step * STEP + 300, step * STEP + 310)
                late = 2 * (rank.rank == 1)  # one rank's calls meet those of the others two steps later
                for i in range(2):
                    t = step * STEP + 500 + i * 100
                    where = step + (late if step > 0 else 0)
                    rank.op("all_gather", t, t + 9, group=own, site=line, thread=thread, step=where)
        return judge(ranks, exit_status=0, stalled=False, statuses=WELL).outcome

    assert (verdict(thread=2), verdict(thread=1)) == ("healthy", "risk")


@pytest.mark.parametrize("stalled", [True, False])
def test_receives_that_nobody_waits_for_explain_an_operation_that_all_came_to(stalled: bool) -> None:
    def findings(*, waited: bool) -> list[tuple[str, tuple[int, ...]]]:
        ranks = [RankBuilder(rank, 2, closed=not stalled) for rank in range(2)]
        for t in (100, 200, 300):
            message(ranks[0], "send", 1, t, t + 9, line=4)
            site = ranks[1].site("irecv", line=5, function="exchange")
            done = t + 9 if waited else None
            ranks[1].op("recv", t, done, returned=t + 1, peer=0, site=site, nbytes=8, is_async=True)
        for rank in ranks:
            rank.op("barrier", 400, None if stalled else 409, returned=401)
        status = None if stalled else 0
        found = judge(ranks, exit_status=status, stalled=stalled, statuses=None if stalled else WELL).findings
        return [(finding.kind, finding.culprit_ranks) for finding in found if finding.severity != "info"]

    assert findings(waited=False) == [("unwaited-async", (1,))]
    assert findings(waited=True) == ([("backend-stall", ())] if stalled else [])


def test_a_message_to_a_peer_as_never_before_is_no_cycle_but_what_its_peer_of_old_misses() -> None:
    ranks = pair(3)
    for t in (0, 100):
        message(ranks[0], "send", 1, t, t + 9, line=4)
        message(ranks[1], "recv", 0, t, t + 9, line=5)
        message(ranks[1], "send", 2, t + 20, t + 29, line=6)
        message(ranks[2], "recv", 1, t + 20, t + 29, line=5)
    message(ranks[2], "recv", 1, 150, line=5)
    message(ranks[1], "recv", 0, 200, line=5)
    message(ranks[0], "send", 2, 210, line=4)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-unmatched", (0,), (1, 2))


def test_a_call_on_another_group_is_found_where_it_met_a_call_of_another_size_there() -> None:
    ranks = pair(4)
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        column = rank.group(f"column{rank.rank % 2}", (rank.rank % 2, rank.rank % 2 + 2))
        first, second = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for t in (0, 100):
            rank.op("all_reduce", t, t + 9, group=row, site=first, nbytes=64)
            rank.op("all_reduce", t + 20, t + 29, group=column, site=second, nbytes=16)
        if rank.rank == 2:
            rank.op("all_reduce", 200, 290, group=column, site=first, nbytes=64, state="failed")
        elif rank.rank == 3:
            rank.op("all_reduce", 200, group=row, site=first, nbytes=64)
        else:
            rank.op("all_reduce", 200, 209, group=row, site=first, nbytes=64)
            rank.op("all_reduce", 220, group=column, site=second, nbytes=16)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("wrong-group", (2,))
    assert finding.culprit_call_sites[2].line == 30
    assert any("sizes" in fact for fact in finding.evidence)


def preempted(
    statuses: dict[int, tuple[int, int]], *, exit_status: int = 1, message: str = CONNECTION_LOST
) -> tuple[str, tuple[int, ...]]:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=rank.rank == 2)
        if rank.rank != 2 and statuses[rank.rank][0] == 1:
            rank.exception(2500, message=message)
    verdict = judge(ranks, statuses=statuses, exit_status=exit_status)
    return (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) if verdict.findings else (verdict.outcome, ())


def test_sigterm_of_one_rank_while_the_others_live_on_is_not_the_end_of_the_whole_job() -> None:
    second = 1_000_000_000
    assert preempted({2: (-15, 2400), 0: (1, 2600), 1: (1, 2700)}) == ("rank-killed", (2,))
    assert preempted({2: (-15, 2400), 0: (-15, 3 * second), 1: (-15, 3 * second)}) == ("rank-killed", (2,))
    assert preempted({2: (-15, 2400), 0: (-15, 2500), 1: (-15, 9000)})[0] != "rank-killed"
    assert preempted({2: (-15, 2400), 0: (1, 2600), 1: (1, 2700)}, exit_status=-15)[0] != "rank-killed"
    # A launcher ends the last one where the others failed before, here by a limit.
    assert preempted({2: (-15, 2900), 0: (1, 2600), 1: (1, 2700)})[0] != "rank-killed"
    assert preempted({2: (-15, 2400), 0: (1, 2600), 1: (1, 2700)}, message=LIMIT)[0] != "rank-killed"


@pytest.mark.parametrize(("saving", "kind"), [((0, 1), "rank-skipped-collective"), ((0,), "collective-order-mismatch")])
def test_a_call_made_for_the_first_time_was_skipped_by_one_or_added_by_one(saving: tuple[int, ...], kind: str) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        if rank.rank in saving:
            site = rank.site("all_gather_object", line=50, function="save")
            rank.op("all_gather", 3050, None, returned=3051, site=site, nbytes=8)
        else:
            rank.span("backward", 3000, 3200)
            gradients(rank, 3000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,) if saving == (0, 1) else (0,))
