"""A rank raised before the others did, or left with a status."""

from dataclasses import replace

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import CONNECTION_LOST, build_job, found_by, gradients, judge, ranks_in_step


def one_that_raises() -> JobState:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2050, "ValueError", "bad sample 17", line=33)
    return build_job(ranks, statuses={0: (-15, 3000), 1: (1, 2100), 2: (-15, 3000)})


def one_that_loses_a_peer() -> JobState:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2050, "RuntimeError", CONNECTION_LOST, line=33)
    return build_job(ranks, statuses=dict.fromkeys(range(3), (-15, 3000)))


FAULTY = {"rank-crashed": one_that_raises}
SOUND = one_that_loses_a_peer


def test_the_rank_that_raised_is_blamed_and_not_those_that_lost_their_peer() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2050, "ValueError", "bad sample 17", line=33)
    for victim in (ranks[0], ranks[2]):
        gradients(victim, 2000, done=False)
        victim.exception(2300, "RuntimeError", CONNECTION_LOST)
    verdict = judge(ranks, statuses=dict.fromkeys(range(3), (1, 3000)))
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-crashed", (1,))
    assert finding.waiting_ranks == (0, 2)
    assert finding.culprit_call_sites[1].line == 33
    assert (finding.op, finding.seq) == ("all_reduce", 4)
    assert "ValueError: bad sample 17" in finding.summary


def test_where_every_rank_raised_alike_no_errors_of_other_ranks_are_told() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.exception(2050, "ValueError", "no checkpoint", line=33)
    (finding,) = judge(ranks, statuses=dict.fromkeys(range(3), (1, 3000))).findings
    assert finding.culprit_ranks == (0, 1, 2)
    assert finding.advice == ("Fix the ValueError, which every rank raised at this line.",)


def test_errors_of_the_ranks_that_did_not_raise_follow_from_it() -> None:
    (finding,) = found_by("rank_crashed", one_that_raises())
    assert finding.advice == ("Fix the ValueError in rank 1; errors on the other ranks follow from it.",)


def test_an_exception_raised_while_the_loss_of_a_peer_was_handled_is_a_consequence() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2100, "ZeroDivisionError", line=77)
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 2000, done=False)
        rank.exception(2050, "ValueError", "the step failed", line=90)  # the clock of the hosts may differ
        (error,) = rank.exceptions
        chain = (
            f"RuntimeError: {CONNECTION_LOST}\n\nThe above exception was the direct cause of the following exception:"
        )
        rank.exceptions[0] = replace(error, traceback=f"{chain}\n\n{error.traceback}")
    finding = found_by("rank_crashed", build_job(ranks, statuses={0: (1, 2300), 1: (1, 2200), 2: (1, 2300)}))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-crashed", (1,), (0, 2))


def test_a_connection_that_is_none_of_the_job_is_the_fault_of_the_rank_that_lost_it() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2100, "ConnectionRefusedError", "[Errno 111] Connection refused", line=77)
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 2000, done=False)
        rank.exception(2150, "RuntimeError", CONNECTION_LOST, line=10)
    finding = found_by("rank_crashed", build_job(ranks, statuses={0: (1, 2300), 1: (1, 2200), 2: (1, 2300)}))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-crashed", (1,), (0, 2))


NCCL_FAILED = """NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error, NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
{}"""


def test_a_rank_whose_host_refused_nccl_something_is_no_victim() -> None:
    ranks = ranks_in_step(3, 2)
    refused = "Error while creating shared memory segment /dev/shm/nccl-Bh7Ds3 (size 9637888)"
    ranks[1].exception(2100, "DistBackendError", NCCL_FAILED.format(refused), line=77)
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 2000, done=False)
        rank.exception(2050, "DistBackendError", NCCL_FAILED.format("socketProgress: Connection closed"), line=10)
    statuses = {0: (1, 2300), 1: (1, 2200), 2: (1, 2300)}
    (finding, *_) = found_by("rank_crashed", build_job(ranks, statuses=statuses))
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-crashed", (1,), (0, 2))
    assert f"ncclSystemError: {refused}" in finding.summary
    assert "/dev/shm" in finding.advice[0]


def test_the_same_exception_on_every_rank_blames_every_rank() -> None:
    ranks = ranks_in_step(2, 1)
    for rank in ranks:
        rank.exception(1000 + rank.rank, "KeyError", "'input'", line=5)
    assert found_by("rank_crashed", build_job(ranks, statuses={0: (1, 2000), 1: (1, 2000)}))[0].culprit_ranks == (0, 1)


def test_a_rank_that_ends_with_a_status_and_no_exception_has_crashed() -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    finding = found_by("rank_crashed", build_job(ranks, statuses={0: (-15, 4000), 1: (3, 2500)}))[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    assert "exit status 3" in finding.summary


def test_the_line_that_raised_has_the_callers_of_its_traceback() -> None:
    ranks = ranks_in_step(3, 2)
    ranks[1].exception(2050, "ValueError", "bad sample 17", line=33)
    (error,) = ranks[1].exceptions
    assert error.frame is not None
    lines = ((90, "<module>"), (60, "train"), (error.frame.line, error.frame.function))
    text = "".join(f'  File "{error.frame.file}", line {line}, in {name}\n    x\n' for line, name in lines)
    ranks[1].exceptions[0] = replace(error, traceback=f"Traceback (most recent call last):\n{text}ValueError")
    (finding,) = judge(ranks, statuses=dict.fromkeys(range(3), (1, 3000))).findings
    assert [caller.line for caller in finding.culprit_call_sites[1].callers] == [60, 90]
