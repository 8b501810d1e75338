"""A rank ran out of batches while the others go on."""

from dtprof.diagnosis.job_state import JobState
from tests.diagnosis.judging import build_job, found_by, gradients, with_loaders


def out_of_batches(*, exhausted: bool) -> JobState:
    """Return a job in which rank 1 left while the others wait for it."""
    ranks = with_loaders([4, 3, 4], exhausted=[False, exhausted, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    return build_job(ranks, exit_status=None)


def one_without_batches() -> JobState:
    return out_of_batches(exhausted=True)


def one_with_batches_left() -> JobState:
    return out_of_batches(exhausted=False)


FAULTY = {"uneven-inputs": one_without_batches}
SOUND = one_with_batches_left


def test_a_rank_that_ran_out_of_batches_while_its_peers_train_on_has_uneven_inputs() -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, True, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    finding = found_by("uneven_inputs", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("uneven-inputs", (1,), (0, 2))
