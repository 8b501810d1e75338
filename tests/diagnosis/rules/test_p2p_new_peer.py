"""A rank turns to a peer that it never had at this line, and holds up the collective that the others wait in."""

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import build_job, found_by, loss, message, pair

STEPS = 4


def strips(*, new_peer: int | None) -> JobState:
    """Return three ranks that exchange the edges of their strips with neighbours in every step, and add up a loss.

    In the last step rank 2 turns to `new_peer` as well, or skips the loss and goes on to the next step.
    """
    ranks = pair(3)
    for step in range(STEPS):
        for rank in ranks:
            for peer in (rank.rank - 1, rank.rank + 1):
                if 0 <= peer < len(ranks):
                    message(rank, "send", peer, 1000 * step, 1000 * step + 9, line=4)
            newest = step == STEPS - 1
            if rank.rank == 2 and newest:
                message(rank, "send", 1 if new_peer is None else new_peer, 1000 * step + 500, line=4)
            else:
                loss(rank, 1000 * step, done=not newest)
    return build_job(ranks, exit_status=None)


def a_border_taken_for_periodic() -> JobState:
    return strips(new_peer=0)


def a_loss_that_is_skipped() -> JobState:
    return strips(new_peer=None)


FAULTY = {"p2p-unmatched": a_border_taken_for_periodic}
SOUND = a_loss_that_is_skipped


def test_a_rank_that_waits_for_a_peer_its_line_never_had_skipped_nothing() -> None:
    (finding,) = found_by("p2p_new_peer", a_border_taken_for_periodic())
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("p2p-unmatched", (2,), (0, 1))
    assert finding.culprit_call_sites[2].line == 4
    assert "a peer that the line never had before" in finding.summary


def test_a_rank_that_is_in_a_message_of_its_next_iteration_skipped_the_collective() -> None:
    assert found_by("p2p_new_peer", a_loss_that_is_skipped()) == []
