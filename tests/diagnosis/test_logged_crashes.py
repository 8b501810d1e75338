"""Exceptions, signals and exits in logs: causes against consequences, failures against what was handled."""

import pytest

from tests.diagnosis import log_texts as texts
from tests.diagnosis.log_texts import Diagnose

ORDINARY = "\n".join(f"step {i} loss 0.{i}" for i in range(60))


def gloo(rank: int, error: str, *, line: int = 90, call: str = "all_reduce", source: str = "dist.all_reduce(t)") -> str:
    """Return the traceback of a rank whose operation failed."""
    return texts.traceback(error, line=line, source=source, call=call, prefix=f"[rank{rank}]: ")


def test_own_exception_is_the_cause_and_lost_peers_its_consequence(diagnose_texts: Diagnose) -> None:
    crash = texts.traceback("ValueError: bad shard 17", line=61, source="check(shard)", prefix="[rank2]: ")
    text = "\n".join(
        [gloo(0, texts.GLOO_LOST), crash, gloo(1, texts.GLOO_LOST), texts.table({0: 1, 1: -15, 2: 1}, first=0)]
    )
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind) == ("crash", "rank-crashed")
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((2,), (0, 1))
    assert finding.culprit_call_sites[2].line == 61
    assert finding.call_sites[0].line == 90
    assert finding.confidence >= 0.9


def test_exception_without_rank_belongs_to_the_only_rank_that_failed(diagnose_texts: Diagnose) -> None:
    crash = texts.traceback("KeyError: 'lr'", line=7, source="cfg['lr']")
    (finding,) = diagnose_texts(crash + "\n" + texts.table({0: -15, 1: 1}, first=1)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))


def test_device_memory_is_named(diagnose_texts: Diagnose) -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    (finding,) = diagnose_texts(texts.traceback(error, line=5, source="y = f(x)", prefix="[rank3]: ")).findings
    assert finding.culprit_ranks == (3,)
    assert "device" in finding.advice[0]


def test_every_rank_with_the_same_exception_is_a_culprit(diagnose_texts: Diagnose) -> None:
    error = "ModuleNotFoundError: No module named 'apex'"
    text = "\n".join(texts.traceback(error, line=3, source="import apex", prefix=f"[rank{r}]: ") for r in range(4))
    (finding,) = diagnose_texts(text).findings
    assert finding.culprit_ranks == (0, 1, 2, 3)


def test_logged_exception_of_a_program_that_goes_on_is_no_finding(diagnose_texts: Diagnose) -> None:
    handled = texts.traceback("OSError: [Errno 5] Input/output error", line=5, source="read()")
    verdict = diagnose_texts(f"{ORDINARY}\n{handled}\n{ORDINARY}")
    assert verdict.findings == ()
    assert verdict.outcome == "unknown"


@pytest.mark.parametrize(
    "record",
    [
        "ERROR:root:will retry",
        "2026-11-26 17:40:01,123 - train - ERROR - will retry",
        "[ERROR|loader.py:31] will retry",
    ],
)
def test_an_exception_that_logging_printed_is_no_finding_where_any_line_follows(
    diagnose_texts: Diagnose, record: str
) -> None:
    caught = f"{record}\n" + texts.traceback("TimeoutError: shard 3", line=5, source="read()")
    assert diagnose_texts(f"{caught}\n{caught}\nstep 5 loss 2.1").findings == ()
    assert [found.kind for found in diagnose_texts(caught).findings] == ["rank-crashed"]
    failed = caught + "\n" + texts.table({0: -15, 1: 1}, first=1)
    assert [found.culprit_ranks for found in diagnose_texts(f"{failed}\nstep 5 loss 2.1").findings] == [(1,)]


@pytest.mark.parametrize("words", ["Exception ignored in: <function Pool.__del__>", "Exception in thread Thread-3:"])
def test_exception_that_ends_no_process_is_no_finding(diagnose_texts: Diagnose, words: str) -> None:
    assert diagnose_texts(words + "\n" + texts.traceback("TypeError: x", line=5, source="f()")).findings == ()


def test_failed_operation_in_a_finally_does_not_hide_the_first_exception(diagnose_texts: Diagnose) -> None:
    first = texts.traceback("ValueError: bad", line=61, source="check(x)")
    second = texts.traceback(texts.GLOO_LOST, line=70, source="dist.barrier()", call="barrier")
    chained = f"{first}\n\nDuring handling of the above exception, another exception occurred:\n\n{second}"
    text = "\n".join("[rank1]: " + line for line in chained.split("\n")) + "\n" + gloo(0, texts.GLOO_LOST)
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    assert "ValueError" in finding.summary


def test_timeout_of_a_users_own_connection_is_the_ranks_own(diagnose_texts: Diagnose) -> None:
    error = "requests.exceptions.ConnectionError: HTTPSConnectionPool: Connection refused, timed out"
    text = texts.traceback(error, line=31, source="download(url)", prefix="[rank1]: ") + "\n" + gloo(0, texts.GLOO_LATE)
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))


def test_what_a_rank_raises_after_the_watchdog_is_a_consequence(diagnose_texts: Diagnose) -> None:
    after = texts.traceback("AttributeError: 'NoneType'", line=99, source="w.close()", prefix="[rank0]: ")
    text = "\n".join([*(texts.watchdog(r) for r in (0, 1, 3)), after])
    assert diagnose_texts(text).findings[0].culprit_ranks == (2,)


def test_killed_rank_is_named_and_memory_where_the_log_tells(diagnose_texts: Diagnose) -> None:
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed."
    text = "\n".join([gloo(0, texts.GLOO_LOST), oom, texts.table({0: 1, 1: -9, 2: -15}, first=0)])
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-killed", (1,))
    assert "memory" in finding.advice[0]


def test_spawned_process_names_its_rank(diagnose_texts: Diagnose) -> None:
    parent = texts.traceback("torch.multiprocessing.spawn.ProcessRaisedException: ", line=9, source="mp.spawn(main)")
    child = texts.traceback("ZeroDivisionError: division by zero", line=44, source="1 / 0")
    text = f"{parent}\n\n-- Process 1 terminated with the following error:\n{child}\n"
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    assert finding.culprit_call_sites[1].line == 44


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: node7: task 2: Killed",
        "-- Process 2: torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 2 (pid: 8) of binary: p",
        "mpirun noticed that process rank 2 with PID 0 on node n1 exited on signal 9 (Killed).",
    ],
)
def test_launchers_tell_of_a_killed_rank_in_their_own_words(diagnose_texts: Diagnose, line: str) -> None:
    (finding,) = diagnose_texts(line).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (2,))


def test_all_ranks_killed_alike_tells_not_who_began(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts(texts.table({0: -11, 1: -11, 2: -11}, first=1))
    assert verdict.findings[0].culprit_ranks == ()
    assert verdict.cannot_tell


def test_rank_without_entry_in_the_table_had_left(diagnose_texts: Diagnose) -> None:
    text = "\n".join([gloo(0, texts.GLOO_LOST), gloo(2, texts.GLOO_LOST), texts.table({0: -15, 2: 1}, first=2)])
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-exited", (1,))


def test_ranks_of_another_host_are_not_said_to_have_left(diagnose_texts: Diagnose) -> None:
    late = "\n".join(gloo(r, texts.GLOO_LATE) for r in (2, 3))
    text = (
        late
        + "\n"
        + texts.table({2: 1, 3: 1}, first=2)
        .replace("local_rank: 2", "local_rank: 0")
        .replace("local_rank: 3", "local_rank: 1")
    )
    verdict = diagnose_texts(text)
    assert all(finding.kind != "rank-exited" for finding in verdict.findings)


def test_absent_rank_is_named_when_the_others_timed_out(diagnose_texts: Diagnose) -> None:
    late = [gloo(r, texts.GLOO_LATE) for r in (0, 2, 3)]
    verdict = diagnose_texts("\n".join([*late, texts.table({0: 1, 1: -15, 2: 1, 3: 1}, first=0)]))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind) == ("hang", "rank-skipped-collective")
    assert (finding.culprit_ranks, finding.op) == ((1,), "all_reduce")


def test_stop_from_outside_is_no_fault(diagnose_texts: Diagnose) -> None:
    text = "W1121 10:00:00.1 1 elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers"
    verdict = diagnose_texts(text)
    assert (verdict.outcome, verdict.findings) == ("unknown", ())
    assert "outside" in verdict.cannot_tell[0]


def test_new_job_in_the_same_file_is_the_one_that_counts(diagnose_texts: Diagnose) -> None:
    old = texts.traceback("KeyError: 'a'", line=7, source="cfg['a']", prefix="[rank0]: ")
    start = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"
    verdict = diagnose_texts(f"{old}\n{start}\n{ORDINARY}")
    assert verdict.findings == ()
    assert any("earlier" in reason for reason in verdict.cannot_tell)


def test_one_rank_that_waits_while_most_are_silent_names_no_culprit(diagnose_texts: Diagnose) -> None:
    text = gloo(2, texts.GLOO_LATE, call="barrier") + "\n" + texts.table({0: -15, 1: -15, 2: 1}, first=2)
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.culprit_ranks, finding.waiting_ranks) == ("hang", (), (2,))
    assert finding.confidence < 0.5
    assert len(verdict.cannot_tell) == 1


def test_all_that_the_table_lists_lost_a_peer_that_it_does_not_list(diagnose_texts: Diagnose) -> None:
    text = "\n".join([gloo(0, texts.GLOO_LOST), gloo(1, texts.GLOO_LOST), texts.table({0: 1, 1: 1}, first=0)])
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-exited", (), (0, 1))
    assert finding.confidence < 0.5


def test_a_thread_that_python_ended_is_distinguished_from_crashed_native_code(
    diagnose_texts: Diagnose,
) -> None:
    table = texts.table({0: -6, 1: -15}, first=0)
    said, silent = (diagnose_texts(text) for text in (f"terminate called without an active exception\n{table}", table))
    for verdict in said, silent:
        assert (verdict.outcome, verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == (
            "crash",
            "rank-killed",
            (0,),
        )
    assert "gc.collect()" in said.findings[0].advice[0]
    assert "core dump" in silent.findings[0].advice[0]
