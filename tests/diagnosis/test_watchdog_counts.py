"""Logs whose only numbers are the counts that ranks print when a watchdog asks for their dumps; transports, too."""

import pytest

from tests.diagnosis.log_texts import Diagnose

SIGNAL = "Received a dump signal due to a collective timeout from {whom} and we will try our best to dump."


def told(rank: int, *, enqueued: int, done: int, group_rank: int | None = None, whom: str = "this local rank") -> str:
    where = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank if group_rank is None else group_rank}]"
    counts = f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {done}."
    return f"[rank{rank}]:[E120 13:01:11.4 ProcessGroupNCCL.cpp:1870] {where} {SIGNAL.format(whom=whom)} {counts}"


def test_the_rank_whose_count_stands_below_is_named(diagnose_texts: Diagnose) -> None:
    lines = [told(rank, enqueued=64, done=61, whom="rank 0") for rank in (0, 1, 3)] + [told(2, enqueued=61, done=61)]
    verdict = diagnose_texts("\n".join(lines))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind) == ("hang", "rank-skipped-collective")
    assert (finding.culprit_ranks, finding.waiting_ranks, finding.seq) == ((2,), (0, 1, 3), 62)
    assert "last enqueued #61" in finding.evidence[0]


def test_when_all_began_it_nobody_is_accused(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("\n".join(told(rank, enqueued=64, done=61) for rank in range(4)))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks, finding.seq) == ("hang", "backend-stall", (), 62)
    assert verdict.cannot_tell


@pytest.mark.parametrize(
    "lines",
    [
        [told(rank, enqueued=6, done=6) for rank in range(4)],  # the group that timed out is another one
        [told(0, enqueued=64, done=61), *(told(rank, enqueued=61, done=61) for rank in (1, 2, 3))],  # one too many?
        [told(0, enqueued=64, done=61), told(4, enqueued=61, done=61, group_rank=0)],  # one name for two groups
        [told(0, enqueued=64, done=61)],
    ],
)
def test_counts_that_do_not_decide_are_a_hang_that_is_unknown(diagnose_texts: Diagnose, lines: list[str]) -> None:
    verdict = diagnose_texts("\n".join(lines))
    assert (verdict.outcome, verdict.findings) == ("hang", ())
    assert "a collective timed out" in verdict.cannot_tell[0]


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("NCCL WARN NET/IB : Collective mismatch error: local size 81920 remote size 65536", "size-mismatch", "size"),
        (
            "[rank1]:[E528 08:52 ProcessGroupGloo.cpp:145] Gloo connectFullMesh failed with [pair.cc:144] no error",
            "backend-stall",
            "connect",
        ),
        (
            "[rank3]: NCCL error: NET/OFI Request 0x7f14 completed with error. RC: 113. Error: 2 (UNDELIVERABLE).",
            "backend-stall",
            "transport",
        ),
    ],
)
def test_transports_name_no_rank(diagnose_texts: Diagnose, line: str, kind: str, words: str) -> None:
    verdict = diagnose_texts(line)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", kind, ())
    assert words in finding.summary


def test_a_mismatch_is_read_whatever_stands_around_it(diagnose_texts: Diagnose) -> None:
    prints = [f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType={op})" for rank, op in
              ((0, "ALLREDUCE"), (1, "BROADCAST"))]  # fmt: skip
    verdict = diagnose_texts(
        f"[WARN] breaker open: Detected mismatch between collectives on ranks. {', but '.join(prints)}"
    )
    assert verdict.findings[0].kind == "collective-order-mismatch"


def test_a_bus_error_points_at_shared_memory(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("srun: error: node7: task 3: Bus error")
    (finding,) = verdict.findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (3,))
    assert "/dev/shm" in finding.advice[0]
