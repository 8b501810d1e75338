"""A rank ran out of batches while the others go on."""

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.lint.program_order import SourcePlace
from dtprof.records import events
from dtprof.records.schema import FLAG
from tests.diagnosis.judging import build_job, found_by, gradients, judge, with_loaders


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


def test_a_join_that_raises_on_all_ranks_names_the_one_that_ran_out_and_no_other() -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, True, False])
    ranks[1].exception(2050, "RuntimeError", "Rank 1 exhausted all inputs.", line=33)
    message = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    for rank in (ranks[0], ranks[2]):
        rank.exception(2100, "RuntimeError", message, line=33, library="torch/distributed/algorithms/join.py")
    verdict = judge(ranks, exit_status=1)
    assert [(f.kind, f.culprit_ranks) for f in verdict.findings] == [("uneven-inputs", (1,))]
    assert verdict.findings[0].evidence[0] == "data loaders gave 3 batches to rank 1, and up to 4 to the others so far"


@pytest.mark.parametrize(("exhausted", "kind"), [(True, "uneven-inputs"), (False, "size-mismatch")])
def test_a_back_end_that_aborts_in_the_call_behind_the_loop_follows_from_the_batches(
    exhausted: bool, kind: str
) -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, exhausted, False])
    for rank in ranks:
        line, nbytes = (80, 4) if rank.rank == 1 else (60, 64)
        site = rank.site("all_reduce", line=line)
        rank.op("all_reduce", 3000 + rank.rank, None, returned=3010, reduce_op="sum", nbytes=nbytes, site=site)
    first = judge(ranks, statuses={1: (-6, 3_000_000_000)}, exit_status=1, stalled=False).findings[0]
    assert (first.kind, first.culprit_ranks) == (kind, (1,))


def test_the_line_of_who_ran_out_of_batches_is_the_loop_that_it_left() -> None:
    # A loop over parameters (60-61) in one over batches (50-70), in epochs that the source counts; rank 1 is past them.
    ranks = with_loaders([4, 3, 4], exhausted=[False, True, False])
    for rank in ranks:
        line = 80 if rank.rank == 1 else 61
        rank.op("all_reduce", 3000, site=rank.site("all_reduce", line=line), nbytes=64)
    inside = SourcePlace(in_loop=True, following=frozenset(), loops=((60, 61), (50, 70), (40, 75)), fixed_loops=(40,))
    places = {61: inside, 80: SourcePlace(in_loop=False, following=frozenset())}
    finding = found_by("uneven_inputs", build_job(ranks, exit_status=None, find_place=lambda _, at: places.get(at)))[0]
    assert (finding.culprit_ranks, finding.culprit_call_sites[1].line) == ((1,), 50)


@pytest.mark.parametrize(
    ("batches", "loop", "kind"),
    [
        (4, (59, 61), "uneven-inputs"),
        (5, (59, 61), "rank-skipped-collective"),
        (4, (5, 99), "rank-skipped-collective"),  # what rank 1 did instead is in that loop, too
    ],
)
def test_a_rank_whose_exhausted_loader_gave_fewer_batches_ran_out_of_them(
    batches: int, loop: tuple[int, int], kind: str
) -> None:
    """The skipped call met the next one of rank 1, which gloo let pass: all have left the loop since."""
    ranks = with_loaders([5, batches, 5], exhausted=[True, True, True])
    for rank in ranks:
        evaluate = rank.site("all_reduce", line=60)
        for i in range(1 if rank.rank == 1 else 2):
            rank.op("all_reduce", 3010 + 10 * i, 3019 + 10 * i, site=evaluate, nbytes=8)
        if rank.rank == 1:
            gradients(rank, 3000, done=True)
        else:
            gradients(rank, 3000, done=False)
    place = SourcePlace(in_loop=True, following=frozenset(), loops=(loop,))
    finding = judge(ranks, exit_status=None, find_place=lambda _, line: place if line == 60 else None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(("exhausted_at", "kind"), [(3025, "uneven-inputs"), (2990, "rank-skipped-collective")])
def test_a_rank_ran_out_of_batches_though_it_asked_another_loader_since(exhausted_at: int, kind: str) -> None:
    ranks = with_loaders([5, 5, 5], exhausted=[False, False, False])
    for rank in ranks:
        evaluate = rank.site("all_reduce", line=60)
        is_out = rank.rank == 1
        for i in range(2 if is_out else 3):
            rank.op("all_reduce", 3010 + 10 * i, None if i == 2 else 3019 + 10 * i, site=evaluate, nbytes=8)
        if is_out:
            rank.span(events.DATA, exhausted_at, exhausted_at + 1, flags=FLAG["skipped"])
            rank.span(events.DATA, 3028, 3029)
            gradients(rank, 3030, done=False)
    place = SourcePlace(in_loop=True, following=frozenset(), loops=((59, 61),))
    finding = judge(ranks, exit_status=None, find_place=lambda _, line: place if line == 60 else None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
