"""Calls that NCCL itself logs (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL): who parted from the others, who is behind."""

from tests.diagnosis import log_texts as texts
from tests.diagnosis.log_texts import Diagnose

Calls = list[tuple[str, int]]
SAME: Calls = [("AllReduce", 10), ("AllGather", 20), ("Broadcast", 5), ("AllReduce", 30)]


def started(rank: int, *, size: int = 4, number: str = "0xabc", address: str = "0x55") -> str:
    comm = f"comm {address}{rank} rank {rank} nranks {size} cudaDev {rank} nvmlDev {rank} busId 1{rank}000"
    return f"host:900{rank}:1 [{rank}] NCCL INFO ncclCommInitRank {comm} commId {number} - Init COMPLETE"


def call(rank: int, op: str, numel: int, *, nth: int = 0, size: int = 4, dtype: int = 7, root: int = 0) -> str:
    told = f"{op}: opCount {nth:x} sendbuff 0x1 recvbuff 0x2 count {numel} datatype {dtype} op 0 root {root}"
    return f"host:900{rank}:1 [{rank}] NCCL INFO {told} comm 0x55{rank} [nranks={size}] stream 0x3"


def log(calls: dict[int, Calls], *, with_creation: bool = True, first: int = 0) -> list[str]:
    lines = [started(rank, size=len(calls)) for rank in calls] if with_creation else []
    for rank, own in calls.items():
        lines += [call(rank, op, numel, nth=first + i, size=len(calls)) for i, (op, numel) in enumerate(own)]
    return lines


def test_the_rank_that_calls_something_else_is_named(diagnose_texts: Diagnose) -> None:
    other: Calls = [*SAME[:2], ("AllGather", 7), ("AllGather", 9)]
    for with_creation in (True, False):
        verdict = diagnose_texts("\n".join(log({0: SAME, 1: SAME, 2: other, 3: SAME}, with_creation=with_creation)))
        (finding,) = verdict.findings
        assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "collective-order-mismatch", (2,))
        assert (finding.waiting_ranks, finding.op, verdict.ranks_seen) == ((0, 1, 3), "all_gather", (0, 1, 2, 3))
        assert ("call #3" if with_creation else "opCount 2") in finding.summary


def test_a_call_skipped_or_made_once_too_often_is_distinguished_from_a_mix_up(diagnose_texts: Diagnose) -> None:
    less = diagnose_texts("\n".join(log({0: SAME, 1: [*SAME[:2], SAME[3]], 2: SAME}))).findings[0]
    assert (less.kind, less.culprit_ranks, less.op) == ("rank-skipped-collective", (1,), "broadcast")
    assert "left out" in less.summary
    more = diagnose_texts("\n".join(log({0: SAME, 1: [*SAME[:2], ("AllReduce", 1), *SAME[2:]], 2: SAME}))).findings[0]
    assert (more.kind, more.culprit_ranks, more.op) == ("rank-skipped-collective", (1,), "all_reduce")
    assert "one call too many" in more.summary


def test_sizes_types_and_roots_must_agree(diagnose_texts: Diagnose) -> None:
    base = [call(rank, "Broadcast", 8, nth=1) for rank in (0, 1, 2)]
    for odd, kind in (
        (call(3, "Broadcast", 9, nth=1), "size-mismatch"),
        (call(3, "Broadcast", 8, nth=1, dtype=6), "dtype-mismatch"),
        (call(3, "Broadcast", 8, nth=1, root=2), "root-mismatch"),
    ):
        (finding,) = diagnose_texts("\n".join([*base, odd])).findings
        assert (finding.kind, finding.culprit_ranks) == (kind, (3,))


def test_who_is_behind_is_named_once_an_operation_timed_out(diagnose_texts: Diagnose) -> None:
    lines = log({0: SAME, 1: SAME, 2: SAME, 3: SAME[:3]})
    running = diagnose_texts("\n".join(lines))
    assert (running.outcome, running.findings) == ("unknown", ())  # a log may be read while the job runs
    (finding,) = diagnose_texts("\n".join([*lines, *(texts.watchdog(rank) for rank in (0, 1, 2))])).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (3,), (0, 1, 2))
    assert "AllReduce of 30 float32" in finding.summary


def test_agreement_and_what_cannot_be_compared_name_no_culprit(diagnose_texts: Diagnose) -> None:
    assert diagnose_texts("\n".join(log(dict.fromkeys(range(4), SAME)))).findings == ()
    part = log({0: SAME, 1: [("AllGather", 1)], 2: SAME})
    assert diagnose_texts("\n".join(line for line in part if "host:9002" not in line)).findings == ()
    # Two hosts without lines of creation: a device is no rank. NCCL's count that stands still is no position.
    hosts = [line.replace("host:", f"node{i % 2}:") for i, line in enumerate(part) if "Init" not in line]
    assert diagnose_texts("\n".join(hosts)).findings == ()
    still = [call(rank, op, numel) for rank in (0, 1) for op, numel in (SAME if rank else SAME[::-1])]
    assert diagnose_texts("\n".join(line.replace("nranks=4", "nranks=2") for line in still)).findings == ()


def test_an_address_that_serves_again_is_another_communicator(diagnose_texts: Diagnose) -> None:
    lines = log(dict.fromkeys(range(3), SAME))
    lines += [started(rank, size=3, number="0xdef") for rank in range(3)]
    lines += [call(rank, "AllReduce", 4 if rank != 2 else 5, size=3) for rank in range(3)]
    (finding,) = diagnose_texts("\n".join(lines)).findings
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (2,))
    assert "call #1" in finding.summary
