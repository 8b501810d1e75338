"""A rank skipped a collective of an earlier step than the message that it waits for."""

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import STEP, build_job, found_by, message, pair


def waiting_for_a_message(*, of_next_step: bool) -> JobState:
    """Return a job in which rank 1 awaits a message of rank 0, which waits for it in the last all_reduce."""
    ranks = pair(3)
    for rank in ranks:
        for step in range(4):
            t, is_last = step * STEP, step == 3
            rank.span("backward", t, t + 5)
            if rank.rank == 0 and (of_next_step or not is_last):
                message(rank, "send", 1, t, t + 9, line=10)
            elif rank.rank == 1:
                is_open = is_last and not of_next_step
                message(rank, "recv", 0, t, None if is_open else t + 9, line=11)
            if not is_last or rank.rank != 1:
                done = None if is_last else t + 50
                rank.op("all_reduce", t + 20, done, site=rank.site("all_reduce", line=20), nbytes=8)
            if not is_last or (rank.rank == 1 and of_next_step):
                rank.span("optimizer", t + 60, t + 70)
        if rank.rank == 1 and of_next_step:
            message(rank, "recv", 0, 4 * STEP, line=11)
    return build_job(ranks, exit_status=None)


def one_in_the_next_step() -> JobState:
    return waiting_for_a_message(of_next_step=True)


def one_in_the_same_step() -> JobState:
    return waiting_for_a_message(of_next_step=False)


FAULTY = {"rank-skipped-collective": one_in_the_next_step}
SOUND = one_in_the_same_step


def test_who_waits_for_a_message_of_the_next_step_skipped_the_collective_of_this_one() -> None:
    finding = found_by("skipped_before_message", one_in_the_next_step())[0]
    assert (finding.kind, finding.culprit_ranks, finding.op, finding.seq) == (
        "rank-skipped-collective",
        (1,),
        "all_reduce",
        3,
    )
