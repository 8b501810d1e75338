"""Ends and refusals as launchers and libraries other than torchrun tell them: Lightning, MPI, rich, DDP's own check."""

import pytest

from tests.diagnosis.log_texts import Diagnose, table

BOX = """\
╭──────────────────────────── Traceback (most recent call last) ────────────────────────────╮
│ /home/u/proj/train.py:88 in <module>                                                      │
│                                                                                           │
│    86 if __name__ == "__main__":                                                          │
│ ❱  88     main()                                                                          │
│                                                                                           │
│ /home/u/proj/a/rather/long/folder/of/a/library/steps.py:61                                │
│ in training_step                                                                          │
│                                                                                           │
│ ❱  61 │   return batch["labels"]                                                          │
│ ╭───────── locals ─────────╮                                                              │
│ │ batch = {'ids': 1}       │                                                              │
│ ╰──────────────────────────╯                                                              │
╰───────────────────────────────────────────────────────────────────────────────────────────╯
KeyError: 'labels'
"""
COUNT = (
    "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent "
    "{} params."
)
SHAPE = (
    "RuntimeError: [{}]: params[3] in this process with sizes [10, 4] appears not to match sizes of the same param in "
    "process 0."
)


def test_a_traceback_in_a_box_is_a_traceback(diagnose_texts: Diagnose) -> None:
    end = "ERROR:torch.distributed.elastic: failed (exitcode: 1) local_rank: 1 (pid: 4411) of binary: python"
    (finding,) = diagnose_texts(BOX + end).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    site = finding.culprit_call_sites[1]
    assert (site.file.rpartition("/")[2], site.line) == ("steps.py", 61)
    assert "KeyError: 'labels'" in finding.summary


@pytest.mark.parametrize(
    "text", ["╭──── a table ────╮\n│ loss │ 2.1 │\n╰───────────────╯", "│ /w/train.py:88 in main │"]
)
def test_a_box_that_is_no_traceback_says_nothing(diagnose_texts: Diagnose, text: str) -> None:
    assert diagnose_texts(text).findings == ()


@pytest.mark.parametrize(
    ("text", "kind", "rank"),
    [
        ("[rank: 2] Child process with PID 33 terminated with code -9. Forcefully terminating all", "rank-killed", 2),
        ("[rank: 1] Child process with PID 22 terminated with code 1. Forcefully terminating all", "rank-crashed", 1),
        ("mpirun detected that one or more\n  Process name: [[18563,1],3]\n  Exit code:    1", "rank-crashed", 3),
        ("MPI_ABORT was invoked on rank 4 in communicator MPI_COMM_WORLD", "rank-crashed", 4),
        (
            "[rank0]: DistNetworkError: The server socket has failed to listen on any, name: EADDRINUSE",
            "rank-crashed",
            0,
        ),
        (
            "[rank5]: DistBackendError: NCCL error\n[rank5]: Cuda failure 'driver version is insufficient'",
            "rank-crashed",
            5,
        ),
        (
            "[rank3]: DistBackendError: NCCL error\n[rank3]: ncclSystemError: System call failed or device error.\n"
            "[rank3]: Last error:\n[rank3]: Error while creating shared memory segment /dev/shm/nccl-Bh7 (size 96)",
            "rank-crashed",
            3,
        ),
        (
            "[rank2]: DistBackendError: NCCL error\n[rank2]: ncclInternalError: Internal check failed.\n"
            "[rank2]: Last error:\n[rank2]: Bootstrap : no socket interface found",
            "rank-crashed",
            2,
        ),
    ],
)
def test_the_rank_that_ended_is_named(diagnose_texts: Diagnose, text: str, kind: str, rank: int) -> None:
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", kind, (rank,))


def test_a_network_that_does_not_connect_names_no_culprit(diagnose_texts: Diagnose) -> None:
    text = "[rank8]: Last error:\n[rank8]: socketStartConnect: Connect to 10.0.3.7<41211> failed : No route to host"
    (finding,) = diagnose_texts(f"[rank8]: ncclSystemError: System call\n{text}").findings
    assert (finding.kind, finding.culprit_ranks) == ("backend-stall", ())
    assert "10.0.3.7" in finding.evidence[0]


WATCHDOG = "Process group watchdog thread terminated with exception: NCCL error: {}, NCCL version 2.27.5"


@pytest.mark.parametrize(
    ("words", "state", "sure", "said"),
    [
        ("remote process exited or there was a network error", "ncclRemoteError", 0.3, "lost a peer"),
        ("unhandled system error", "ncclSystemError", 0.2, "ncclSystemError"),
        ("internal error", "ncclInternalError", 0.2, "ncclInternalError"),
    ],
)
def test_a_state_of_nccl_is_a_finding_that_names_no_culprit(
    diagnose_texts: Diagnose, words: str, state: str, sure: float, said: str
) -> None:
    verdict = diagnose_texts(f"[rank1]: {WATCHDOG.format(words)}\n[rank1]: {state}: What it stands for.")
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "backend-stall", ())
    assert (finding.waiting_ranks, finding.confidence) == ((1,), sure)
    assert said in finding.summary


def test_models_that_differ_under_ddp(diagnose_texts: Diagnose) -> None:
    counts = {0: (14, 1, 12), 1: (12, 0, 14), 2: (14, 1, 12)}
    lines = [
        f"[rank{rank}]: {COUNT.format(rank, mine, other, theirs)}" for rank, (mine, other, theirs) in counts.items()
    ]
    (finding,) = diagnose_texts("\n".join(lines)).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("size-mismatch", (1,), (0, 2))
    (finding,) = diagnose_texts(f"[rank2]: {SHAPE.format(2)}").findings
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (2,))
    (finding,) = diagnose_texts("\n".join(f"[rank{rank}]: {SHAPE.format(rank)}" for rank in (1, 2, 3))).findings
    assert finding.culprit_ranks == (0,)


def test_a_peer_that_died_is_no_other_model(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts(f"[rank0]: {COUNT.format(0, 14, 1, 0)}")
    assert all(finding.kind != "size-mismatch" for finding in verdict.findings)


@pytest.mark.parametrize(
    ("exits", "culprits", "said"),
    [
        ({1: 1}, (1,), "Rank 1 ended with exit status 1, and its exception is not in the log."),
        # Ranks end at the second of their number.
        ({2: 1, 1: 2}, (1, 2), "Ranks 1, 2 ended with exit status 1, 2, and their exceptions are not in the log."),
        ({1: 1, 5: 1, 6: -15}, (1,), "Rank 1 ended with exit status 1, and its exception is not in the log."),
    ],
)
def test_ranks_that_ended_first_are_named_where_no_exception_is(
    diagnose_texts: Diagnose, exits: dict[int, int], culprits: tuple[int, ...], said: str
) -> None:
    (finding,) = diagnose_texts(table(exits, first=min(exits))).findings
    assert (finding.kind, finding.culprit_ranks, finding.summary) == ("rank-crashed", culprits, said)
    assert finding.confidence <= 0.5
    assert any("rank 5 ended 4 s or more after" in fact for fact in finding.evidence) == (5 in exits)
