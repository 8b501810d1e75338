"""The critical path over ranks, worked out by hand."""

from dtprof.analysis.results import CriticalPathResult, PathOperation, PathRank
from dtprof.analysis.run_summary import summarise
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
STEP = 100 * MS


def path_of(ranks: list[RankBuilder]) -> CriticalPathResult:
    found = summarise(MemoryRun(ranks)).critical_path
    assert found is not None
    assert sum(found.phases_ns.values()) + found.transfer_ns == found.step_ns
    return found


def test_the_path_leads_through_the_last_rank_to_arrive_and_never_through_waits() -> None:
    # Each step of 100 ms: data 20, backward to the all_reduce at 50 on rank 0 and 70 on rank 1, which transfers until
    # 80; optimizer from 90 on. Path: optimizer 10, host 10, transfer 10, and of rank 1 backward 50 and data 20.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for step in range(6):
        for rank, late in zip(ranks, (50, 70), strict=True):
            begin = step * STEP
            rank.span("data", begin, begin + 20 * MS)
            rank.span("backward", begin + 20 * MS, begin + late * MS)
            rank.op("all_reduce", begin + late * MS, begin + 80 * MS)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    found = path_of(ranks)
    assert found.step_ns == STEP
    spent = {phase: ns // MS for phase, ns in found.phases_ns.items() if ns}
    assert spent == {"data": 20, "backward": 50, "optimizer": 10, "other": 10}
    assert found.operations == (PathOperation(op="all_reduce", group="0", transfer_ns=10 * MS),)
    # Both end the step at the same moment: the last 20 ms are the first rank's.
    assert found.ranks == (PathRank(rank=1, work_ns=70 * MS), PathRank(rank=0, work_ns=20 * MS))


def test_transfers_that_queue_are_all_on_the_path_and_hidden_work_is_not() -> None:
    # Buckets issued at 20, 30 and 40 are done at 50, 70 and 90; the backward pass ends at 90, blocked from 41 on. What
    # bounds the step is the queue of transfers from 20 on, not the backward pass beside it.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for step in range(6):
        for rank in ranks:
            begin = step * STEP
            rank.span("backward", begin, begin + 90 * MS)
            for issued, done in ((20, 50), (30, 70), (40, 90)):
                at = begin + issued * MS
                rank.op("all_reduce", at, begin + done * MS, returned=at + MS, is_async=True)
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    found = path_of(ranks)
    assert {phase: ns // MS for phase, ns in found.phases_ns.items() if ns} == {"backward": 20, "optimizer": 10}
    assert found.transfer_ns == 70 * MS


def test_a_message_that_is_waited_for_later_leads_to_the_work_before_the_wait() -> None:
    # A message of 10 ms is sent and received at 10; its sender computes until 80 and then waits for the handle, which
    # takes 2 ms: the backend shows only there that it is done. The path is the sender's work, not 72 ms of a message.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for step in range(6):
        begin = step * STEP
        first, second = ranks
        at = begin + 10 * MS
        waited = (begin + 80 * MS, begin + 82 * MS)
        first.op("send", at, waited[1], waits=waited, is_async=True, peer=1)
        second.op("recv", at, at + 10 * MS, peer=0)
        first.span("backward", begin, begin + 80 * MS)
        second.span("backward", begin + 20 * MS, begin + 40 * MS)
        first.span("optimizer", begin + 90 * MS, begin + STEP)
        second.span("optimizer", begin + 60 * MS, begin + 70 * MS)
    found = path_of(ranks)
    assert {phase: ns // MS for phase, ns in found.phases_ns.items() if ns} == {
        "backward": 80, "optimizer": 10, "other": 8,
    }  # fmt: skip
    assert found.transfer_ns == 2 * MS


def test_a_message_leads_to_its_sender() -> None:
    # Stage 0 computes until 40 and sends; stage 1 receives at 45 and computes until 85; both reduce at 85, done at 90.
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for step in range(6):
        begin = step * STEP
        first, second = ranks
        first.span("forward", begin, begin + 40 * MS)
        first.op("send", begin + 40 * MS, begin + 40 * MS, peer=1)
        second.op("recv", begin + 5 * MS, begin + 45 * MS, peer=0)
        second.span("backward", begin + 45 * MS, begin + 85 * MS)
        first.op("all_reduce", begin + 41 * MS, begin + 90 * MS)
        second.op("all_reduce", begin + 85 * MS, begin + 90 * MS)
        for rank in ranks:
            rank.span("optimizer", begin + 90 * MS, begin + STEP)
    # Steps end where an optimizer follows a backward pass: rank 0 has none of its own.
    for step in range(6):
        ranks[0].span("backward", step * STEP + 41 * MS, step * STEP + 41 * MS)
    found = path_of(ranks)
    assert {phase: ns // MS for phase, ns in found.phases_ns.items() if ns} == {
        "forward": 40,
        "backward": 40,
        "optimizer": 10,
    }
    assert {operation.op: operation.transfer_ns // MS for operation in found.operations} == {"all_reduce": 5, "recv": 5}
