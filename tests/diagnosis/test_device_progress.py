"""Operations on devices are issued, started and completed; a hang there gets the verdict that it gets on gloo."""

from dtprof.diagnosis.job_state import Stack
from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.records import schema
from tests.builders import RankBuilder
from tests.diagnosis.judging import judge

FOLLOWED = schema.FLAG["device"] | schema.FLAG["followed"]
ON_STREAM = FOLLOWED | schema.FLAG["no_work"]


def issue(rank: RankBuilder, seq: int, *, line: int = 10, ran: tuple[int, int | None] | None = None) -> None:
    """Issue an all_reduce on the device at 1000 times its position; `ran` says when the device began and ended it."""
    site = rank.site("all_reduce", line=line)
    rank.op("all_reduce", 1000 * seq, returned=1000 * seq + 5, site=site, nbytes=64, flags=ON_STREAM, seq=seq)
    if ran is not None:
        rank.device_interval("operation", "all_reduce", *ran, host=(1000 * seq, 0), seq=seq)


def ranks_in_step(world_size: int, num_operations: int) -> list[RankBuilder]:
    """Return ranks whose devices ran so many operations."""
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]
    for rank in ranks:
        for seq in range(num_operations):
            issue(rank, seq, ran=(1000 * seq + 100, 1000 * seq + 200))
    return ranks


def test_operations_are_issued_then_started_then_completed() -> None:
    rank = RankBuilder(0, 2)
    issue(rank, 0, ran=(100, 200))
    issue(rank, 1, ran=(1100, None))
    issue(rank, 2)
    done, running, issued = rank_state(rank.tables(), exit=None, stack=None, alive=None).operations
    assert (done.done, done.open, done.started) == (True, False, False)
    assert (running.done, running.open, running.started) == (False, True, True)
    assert (issued.done, issued.open, issued.started) == (False, True, False)


def test_an_operation_whose_device_is_not_followed_is_not_called_open() -> None:
    rank = RankBuilder(0, 2)
    rank.op("all_reduce", 0, returned=5, flags=schema.FLAG["device"])
    (operation,) = rank_state(rank.tables(), exit=None, stack=None, alive=None).operations
    assert (operation.open, operation.started) == (False, None)


def test_an_operation_that_was_given_up_is_neither_open_nor_failed() -> None:
    # The program dropped its handle, or the device broke: the flag is taken back, and the interval has failed.
    rank = RankBuilder(0, 2)
    issue(rank, 0, ran=(100, 200))
    tables = rank.tables()
    tables.operations["flags"], tables.device_intervals["state"] = schema.FLAG["device"], schema.STATE["failed"]
    (given_up,) = rank_state(tables, exit=None, stack=None, alive=None).operations
    assert (given_up.open, given_up.failed, given_up.started) == (False, False, None)


def test_rank_that_stays_away_from_an_operation_is_named_though_the_others_left_the_call() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks[:2]:
        issue(rank, 4, line=20, ran=(4100, None))
    asleep = Stack(state="sleeping", cpu_share=0.0, frames=())
    verdict = judge(ranks, exit_status=None, stacks=dict.fromkeys(range(3), asleep))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-stuck", (2,))
    assert (finding.waiting_ranks, finding.call_sites[0].line) == ((0, 1), 20)


def test_rank_that_skips_an_operation_of_its_device_is_named_with_the_line() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks[:2]:
        issue(rank, 4, line=20, ran=(4100, None))
        issue(rank, 5, line=10)
    issue(ranks[2], 4, line=10, ran=(5100, None))  # it has gone on to the next step
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings[0].kind) == ("hang", "rank-skipped-collective")
    assert verdict.findings[0].culprit_ranks == (2,)


def test_rank_whose_stream_is_held_up_is_named_when_the_others_devices_have_begun() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        issue(rank, 4, line=20, ran=None if rank.rank == 1 else (4100, None))
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[1].line) == ("rank-stuck", (1,), 20)
    assert "its device never began" in finding.summary


def test_operation_that_all_devices_began_and_none_ends_is_a_stall_of_the_back_end() -> None:
    ranks = ranks_in_step(3, 4)
    for rank in ranks:
        issue(rank, 4, line=20, ran=(4100, None))
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("backend-stall", (), (0, 1, 2))


def test_devices_that_completed_everything_leave_nothing_open() -> None:
    ranks = ranks_in_step(3, 4)
    states = [rank_state(rank.tables(), exit=None, stack=None, alive=None) for rank in ranks]
    assert [state.open_operations for state in states] == [(), (), ()]
    assert states[0].last_ns - states[0].operations[0].issued_ns == 3200  # the last end on the device
