"""Hand-built jobs of which a rank left out calls that only sizes or forward passes tell apart."""

from collections.abc import Sequence

import pytest

from dtprof.records import events
from tests.builders import RankBuilder
from tests.diagnosis.judging import judge


def skipping_rounds(*, last: str) -> list[RankBuilder]:
    """Return ranks of which rank 2 makes the forward pass of the fourth of 8 rounds, and no more of that round.

    Its steps agree with those of the others, as it made no optimizer step either. At its end it is in the call `last`,
    or has ended.
    """
    ranks = [RankBuilder(rank, 3, closed=rank == 2 and not last) for rank in range(3)]
    for rank in ranks:
        step = 0
        for i in range(8):
            t = 1000 * i
            rank.span(events.FORWARD, t, t + 10)
            if rank.rank == 2 and i == 3:
                continue
            ends = i < 7 or rank.rank == 2
            site = rank.site("Tensor.backward", line=10)
            rank.op("all_reduce", t + 20, t + 30 if ends else None, step=step, site=site, nbytes=64)
            if ends:
                step += 1
                rank.op("all_reduce", t + 40, t + 50, step=step, site=rank.site("all_reduce", line=20), nbytes=8)
    if last:
        rank = ranks[2]
        rank.op(last, 8000, step=7, site=rank.site(last, line=30), nbytes=0)
    return ranks


def test_a_round_left_out_with_its_step_is_told_by_the_forward_pass_of_a_rank_that_came_to_its_end() -> None:
    finding = judge(skipping_rounds(last=""), exit_status=1).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (2,), 6)
    assert {site.line for site in finding.call_sites.values()} == {10}


def test_so_it_is_where_the_rank_waits_in_a_call_that_the_others_have_not_come_to() -> None:
    finding = judge(skipping_rounds(last="barrier"), exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (2,), 6)


def test_one_forward_pass_more_means_nothing_in_a_job_that_goes_well() -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for i in range(8):
            for extra in range(1 + (rank.rank == 0 and i == 3)):
                rank.span(events.FORWARD, 1000 * i + 5 * extra, 1000 * i + 5 * extra + 2)
            site = rank.site("Tensor.backward", line=10)
            rank.op("all_reduce", 1000 * i + 20, 1000 * i + 30, step=i, site=site, nbytes=64)
    assert judge(ranks, exit_status=0, stalled=False).outcome == "healthy"


def test_in_a_loop_over_tensors_their_sizes_tell_which_was_left_out() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=10)
        for i in range(3):
            for place, nbytes in enumerate((64, 32, 16)):
                rank.op("all_reduce", 100 * i + place * 10, 100 * i + place * 10 + 5, site=site, nbytes=nbytes)
        rank.op("all_reduce", 400, 405, site=site, nbytes=64)
        rank.op("all_reduce", 410, site=site, nbytes=16 if rank.rank == 1 else 32)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (1,), 10)


def test_a_tensor_of_a_size_that_the_program_does_not_have_is_a_size_mismatch() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=10)
        for i in range(3):
            rank.op("all_reduce", 100 * i, 100 * i + 5, site=site, nbytes=64)
        rank.op("all_reduce", 400, site=site, nbytes=72 if rank.rank == 1 else 64)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (1,))


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ((9, 10, 9), ("step-mismatch", (1,), 4)),  # the call of its own line is one too many
        ((7, 10, 9), ("rank-exited", (0, 2), 9)),  # others left at other times: they left too early
        ((9, 11, 9), ("rank-exited", (0, 2), 10)),  # one line of its own, two calls more
    ],
)
def test_one_call_more_by_a_rank_whose_peers_all_ended_after_as_many(
    counts: Sequence[int], found: tuple[str, tuple[int, ...], int]
) -> None:
    ranks = [RankBuilder(rank, 3, closed=rank != 1) for rank in range(3)]
    for rank, count in zip(ranks, counts, strict=True):
        for i in range(count):
            line = 64 if rank.rank == 1 and i == 4 else 60
            waits = rank.rank == 1 and i == count - 1
            site = rank.site("all_reduce", line=line)
            rank.op("all_reduce", 100 * i, None if waits else 100 * i + 50, site=site, nbytes=4, step=0)
    kind, culprits, seq = found
    finding = judge(ranks, exit_status=1).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == (kind, culprits, seq)


SHARDED = (("all_gather", 18, 104), ("all_gather", 18, 100), ("reduce_scatter", 19, 300), ("reduce_scatter", 19, 312))
"""One round: operation, line, bytes."""


@pytest.mark.parametrize(
    ("own_line", "found"),
    [
        (23, ("step-mismatch", (0,), 16)),
        (18, ("rank-skipped-collective", (0,), 18)),  # no line of its own: what was left out is nearer
    ],
)
def test_a_forward_pass_too_many_is_told_by_its_line_though_the_job_fails_two_calls_later(
    own_line: int, found: tuple[str, tuple[int, ...], int]
) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        calls = [*SHARDED * 4, *((op, own_line, nbytes) for op, _, nbytes in SHARDED[:2]), SHARDED[0]]
        calls = calls if rank.rank == 0 else [*SHARDED * 4, *SHARDED[:3]]
        for i, (op, line, nbytes) in enumerate(calls):
            ends = i < len(calls) - 1
            site = rank.site(op, line=line)
            rank.op(op, 100 * i, 100 * i + 50 if ends else None, step=i // 4, site=site, nbytes=nbytes)
    kind, culprits, seq = found
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == (kind, culprits, seq)


def test_a_call_left_out_on_a_subgroup_is_told_of_that_group_whoever_waits_first() -> None:
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        world = rank.group("0", range(4), "default_pg")
        pair = rank.group(f"pair{rank.rank // 2}", ((0, 1), (2, 3))[rank.rank // 2])
        first, second = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, group=pair, site=first)
            rank.op("all_reduce", t + 20, t + 29, group=world, site=second)
        if rank.rank == 2:  # begins to wait last
            rank.op("all_reduce", 390, group=pair, site=first)
            continue
        if rank.rank != 3:  # left it out
            rank.op("all_reduce", 300, 309, group=pair, site=first)
        rank.op("all_reduce", 320, group=world, site=second)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (3,), (2,))
    assert finding.group is not None
    assert (finding.group.ranks, finding.call_sites[2].line) == ((2, 3), 30)
