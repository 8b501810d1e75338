"""Forms of logs that public reports quote: cut off, wrapped, of one rank among many, naming the wrong rank.

The lines are written for these tests, in the words that torch and the launchers print.
"""

import pytest

from tests.diagnosis.log_texts import STATUS_24, Diagnose, fingerprint, older_watchdog, status, traceback, watchdog

DEEPSPEED = "[2025-02-11 08:15:00,000] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'fit.py', "
LAUNCH = "subprocess.CalledProcessError: Command '['python', '-u', 'fit.py', "
GLOO_LATE = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
    "Timed out waiting 900000ms for recv operation to complete"
)
ABORTED = (
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: 1 (pid: 71) of binary: p"
)
NO_NUMBER = (
    "  what():  [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, "
    "Timeout(ms)=1800000) ran for 1801230 milliseconds before timing out."
)
STUCK = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank {rank}] Heartbeat monitor timed out! Process will be "
    "terminated after dumping debug info. workMetaList_.size()=7"
)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f"{DEEPSPEED}'--local_rank=3', '--bf16'] exits with return code = -11", "rank-killed"),
        (f"{DEEPSPEED}'--local_rank=3', '--bf16'] exits with return code = 1", "rank-crashed"),
        (f"{LAUNCH}'--local_rank=3']' died with <Signals.SIGSEGV: 11>.", "rank-killed"),
        (f"{LAUNCH}'--local_rank=3']' returned non-zero exit status 1.", "rank-crashed"),
    ],
)
def test_launchers_that_print_their_last_command_name_nobody(diagnose_texts: Diagnose, line: str, kind: str) -> None:
    verdict = diagnose_texts(line)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", kind, ())
    assert any("last process" in words for words in verdict.cannot_tell)


def test_the_only_command_is_that_of_the_rank_that_ended(diagnose_texts: Diagnose) -> None:
    (finding,) = diagnose_texts(f"{DEEPSPEED}'--local_rank=0'] exits with return code = -9").findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (0,))


def test_the_exception_beside_a_last_command_is_nobodys(diagnose_texts: Diagnose) -> None:
    raised = 'Traceback (most recent call last):\n  File "/job/fit.py", line 9, in fit\n    load()\nKeyError: 7\n'
    text = f"{raised}{DEEPSPEED}'--local_rank=3'] exits with return code = 1"
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", ())
    assert "KeyError" in finding.summary


def test_aborts_among_timeouts_are_those_of_watchdogs(diagnose_texts: Diagnose) -> None:
    text = f"{older_watchdog(0, seq=17, op='ALLREDUCE', line=821)}\n{ABORTED}"
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-skipped-collective", ())
    assert (finding.op, finding.seq) == ("all_reduce", 17)


def test_an_abort_without_timeouts_is_a_crash(diagnose_texts: Diagnose) -> None:
    (finding,) = diagnose_texts(ABORTED).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (1,))


def test_two_sides_of_a_mismatch_are_a_guess(diagnose_texts: Diagnose) -> None:
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. "
        f"{fingerprint(1, shape='40')}, but {fingerprint(0, shape='44')}."
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (0, 1))
    assert finding.confidence < 0.5
    assert "[40]" in finding.summary
    assert "[44]" in finding.summary


def test_scheduler_names_the_tasks_it_ended_for_memory(diagnose_texts: Diagnose) -> None:
    text = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=88.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: cn12: tasks 2-3: Out Of Memory\n"
        "srun: Terminating StepId=88.0\n"
        "slurmstepd: error: *** STEP 88.0 ON cn12 CANCELLED AT 2025-03-04T05:06:07 ***"
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (2, 3))
    assert "memory" in finding.advice[0]


def test_tasks_killed_with_their_step_did_not_fail(diagnose_texts: Diagnose) -> None:
    text = (
        "slurmstepd: error: *** STEP 88.0 ON cn12 CANCELLED AT 2025-03-04T05:06:07 DUE TO TIME LIMIT ***\n"
        "srun: error: cn12: tasks 0-3: Killed"
    )
    assert not diagnose_texts(text).findings


def test_launcher_that_waits_in_vain_is_no_rank_that_crashed(diagnose_texts: Diagnose) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/opt/env/bin/torchrun", line 33, in <module>\n    sys.exit(main())\n'
        '  File "/opt/env/lib/python3.10/site-packages/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", '
        "line 638, in run\n    raise RendezvousTimeoutError()\n"
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-never-joined", ())


def test_last_line_of_torchs_hook_names_who_crashed(diagnose_texts: Diagnose) -> None:
    text = "2025-01-02 03:04:05 [rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-crashed", (5,))


def test_traceback_of_torchs_hook_is_read_without_its_head(diagnose_texts: Diagnose) -> None:
    frames = (
        ('"/job/fit.py", line 77, in save', "torch.distributed.barrier()"),
        (
            '"/env/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py", line 4556, in barrier',
            "work.wait()",
        ),
    )
    head = "".join(f"[rank2]:   File {frame}\n[rank2]:     {source}\n" for frame, source in frames)
    verdict = diagnose_texts(f"{head}[rank2]: {GLOO_LATE}\n")
    assert verdict.outcome == "hang"
    assert "nothing in the log tells of a failure" not in " ".join(verdict.cannot_tell)
    (finding,) = verdict.findings
    assert (finding.op, finding.waiting_ranks, finding.culprit_ranks) == ("barrier", (2,), ())
    assert finding.call_sites[2].line == 77


@pytest.mark.parametrize("width", [100, 118, 121, 131, 144, 187])
def test_lines_that_a_terminal_broke_within_words_are_put_together(diagnose_texts: Diagnose, width: int) -> None:
    whole = [watchdog(rank, seq=4, op="BROADCAST") for rank in (1, 2, 3)]
    broken = "\n".join(line[i : i + width] for line in whole for i in range(0, len(line), width))
    (finding,) = diagnose_texts(broken).findings
    assert (finding.op, finding.seq, finding.waiting_ranks) == ("broadcast", 4, (1, 2, 3))


def test_counts_are_read_from_broken_lines(diagnose_texts: Diagnose) -> None:
    said = (
        "[rank{rank}]:[E430 05:09:48.083703086 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        "Received a dump signal due to a collective timeout from this local \nrank and we will try our best to dump "
        "the debug info. Last enqueued NCCL work: {enqueued}, last comple\nted NCCL work: 19.This is most likely caused"
    )
    text = "\n".join(said.format(rank=rank, enqueued=20 if rank else 19) for rank in (0, 1, 2, 3))
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (0,), 20)


def test_timeouts_without_numbers_are_those_of_old_torch(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("\n".join(NO_NUMBER.format(rank=rank) for rank in (1, 2)))
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.waiting_ranks) == ("hang", "rank-skipped-collective", (1, 2))
    assert (finding.op, finding.seq) == ("all_reduce", None)
    assert "#" not in finding.summary


def test_progress_alone_tells_that_a_rank_waits_with_the_others(diagnose_texts: Diagnose) -> None:
    text = "\n".join([watchdog(0), status(STATUS_24, 0), status(STATUS_24, 1), watchdog(2), status(STATUS_24, 2)])
    assert diagnose_texts(text).findings[0].waiting_ranks == (0, 1, 2)


def test_half_of_the_ranks_silent_accuses_nobody(diagnose_texts: Diagnose) -> None:
    text = "\n".join(watchdog(rank, seq=1) for rank in (2, 3))
    (finding,) = diagnose_texts(text).findings
    assert (finding.culprit_ranks, finding.waiting_ranks) == ((), (2, 3))


def test_watchdogs_of_all_ranks_stalled_accuse_nobody(diagnose_texts: Diagnose) -> None:
    stuck = (
        "[rank1]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 600 seconds "
        "without making progress in monitoring enqueued collectives."
    )
    verdict = diagnose_texts("\n".join([STUCK.format(rank=1), stuck, STUCK.format(rank=0), STUCK.format(rank=2)]))
    (finding,) = verdict.findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", ())


def test_rank_that_only_saw_the_signal_to_dump_had_no_timeout(diagnose_texts: Diagnose) -> None:
    tag = "[E1128 21:11:49.0 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank"
    late = (
        "Received a dump signal due to a collective timeout from this local rank and we will try our best to dump the "
    )
    text = "\n".join(
        [
            *(
                f"[rank{r}]:{tag} {r}] {late}debug info. Last enqueued NCCL work: 9, last completed NCCL work: 8.This"
                for r in (1, 2)
            ),
            f"[rank0]:{tag} 0] Observed flight recorder dump signal from another rank via TCPStore.",
        ]
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (0,), (1, 2))
    assert finding.confidence < 0.5


def test_root_of_a_monitored_barrier_that_says_nothing_did_not_come(diagnose_texts: Diagnose) -> None:
    text = (
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0. Please check rank 0 logs for faulty rank.\nOriginal exception: \n"
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 600000ms for send "
        "operation to complete"
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (0,), (1,))
    assert finding.confidence < 0.5


def test_coalesced_gathers_of_other_sizes_do_not_agree(diagnose_texts: Diagnose) -> None:
    form = watchdog(0, seq=61, op="COALESCED")
    sizes = ((4, 5120), (5, 5120), (6, 7680))
    lines = [
        form.replace("rank0", f"rank{rank}")
        .replace("Rank 0", f"Rank {rank}")
        .replace("NumelIn=1024, NumelOut=1024", f"NumelIn={numel}, NumelOut={8 * numel}")
        for rank, numel in sizes
    ]
    text = "\n".join(
        line + "\n" + status(STATUS_24, rank, seq=61) for line, (rank, _) in zip(lines, sizes, strict=True)
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.op, finding.culprit_ranks) == ("size-mismatch", "all_gather", (6,))


def test_a_signal_without_a_rank_is_still_an_end(diagnose_texts: Diagnose) -> None:
    verdict = diagnose_texts("traceback : Signal 9 (SIGKILL) received by PID 4242")
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-killed", ())


FAILED_STACK = """\
[rank1]:[E607 23:46:59.2 ProcessGroupNCCL.cpp:733] Stack trace of the failed collective:
#0 all_gather_into_tensor from /env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:4186
#1 wrapper from /env/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83
#2 save_state from /work/me/job/saving.py:88
#3 main from /work/me/job/train.py:501
"""


def test_stack_of_a_watchdog_tells_the_line_that_waits(diagnose_texts: Diagnose) -> None:
    waits = watchdog(1, seq=17, op="_ALLGATHER_BASE")
    (finding,) = diagnose_texts(f"{waits}\n{FAILED_STACK}{watchdog(2, seq=17, op='_ALLGATHER_BASE')}").findings
    assert (finding.call_sites[1].file, finding.call_sites[1].line) == ("/work/me/job/saving.py", 88)
    assert 2 not in finding.call_sites


@pytest.mark.parametrize(("third", "rank"), [(1, 2), (4, None)])
def test_number_of_a_pod_is_its_rank_where_all_others_say_so(
    diagnose_texts: Diagnose, third: int, rank: int | None
) -> None:
    waits = [f"job-worker-{pod}: {watchdog(named, seq=17, op='ALLREDUCE')}" for pod, named in ((0, 0), (1, third))]
    raised = ["Traceback (most recent call last):", '  File "/app/fit.py", line 7, in fit', "    step()", "KeyError: 7"]
    verdict = diagnose_texts("\n".join([*waits, *(f"job-worker-2: {line}" for line in raised)]))
    crashes = [finding for finding in verdict.findings if finding.kind == "rank-crashed"]
    assert [finding.culprit_ranks for finding in crashes] == [() if rank is None else (rank,)]


def test_checkpoint_exception_is_that_of_the_rank_that_failed(diagnose_texts: Diagnose) -> None:
    prefix = "2025-10-31 03:11:02,477 - trainer.runner - INFO - [rank0]: "
    lines = [
        "Traceback (most recent call last):",
        '  File "/app/fit.py", line 7, in fit',
        "    dcp.save(state)",
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2])",
        "Traceback (most recent call last): (RANK 2)",
        '  File "/env/lib/python3.11/site-packages/torch/distributed/checkpoint/utils.py", line 192, in reduce_scatter',
        "    local_data = map_fun()",
        "OSError: [Errno 28] No space left on device",
    ]
    (finding,) = diagnose_texts("\n".join(prefix + line for line in lines)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (2,))
    assert "No space left" in finding.summary


def test_closed_rendezvous_is_no_crash_of_a_rank(diagnose_texts: Diagnose) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/env/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"
    )
    assert diagnose_texts(text).findings == ()


def test_a_worker_of_ray_that_died_is_reported(diagnose_texts: Diagnose) -> None:
    text = (
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. To troubleshoot, "
        "check the logs. RayTask ID: ff Worker PID: 4711 Worker exit type: SYSTEM_ERROR Worker exit detail: End of file"
    )
    (finding,) = diagnose_texts(text).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", ())
    assert "pid 4711" in finding.summary


def test_a_rank_number_given_twice_is_named(diagnose_texts: Diagnose) -> None:
    line = "node1:18569:18835 [0] bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in"
    (finding,) = diagnose_texts(line).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    assert "joined twice" in finding.summary


@pytest.mark.parametrize("name", ["WorkHCCL", "WorkXCCL"])
def test_watchdogs_of_other_back_ends_are_read(diagnose_texts: Diagnose, name: str) -> None:
    lines = [watchdog(rank, seq=196, op="ALLREDUCE").replace("WorkNCCL", name) for rank in (0, 1)]
    verdict = diagnose_texts("\n".join([*lines, *(watchdog(2, seq=195, op="ALLGATHER").replace("WorkNCCL", name),)]))
    (finding,) = verdict.findings
    assert (verdict.outcome, set(finding.waiting_ranks) | set(finding.culprit_ranks)) == ("hang", {0, 1, 2})


def test_a_traceback_whose_head_was_cut_off_is_one_if_an_exception_ends_it(diagnose_texts: Diagnose) -> None:
    frames = '  File "/job/fit.py", line 12, in fit\n    batch = next(loader)\n'
    (finding,) = diagnose_texts(
        f"{frames}RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error."
    ).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", ())
    assert "/job/fit.py:12" in finding.summary
    assert diagnose_texts(f"{frames}Loading: done").findings == ()


def test_fsdp_tells_whose_optimizer_made_another_number_of_steps(diagnose_texts: Diagnose) -> None:
    raised = traceback(
        "AssertionError: Rank 1 has different values for step: 8016.0. Other ranks: 7870.0",
        line=88,
        source="state = FSDP.optim_state_dict(model, optimizer)",
    )
    (finding,) = diagnose_texts(raised).findings
    assert (finding.kind, finding.culprit_ranks) == ("step-mismatch", (1,))


@pytest.mark.parametrize("cut", [1, 2, 9, 20])
def test_a_timeout_wrapped_within_a_word_is_read(diagnose_texts: Diagnose, cut: int) -> None:
    line = older_watchdog(0, seq=17, op="ALLREDUCE", line=821)
    at = line.index("ran for") + cut
    verdict = diagnose_texts(f"{line[:at]}\n{line[at:]}")
    assert (verdict.outcome, [finding.op for finding in verdict.findings]) == ("hang", ["all_reduce"])
