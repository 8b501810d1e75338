"""Both ends of a message have different sizes."""

import pytest

from dtprof.diagnosis.job_state import JobState
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job, judge, message, pair


def sizes(sent: int, received: int) -> JobState:
    ranks = pair()
    message(ranks[0], "send", 1, 100, line=4, nbytes=sent)
    message(ranks[1], "recv", 0, 100, line=5, nbytes=received)
    return build_job(ranks, exit_status=None)


def sizes_that_differ() -> JobState:
    return sizes(16, 8)


def sizes_that_agree() -> JobState:
    return sizes(16, 16)


FAULTY = {"p2p-size-mismatch": sizes_that_differ}
SOUND = sizes_that_agree


@pytest.mark.parametrize("received", [8, 16])
def test_a_message_that_is_larger_than_what_is_received_is_a_size_mismatch(received: int) -> None:
    ranks = pair()
    message(ranks[0], "send", 1, 100, line=4, nbytes=16)
    message(ranks[1], "recv", 0, 100, line=5, nbytes=received)
    kinds = [finding.kind for finding in judge(ranks, exit_status=None).findings]
    assert (kinds == ["p2p-size-mismatch"]) == (received == 8)


def test_a_message_that_passed_into_a_larger_buffer_is_reported_though_the_job_went_well() -> None:
    ranks = pair()
    message(ranks[0], "send", 1, 100, 150, line=4, nbytes=8)
    message(ranks[1], "recv", 0, 100, 150, line=5, nbytes=16)
    verdict = judge(ranks, exit_status=0, stalled=False)
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == ("risk", ["p2p-size-mismatch"])


@pytest.mark.parametrize(("sent", "received", "culprits"), [(24, 16, (0,)), (16, 12, (1,)), (24, 12, (0, 1))])
def test_the_end_that_leaves_the_size_of_all_messages_before_is_the_culprit(
    sent: int, received: int, culprits: tuple[int, ...]
) -> None:
    ranks = pair()
    for i in range(2):
        message(ranks[0], "send", 1, 100 * i, 100 * i + 9, line=4, nbytes=16)
        message(ranks[1], "recv", 0, 100 * i, 100 * i + 9, line=5, nbytes=16)
    message(ranks[0], "send", 1, 300, line=4, nbytes=sent)
    message(ranks[1], "recv", 0, 300, line=5, nbytes=received)
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-size-mismatch", culprits)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize(
    ("widths", "culprits"),
    [
        ((16, 24, 16, 16), (1,)),  # of both pairs that do not fit
        ((16, 16, 24, 24), (1, 2)),  # one pair
        ((16, 24, 16, 8), (0, 1)),  # three pairs have no rank in common: the first is named
    ],
)
def test_the_rank_whose_halos_fit_none_of_its_neighbours_is_the_culprit(
    widths: tuple[int, ...], culprits: tuple[int, ...], is_over: bool
) -> None:
    ranks = [RankBuilder(rank, 4, closed=is_over) for rank in range(4)]
    for rank in range(4):
        for peer in (rank - 1, rank + 1):
            if 0 <= peer < 4:
                message(ranks[rank], "send", peer, 100, 150 if is_over else None, line=4, nbytes=widths[rank])
                message(ranks[rank], "recv", peer, 100, 150 if is_over else None, line=5, nbytes=widths[rank])
    found = judge(ranks, exit_status=0 if is_over else None, stalled=not is_over).findings
    assert (found[0].kind, found[0].culprit_ranks) == ("p2p-size-mismatch", culprits)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize(
    ("sent", "received", "culprits"),
    [
        ((16, 18, 16), (16, 16, 16), (1,)),  # two pairs exchange 16 bytes: the sender is odd
        ((16, 16, 16), (16, 16, 18), (2,)),  # the receiver is
        ((16, 18, 16), (16, 16, 20), (1, 2)),  # both ends are
        ((16, 18, 20), (20, 16, 16), (1, 2)),  # parts of lengths that differ by design: the others do not tell
        ((16, 18), (16, 16), (0, 1)),  # one message the other way shows no more than that
        ((16, 18, 20), (20, 16, 18), ()),  # the same, with buffers of the lengths that come
    ],
)
def test_the_end_of_a_ring_whose_size_is_not_that_of_all_other_pairs_is_the_culprit(
    sent: tuple[int, ...], received: tuple[int, ...], culprits: tuple[int, ...], is_over: bool
) -> None:
    size, done = len(sent), 150 if is_over else None
    ranks = [RankBuilder(rank, size, closed=is_over) for rank in range(size)]
    for rank in range(size):
        message(ranks[rank], "send", (rank + 1) % size, 100, done, line=4, nbytes=sent[rank])
        message(ranks[rank], "recv", (rank - 1) % size, 100, done, line=5, nbytes=received[rank])
    found = judge(ranks, exit_status=0 if is_over else None, stalled=not is_over).findings
    assert [f.culprit_ranks for f in found if f.kind == "p2p-size-mismatch"][:1] == [culprits] * bool(culprits)


def test_messages_of_another_line_do_not_tell_which_end_of_a_message_is_odd() -> None:
    ranks = pair(4)
    for sender, nbytes in ((0, 16), (1, 32), (2, 16)):  # stages send at lines of their own
        message(ranks[sender], "send", sender + 1, 100, line=4 + sender, nbytes=nbytes)
        message(ranks[sender + 1], "recv", sender, 100, line=14 + sender, nbytes=16)
    (finding,) = judge(ranks, exit_status=None).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-size-mismatch", (1, 2))


@pytest.mark.parametrize(("answer", "culprit"), [(12, 1), (16, 0)])
def test_the_end_whose_size_the_answer_has_at_both_ends_is_right(answer: int, culprit: int) -> None:
    """Rank 0 sends a smaller batch, which rank 1 receives into a buffer of the usual size."""
    ranks = pair()
    for i, (there, buffer, back) in enumerate([(16, 16, 16), (16, 16, 16), (12, 16, answer)]):
        for sender, receiver, sent, received, t in ((0, 1, there, buffer, 100 * i), (1, 0, back, back, 100 * i + 50)):
            message(ranks[sender], "send", receiver, t, t + 9, line=4, nbytes=sent)
            message(ranks[receiver], "recv", sender, t, t + 9, line=5, nbytes=received)
    (finding,) = judge(ranks, exit_status=0, stalled=False).findings
    assert (finding.kind, finding.culprit_ranks) == ("p2p-size-mismatch", (culprit,))
