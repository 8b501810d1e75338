"""A rank went on without a collective that the others wait in."""

import pytest

from dtprof.diagnosis.divergence.skip_findings import OR_SWAPPED
from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records.sites import Site
from tests.builders import RankBuilder
from tests.diagnosis.judging import (
    CONNECTION_LOST,
    STEP,
    build_job,
    found_by,
    gradients,
    judge,
    pair,
    ranks_in_step,
    skipping_ranks,
)


def one_that_skips_the_loss() -> JobState:
    return build_job(skipping_ranks(), exit_status=None)


def one_that_is_late() -> JobState:
    ranks = ranks_in_step(4, 5)
    for rank in ranks[1:]:
        gradients(rank, 5000, done=False)
    return build_job(ranks, exit_status=None)


FAULTY = {"rank-skipped-collective": one_that_skips_the_loss}
SOUND = one_that_is_late


def test_a_skipped_collective_is_found_where_the_next_one_of_the_same_group_takes_its_place() -> None:
    verdict = judge(skipping_ranks(), exit_status=None)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("hang", "rank-skipped-collective", (2,))
    assert (finding.waiting_ranks, finding.op, finding.seq) == ((0, 1, 3), "all_reduce", 11)
    assert {site.line for site in finding.call_sites.values()} == {20}
    assert finding.culprit_call_sites[2].line == 10


def test_a_skipped_collective_is_found_among_two_ranks_by_what_they_did_before() -> None:
    finding = found_by("rank_skipped_collective", build_job(skipping_ranks(world_size=2, culprit=1), exit_status=None))[
        0
    ]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))


def test_a_skipped_collective_of_a_group_of_its_own_is_found() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        own = rank.group("1", range(3), "loss")
        backward, average = rank.site("Tensor.backward", line=10), rank.site("all_reduce", line=20)
        for step in range(4):
            t = step * STEP
            skipped = step == 3 and rank.rank == 0
            rank.op("all_reduce", t + 100, t + 150, site=backward, nbytes=64)
            if not skipped:
                rank.op(
                    "all_reduce", t + 400, None if step == 3 else t + 450, returned=t + 401, site=average, group=own
                )
            else:
                rank.op("all_reduce", t + 1100, None, returned=t + 1101, site=backward, nbytes=64)
    finding = found_by("rank_skipped_collective", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (0,), (1, 2))
    assert finding.group is not None
    assert (finding.group.description, finding.seq) == ("loss", 3)


@pytest.mark.parametrize(
    ("around", "kind"), [((), "rank-skipped-collective"), (((18, 40),), "collective-order-mismatch")]
)
def test_a_rank_past_a_line_reached_once_skipped_the_call_there(around: tuple[tuple[int, int], ...], kind: str) -> None:
    # `prepare` of line 20 gathers, unless it returns at line 4; the loop of line 30 averages. No round tells the order.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        op, line, function = ("all_reduce", 10, "average") if rank.rank == 1 else ("all_gather", 5, "prepare")
        rank.op(op, 0, site=rank.site(op, line=line, function=function), nbytes=8)
    nothing = frozenset[tuple[str, int]]()
    places = {
        5: SourcePlace(in_loop=False, following=nothing, ways_past=((4, "return"),)),
        10: SourcePlace(in_loop=True, following=nothing, branches=((10, 10),), loops=((9, 10),)),
        20: SourcePlace(in_loop=bool(around), following=nothing, loops=around),
        30: SourcePlace(in_loop=True, following=nothing, loops=((29, 31), *around)),
    }

    def stack(*lines: tuple[int, str]) -> Stack:
        sites = tuple(Site(file="/home/me/train.py", line=line, function=name) for line, name in lines)
        return Stack(state="sleeping", cpu_share=0.0, frames=sites)

    stacks = dict.fromkeys((0, 2), stack((5, "prepare"), (20, "<module>")))
    stacks[1] = stack((10, "average"), (30, "<module>"))
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
    if not around:
        assert finding.culprit_call_sites[1].line == 4


@pytest.mark.parametrize(("branches", "kind"), [(1, "rank-skipped-collective"), (0, "collective-order-mismatch")])
def test_a_rank_further_in_the_iteration_skipped_the_earlier_call(branches: int, kind: str) -> None:
    # Line 20 of a loop calls `prepare`, line 30 `average`, which has a branch around its call. Rank 1 is in that.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, prepare = rank.site("all_reduce", line=10, function="average"), rank.site(line=5, function="prepare")
        for i in range(2 * branches):  # the first round comes to `average`, and to `prepare` no one yet
            rank.op("all_reduce", 10 * i, 10 * i + 5, site=average, nbytes=8 + 8 * i)
        op, site, nbytes = ("all_reduce", average, 8) if rank.rank == 1 else ("broadcast", prepare, 4)
        rank.op(op, 100, site=site, nbytes=nbytes)
    nothing, loop = frozenset[tuple[str, int]](), ((18, 40),)
    places = {
        5: SourcePlace(in_loop=False, following=nothing, ways_past=((4, "return"),)),
        10: SourcePlace(in_loop=False, following=nothing, branches=((10, 10),), conditions=(9,)),
        20: SourcePlace(in_loop=True, following=frozenset({("average", 30)}), loops=loop),
        30: SourcePlace(in_loop=True, following=nothing, loops=loop),
    }

    def stack(*lines: tuple[int, str]) -> Stack:
        sites = tuple(Site(file="/home/me/train.py", line=line, function=name) for line, name in lines)
        return Stack(state="sleeping", cpu_share=0.0, frames=sites)

    stacks = dict.fromkeys((0, 2), stack((5, "prepare"), (20, "main")))
    stacks[1] = stack((10, "average"), (30, "main"))
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


def test_a_call_that_a_rank_makes_on_its_way_out_after_one_that_failed_was_skipped_before() -> None:
    # A `with` ends in a flush, also by an exception: rank 2 left it out once, and the gradients of its next round fail.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, flush = rank.site("all_reduce", line=10), rank.site("all_reduce", line=20, function="flush")
        for round_ in range(3):
            t = round_ * STEP
            rank.op("all_reduce", t, t + 9, site=average, nbytes=64, step=round_)
            if round_ < 2:
                rank.op("all_reduce", t + 20, t + 29, site=flush, nbytes=8, step=round_ + 1)
        if rank.rank == 2:
            rank.op("all_reduce", 3 * STEP, 3 * STEP + 50, site=average, nbytes=64, step=3, state="failed")
            rank.op("all_reduce", 3 * STEP + 60, 3 * STEP + 70, site=flush, nbytes=8, step=3, state="failed")
        else:
            rank.op("all_reduce", 3 * STEP, site=flush, nbytes=8, step=3)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (2,), 5)


def test_the_peer_of_a_rank_that_left_their_loop_skipped_nothing() -> None:
    # Rank 0 and 1 improve in a group of their own, four times a round, and meet all others in a barrier; rank 1 breaks.
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        pair_of = rank.group(f"{rank.rank // 2}", (0, 1) if rank.rank < 2 else (2, 3))
        improve, meet = rank.site("all_reduce", line=10, function="average"), rank.site("barrier", line=20)
        step = 0
        for round_ in range(4):
            turns = 2 if rank.rank > 1 else 4 if round_ < 3 else 3
            for turn in range(turns):
                t = round_ * STEP + 20 * turn
                rank.op("all_reduce", t, t + 9, group=pair_of, site=improve, nbytes=64, step=step)
                step += 1
            if round_ < 3:
                rank.op("barrier", round_ * STEP + 200, round_ * STEP + 209, site=meet, step=step)
        if rank.rank:
            rank.op("barrier", 3 * STEP + 200 + rank.rank, site=meet, step=step)
        else:
            rank.op("all_reduce", 3 * STEP + 300, group=pair_of, site=improve, nbytes=64, step=step)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("rank-skipped-collective", (1,), "all_reduce")


@pytest.mark.parametrize("makes_step", [True, False])
def test_a_rank_in_its_next_step_skipped_the_last_call_of_the_first(makes_step: bool) -> None:
    # Each step gathers in lines 4 to 6; the norm of line 9 comes for the first time. Else it is another operation.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        gathers, norm = [rank.site("all_gather", line=line) for line in (4, 5, 6)], rank.site("all_reduce", line=9)
        for i, gather in enumerate(gathers):
            rank.op("all_gather", 10 * i, 10 * i + 5, site=gather, step=0, nbytes=64)
        if rank.rank == 1:
            rank.op("all_gather", 100, site=gathers[0], step=int(makes_step), nbytes=64)
        else:
            rank.op("all_reduce", 100, site=norm, step=0, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    kind = "rank-skipped-collective" if makes_step else "collective-order-mismatch"
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_in_one_loop_the_one_ahead_in_steps_skipped(
    culprit: int,
) -> None:
    # Tokens and gradients on the default group, then the optimizer, with which a step ends, then the loss on its own.
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        group = rank.group("loss", (0, 1))
        tokens, rebuild, gradient, mean = (rank.site("all_reduce", line=line) for line in (5, 7, 10, 20))
        for step in range(5):
            t, is_last = 1000 * step, step == 4
            rank.op("all_reduce", t, t + 10, site=tokens, step=step, nbytes=8)
            if step == 1:
                rank.op("all_reduce", t + 20, t + 30, site=rebuild, step=step, nbytes=64)
            skips = is_last and rank.rank == culprit
            if not skips:
                done = None if is_last else t + 150
                rank.op("all_reduce", t + 100, done, site=gradient, step=step, nbytes=4096)
            if skips or not is_last:  # the culprit is the first to wait
                started, done = (t + 90, None) if is_last else (t + 400, t + 450)
                rank.op("all_reduce", started, done, site=mean, step=step + 1, group=group, nbytes=8)
    finding = found_by("rank_skipped_collective", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (culprit,))
    assert finding.call_sites[1 - culprit].line == 10


def test_in_a_loop_over_tensors_their_sizes_tell_which_was_skipped() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=10)
        for i in range(3):
            for place, nbytes in enumerate((64, 32, 16)):
                rank.op("all_reduce", 100 * i + place * 10, 100 * i + place * 10 + 5, site=site, nbytes=nbytes)
        rank.op("all_reduce", 400, 405, site=site, nbytes=64)
        rank.op("all_reduce", 410, site=site, nbytes=16 if rank.rank == 1 else 32)
    finding = found_by("rank_skipped_collective", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("rank-skipped-collective", (1,), 10)


def test_a_call_skipped_on_a_subgroup_is_reported_for_that_group_whoever_waits_first() -> None:
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
    finding = found_by("rank_skipped_collective", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (3,), (2,))
    assert finding.group is not None
    assert (finding.group.ranks, finding.call_sites[2].line) == ((2, 3), 30)


@pytest.mark.parametrize(
    ("extra", "kind", "line"), [(True, "step-mismatch", 40), (False, "rank-skipped-collective", 10)]
)
def test_a_call_at_a_line_of_its_own_that_was_met_is_an_extra_one_and_no_skip(
    *, extra: bool, kind: str, line: int
) -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        gather, reduce = rank.site("all_gather", line=10), rank.site("reduce_scatter", line=20)
        for step in range(4):
            t, is_odd = step * STEP, step == 3 and rank.rank == 1
            rank.op(
                "all_gather", t, t + 9, site=rank.site("all_gather", line=40) if is_odd and extra else gather, nbytes=8
            )
            rank.op("all_gather", t + 20, t + 29, site=gather, nbytes=8)
            if is_odd:
                rank.op("all_gather", t + 40, site=gather, nbytes=8)
            else:
                rank.op("reduce_scatter", t + 40, None if step == 3 else t + 49, site=reduce, nbytes=16)
            rank.span("optimizer", t + 60, t + 70)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
    assert finding.culprit_call_sites[1].line == line


@pytest.mark.parametrize("left_out", [1, 2])
def test_of_calls_of_one_line_in_a_row_what_came_before_tells_how_many_were_skipped(left_out: int) -> None:
    # Three tokens a round, then the next prompt; rank 1 ends its fourth round early.
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        token, prompt = rank.site("all_reduce", line=10), rank.site("broadcast", line=20)
        for step in range(4):
            number = 3 - left_out if step == 3 else 3
            for i in range(number):
                rank.op("all_reduce", step * STEP + 10 * i, step * STEP + 10 * i + 9, site=token, nbytes=8)
            if step < 3:
                rank.op("broadcast", step * STEP + 100, step * STEP + 109, site=prompt, nbytes=8)
        name, site = ("broadcast", prompt) if rank.rank == 1 else ("all_reduce", token)
        rank.op(name, 3 * STEP + 100, site=site, nbytes=8)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("rank-skipped-collective", (1,), "all_reduce")


LOOPS = {10: ((8, 12), (6, 30)), 20: ((6, 30),)}
"""An inner loop around line 10, in one that holds line 20 as well."""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("loops", "branches", "kind"),
    [
        (LOOPS, (), "rank-skipped-collective"),
        (LOOPS, ((19, 21),), "collective-order-mismatch"),  # the others may have passed it by
        ({10: ((8, 12),)}, ((19, 21),), "rank-skipped-collective"),
        ({10: ((6, 30),), 20: ((6, 30),)}, (), "collective-order-mismatch"),
    ],
)
def test_a_rank_past_the_end_of_a_loop_that_the_others_are_in_skipped_their_call(
    loops: dict[int, tuple[tuple[int, int], ...]], branches: tuple[tuple[int, int], ...], kind: str, world_size: int
) -> None:
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]
    for rank in ranks:
        for t in range(0, 500, 100):
            rank.op("all_reduce", t, t + 9, site=rank.site("all_reduce", line=10), nbytes=8)
        name, line = ("barrier", 20) if rank is ranks[-1] else ("all_reduce", 10)
        rank.op(name, 500, site=rank.site(name, line=line), nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        own = branches if line == 20 else ()
        return SourcePlace(in_loop=True, following=frozenset(), loops=loops.get(line, ()), branches=own)

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (world_size - 1,))


def test_of_two_ranks_a_first_call_in_the_loop_was_skipped_by_nobody() -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        for t in range(0, 500, 100):
            rank.op("all_reduce", t, t + 9, site=rank.site("all_reduce", line=10), nbytes=8)
        name, line = ("barrier", 20) if rank.rank == 1 else ("all_gather", 11)
        rank.op(name, 500, site=rank.site(name, line=line), nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        return SourcePlace(in_loop=line != 20, following=frozenset(), loops=LOOPS.get(10 if line < 20 else 20, ()))

    assert decide(build_job(ranks, exit_status=None, find_place=place)).findings[0].kind == "collective-order-mismatch"


def test_a_rank_without_the_messages_of_another_skipped_nothing() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for t in (0, 100):
        for rank, name, peer in ((ranks[1], "send", 0), (ranks[0], "recv", 1)):
            rank.op(name, t, t + 9, peer=peer, site=rank.site(name, line=10), nbytes=8)
    ranks[0].op("recv", 200, peer=1, site=ranks[0].site("recv", line=10), nbytes=8)
    for rank in ranks[1:]:
        rank.op("barrier", 300, site=rank.site("barrier", line=20))
    assert not found_by("rank_skipped_collective", build_job(ranks, exit_status=None))


def test_a_round_skipped_by_a_single_layer_shows_in_its_backward_passes() -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for step in range(12):
            t = step * STEP
            rank.span("backward", t, t + 200)
            if rank.rank == 1 and step == 4:
                continue  # as a program does that found a loss that is no number
            is_last = step == 11 and rank.rank != 1
            rank.op(
                "all_reduce", t + 300, None if is_last else t + 309, site=rank.site("all_reduce", line=10), nbytes=8
            )
            if not is_last:
                rank.span("optimizer", t + 400, t + 410)
        rank.closed = rank.rank == 1
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))


@pytest.mark.parametrize(("rest", "kind"), [((), "rank-skipped-collective"), ((15,), "collective-order-mismatch")])
def test_a_call_in_a_branch_that_leaves_the_round_skips_what_the_others_are_in(
    rest: tuple[int, ...], kind: str
) -> None:
    # Line 10 gathers, line 15 scatters, line 20 reduces; rank 1 reduces at line 12 and goes on with its next round.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        for t in (0, 100, 200):
            calls = (("all_gather", 10), ("reduce_scatter", 15), ("all_reduce", 20))
            for i, (name, line) in enumerate(calls if t < 200 else calls[:1]):
                rank.op(name, t + 10 * i, t + 10 * i + 9, site=rank.site(name, line=line), nbytes=8)
        name, line = ("all_reduce", 12) if rank.rank == 1 else ("reduce_scatter", 15)
        rank.op(name, 300, site=rank.site(name, line=line), nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        following = frozenset(("call", other) for other in rest) if line == 12 else frozenset()
        return SourcePlace(in_loop=True, following=following, loops=((9, 21),))

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(
    ("loops", "ways", "kind"),
    [
        (((9, 11), (6, 30)), (), "step-mismatch"),
        (((6, 30),), ((12, "continue"),), "rank-skipped-collective"),
    ],
)
def test_one_more_round_of_an_inner_loop_before_the_step_of_the_others_skips_nothing(
    loops: tuple[tuple[int, int], ...], ways: tuple[tuple[int, str], ...], kind: str
) -> None:
    # A batch run in two parts on rank 1: gradients are averaged twice before the optimizer's step and the metrics. Or
    # a `continue` after the average, without the optimizer's step.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        gradient, metric = rank.site("all_reduce", line=10), rank.site("all_gather", line=20)
        for step in range(4):
            t = step * STEP
            rank.op("all_reduce", t, t + 9, site=gradient, step=step, nbytes=8)
            if step == 3 and rank.rank == 1:
                rank.op("all_reduce", t + 50, site=gradient, step=step, nbytes=8)
                continue
            rank.span("optimizer", t + 20, t + 29)
            rank.op("all_gather", t + 50, None if step == 3 else t + 59, site=metric, step=step + 1, nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        there = loops if line == 10 else loops[-1:]
        return SourcePlace(in_loop=True, following=frozenset(), loops=there, ways_past=ways if line == 20 else ())

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(
    ("following", "branches", "kind"),
    [
        ((("barrier", 20),), (), "rank-skipped-collective"),  # `finally: barrier()`
        ((), (), "collective-order-mismatch"),  # the source does not come from the one to the other
        ((("barrier", 20),), ((19, 21),), "collective-order-mismatch"),  # `if rank == 1: barrier()`: one too many
    ],
)
def test_a_rank_in_the_call_that_always_follows_skipped_the_earlier_one(
    following: tuple[tuple[str, int], ...], branches: tuple[tuple[int, int], ...], kind: str
) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        name, line = ("barrier", 20) if rank.rank == 1 else ("all_reduce", 10)
        rank.op(name, 0, site=rank.site("train", line=line), nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        if line == 10:
            return SourcePlace(in_loop=False, following=frozenset(following))
        return SourcePlace(in_loop=False, following=frozenset(), branches=branches)

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(
    ("ahead", "branches", "kind"),
    [
        (0, (), "collective-order-mismatch"),  # it has not made the step of that round: a call of its own
        (1, (), "rank-skipped-collective"),
        (0, ((12, 12),), "rank-skipped-collective"),  # the step may have been left out, too
    ],
)
def test_a_rank_without_the_optimizer_step_is_still_in_the_iteration_before(
    ahead: int, branches: tuple[tuple[int, int], ...], kind: str
) -> None:
    """Line 10 reduces, 12 makes the step, and 14 gathers on rank 0, for the first time."""
    ranks = pair(3)
    for rank in ranks:
        for step in range(4):
            rank.op("all_reduce", step * STEP, step * STEP + 9, site=rank.site(line=10), step=step, nbytes=8)
        if rank.rank == 0:
            rank.op("all_gather", 4 * STEP, site=rank.site(line=14), step=4 + ahead, nbytes=64)
        else:
            rank.op("all_reduce", 4 * STEP, site=rank.site(line=10), step=4, nbytes=8)
    loop, after = ((8, 16),), frozenset({("step", 12), ("gather", 14)})
    places = {14: SourcePlace(in_loop=True, following=frozenset(), loops=loop)}
    places[10] = SourcePlace(in_loop=True, following=after, loops=loop)
    places[12] = SourcePlace(in_loop=True, following=frozenset(), loops=loop, branches=branches)
    finding = decide(build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_skip_is_seen_across_the_groups_of_an_axis(steps_ahead: int) -> None:
    """Rank 3 goes on without the clip of line 31, into the next step; or swaps it with a call of its row, maybe."""
    ranks = pair(6)
    for rank in ranks:
        row = rank.group(f"row{rank.rank // 2}", (rank.rank // 2 * 2, rank.rank // 2 * 2 + 1))
        mlp, clip = rank.site("all_reduce", line=30), rank.site("all_reduce", line=31)
        for step in range(4):
            t = 1000 * step
            rank.op("all_reduce", t, t + 9, group=row, site=mlp, step=step)
            is_last = step == 3
            if is_last and rank.rank == 3:
                rank.op("all_reduce", t + 40, group=row, site=mlp, step=step + steps_ahead)
            else:
                rank.op("all_reduce", t + 20, None if is_last else t + 29, site=clip, step=step)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    kind = "rank-skipped-collective" if steps_ahead else "group-order-inversion"
    assert (finding.kind, finding.culprit_ranks) == (kind, (3,))


@pytest.mark.parametrize("next_round", [True, False])
def test_a_rank_that_leaves_the_first_round_of_an_inner_loop_skipped_a_call(next_round: bool) -> None:
    """Who goes on with the next step has left the loop of line 60; a new call shows another order only."""
    ranks = ranks_in_step(4, 3)
    for rank in ranks:
        made = 3 if rank.rank == 2 else 4
        for i in range(made):
            done = 3050 + 100 * i if i < 3 else None
            rank.op("all_gather", 3010 + 100 * i, done, nbytes=8, site=rank.site("all_gather", line=60))
        if rank.rank == 2 and next_round:
            rank.span("backward", 3500)
            rank.op("all_reduce", 3600, site=rank.site("Tensor.backward", line=10), nbytes=4096)
        elif rank.rank == 2:
            rank.op("all_reduce", 3600, site=rank.site("all_reduce", line=70), nbytes=16)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    kind = "rank-skipped-collective" if next_round else "collective-order-mismatch"
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,))


@pytest.mark.parametrize("loops", [((9, 21),), ((9, 11), (8, 21))], ids=["one loop", "a loop of its own"])
def test_a_rank_that_comes_round_a_loop_again_left_out_the_call_in_it(loops: tuple[tuple[int, int], ...]) -> None:
    """Line 10 again: in the first round already. In an inner loop, `for` around line 10 alone, it shows nothing."""
    ranks = pair(3)
    for rank in ranks:
        first, second = rank.site("reduce_scatter", line=10), rank.site("all_gather", line=20)
        rank.op("reduce_scatter", 100, 150, site=first)
        if rank.rank == 1:
            rank.op("reduce_scatter", 200, site=first)
        else:
            rank.op("all_gather", 200, site=second)

    def place(_: str, line: int) -> SourcePlace:
        return SourcePlace(in_loop=True, following=frozenset(), loops=loops if line == 10 else loops[-1:])

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    kind = "rank-skipped-collective" if len(loops) == 1 else "collective-order-mismatch"
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


def test_calls_of_a_skipped_pass_are_found_though_they_matched_the_next_iteration() -> None:
    """As under FSDP: the gathers of an evaluation on three ranks meet those of the training on the fourth."""
    ranks = [RankBuilder(rank, 4, closed=False) for rank in range(4)]
    for rank in ranks:
        last = "G18 G18 S18" if rank.rank == 2 else "G23 G23 R24"
        calls = [*["G18", "G18", "S18", "S18"] * 4, *last.split()]
        for i, call in enumerate(calls):
            name, line = {"G": "all_gather", "S": "reduce_scatter", "R": "all_reduce"}[call[0]], int(call[1:])
            site = rank.site(name, line=line, function="evaluate" if line > 20 else "main")
            rank.op(name, 100 * i, 100 * i + 50 if i < len(calls) - 1 else None, step=i // 4, site=site, nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        # `if step == 4: evaluate()` at line 19; there `if rank == 2: return` at 22, before both calls.
        of_main = {"loops": ((17, 19),), "conditions": (19,) if line == 19 else (), "counted": (19,)}
        return SourcePlace(
            in_loop=line < 20,
            following=frozenset(),
            **(of_main if line < 20 else {"ways_past": ((22, "return"),)}),
        )

    frames = [
        Site(file="/home/me/train.py", line=line, function=name) for line, name in ((24, "evaluate"), (19, "main"))
    ]
    stacks = {rank: Stack(state="S", cpu_share=None, frames=tuple(frames)) for rank in (0, 1, 3)}
    finding = decide(build_job(ranks, exit_status=None, find_place=place, stacks=stacks)).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-skipped-collective", (2,), (0, 1, 3))
    assert (finding.seq, finding.call_sites[0].line) == (16, 24)
    assert finding.culprit_call_sites[2].line == 22


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_left_the_loop_though_its_next_calls_matched_those_of_the_loop(world_size: int) -> None:
    ranks = [RankBuilder(rank, world_size, closed=False) for rank in range(world_size)]
    for rank in ranks:
        for t in range(0, 600, 100):
            line = 20 if rank is ranks[-1] and t == 500 else 10
            rank.op("all_gather", t, t + 9, site=rank.site("all_gather", line=line), nbytes=8)
        name, line = ("all_reduce", 20) if rank is ranks[-1] else ("all_gather", 10)
        rank.op(name, 600, site=rank.site(name, line=line), nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        return SourcePlace(in_loop=True, following=frozenset(), loops=LOOPS[line])

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (world_size - 1,))
    assert finding.seq == 5


def test_where_nobody_waits_in_the_skipped_call_the_line_of_those_that_made_it_is_named() -> None:
    """Rank 0 raised in the call, as its peer met it with another: the finding shows both lines."""
    ranks = pair(3)
    for rank in ranks:
        mine = rank.group("tp", (0, 1)) if rank.rank < 2 else 0
        first, second, last = (rank.site("all_reduce", line=line) for line in (20, 21, 22))
        for i in range(3):
            t = 1000 * i
            if rank.rank < 2:
                rank.op("all_reduce", t, t + 9, group=mine, site=first)
                if (rank.rank, i) == (1, 2):
                    continue
                failed = (rank.rank, i) == (0, 2)
                rank.op("all_reduce", t + 20, t + 29, group=mine, site=second, state="failed" if failed else None)
                if failed:
                    continue
            rank.op("all_reduce", t + 40, None if i == 2 else t + 49, site=last, nbytes=72)
        if rank.rank == 1:
            rank.op("all_reduce", 2040, site=last, nbytes=72)
    ranks[0].exception(2030, "RuntimeError", CONNECTION_LOST, line=21)
    job = build_job(ranks, exit_status=1, statuses={0: (1, 3000), 1: (-15, 4000), 2: (-15, 4000)})
    for finding in decide(job).findings:
        if finding.kind == "rank-skipped-collective":
            assert {site.line for site in finding.call_sites.values()} == {21}
            break
    else:
        raise AssertionError(decide(job).findings)


@pytest.mark.parametrize(("loops", "kind"), [(((9, 11),), "step-mismatch"), ((), "rank-skipped-collective")])
def test_one_more_turn_of_an_inner_loop_that_makes_steps_skips_nothing(
    loops: tuple[tuple[int, int], ...], kind: str
) -> None:
    # Two steps of line 10 a round, then line 20 and a step of its own; rank 1 makes a third one at line 10.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        critic, actor = rank.site("all_reduce", line=10), rank.site("all_gather", line=20)
        for number in range(4):
            t, step = number * STEP, 3 * number
            for i in range(2):
                rank.op("all_reduce", t + 20 * i, t + 20 * i + 9, site=critic, step=step + i, nbytes=8)
            if number < 3:
                rank.op("all_gather", t + 60, t + 69, site=actor, step=step + 2, nbytes=8)
        name, site = ("all_reduce", critic) if rank.rank == 1 else ("all_gather", actor)
        rank.op(name, 3 * STEP + 60, site=site, step=11, nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        around = (*loops, (6, 30)) if line == 10 else ((6, 30),)
        return SourcePlace(in_loop=True, following=frozenset(), loops=around)

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(("policy", "critic", "kind"), [(3, 1, "rank-skipped-collective"), (4, 3, "step-mismatch")])
def test_fewer_iterations_of_one_loop_are_not_one_more_of_the_next(policy: int, critic: int, kind: str) -> None:
    """Four steps of line 10 a round, by loop 9, then two of line 20, by loop 19; rank 1 makes others in the last."""
    ranks = pair(3)
    for rank in ranks:
        lines = (10, 10, 10, 10, 20, 20) * 3
        lines += (10,) * policy + (20,) * critic if rank.rank == 1 else (10, 10, 10, 10, 20, 20, 10)[: policy + critic]
        for i, line in enumerate(lines):
            done = 20 * i + 9 if i < len(lines) - 1 else None
            rank.op("all_reduce", 20 * i, done, site=rank.site("all_reduce", line=line), step=i, nbytes=4 * line)
    loops = {10: ((9, 10), (6, 30)), 20: ((19, 20), (6, 30))}
    places = {
        line: SourcePlace(in_loop=True, following=frozenset(), loops=around, fixed_loops=(9, 19), ways_past=way)
        for (line, around), way in zip(loops.items(), (((8, "break"),), ()), strict=True)
    }
    finding = decide(build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
    said = "rank 1 made this call 3 times in its newest round, and 4 times in each before"
    assert (said in finding.evidence) == (policy == 3)


@pytest.mark.parametrize(
    ("is_around", "kind"), [(True, "rank-skipped-collective"), (False, "collective-order-mismatch")]
)
def test_a_call_at_the_line_of_a_with_whose_block_was_entered_is_made_at_its_end(*, is_around: bool, kind: str) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        for t in (0, 100, 200):
            rank.op("all_reduce", t, t + 9, site=rank.site("all_reduce", line=10), nbytes=8)
        name, line = ("barrier", 5) if rank.rank == 1 else ("all_reduce", 10)
        rank.op(name, 300, site=rank.site(name, line=line), nbytes=8)

    def place(_: str, line: int) -> SourcePlace:
        block = (6, 12) if line == 5 and is_around else None
        return SourcePlace(
            in_loop=line == 10, following=frozenset(), loops=((8, 12),) if line == 10 else (), block=block
        )

    finding = decide(build_job(ranks, exit_status=None, find_place=place)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize("others", ["barrier", "all_gather"])
def test_ranks_that_make_the_call_at_lines_of_their_own_are_no_culprits(others: str) -> None:
    """Rank 0 meets the others after its work, at line 20, rank 1 before it, at line 10; rank 2 is past both."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        rank.op("all_reduce", 0, 9, site=rank.site("all_reduce", line=5), nbytes=8)
        line = (20, 10, 30)[rank.rank]
        rank.op("all_gather" if rank.rank == 2 else others, STEP, site=rank.site(line=line), nbytes=8)
    after = frozenset({("all_gather", 30)})
    places = {line: SourcePlace(in_loop=False, following=after) for line in (10, 20)}
    places[30] = SourcePlace(in_loop=False, following=frozenset())
    job = build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))
    found = [(finding.kind, finding.culprit_ranks) for finding in decide(job).findings]
    assert (found == [("rank-skipped-collective", (2,))]) == (others == "barrier")


@pytest.mark.parametrize(("loop", "kind"), [(((8, 12),), "rank-skipped-collective"), ((), "dtype-mismatch")])
def test_half_of_the_ranks_that_left_a_loop_after_two_rounds_skipped_the_third(
    loop: tuple[tuple[int, int], ...], kind: str
) -> None:
    """Two rounds are no pattern yet: the source tells that ranks 2 and 3, at line 20, are past the loop of line 10."""
    ranks = pair(4)
    for rank in ranks:
        for t in (0, 100):
            rank.op("all_reduce", t, t + 9, site=rank.site("all_reduce", line=10), nbytes=32, dtype="float32")
        line, dtype = (20, "int64") if rank.rank > 1 else (10, "float32")
        rank.op("all_reduce", 200, site=rank.site("all_reduce", line=line), nbytes=8, dtype=dtype)
    places = {10: SourcePlace(in_loop=bool(loop), following=frozenset(), loops=loop)}
    places[20] = SourcePlace(in_loop=False, following=frozenset())
    finding = decide(build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2, 3))


def stack(*lines: tuple[str, int]) -> Stack:
    frames = tuple(Site(file="/home/me/train.py", line=line, function=function) for function, line in lines)
    return Stack(state="sleeping", cpu_share=0.0, frames=frames)


@pytest.mark.parametrize(("is_counted", "line"), [(False, 12), (True, 21)])
def test_the_end_of_a_loop_in_what_the_line_calls_led_past_its_next_turn(is_counted: bool, line: int) -> None:
    # Line 20 generates, with a gather in line 4 for each token, by the loop of line 12; line 21 reduces.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        gather, reduce = rank.site("all_gather", line=4, function="forward"), rank.site("all_reduce", line=21)
        for i in range(5):
            rank.op("all_gather", 10 * i, 10 * i + 5, site=gather, nbytes=64)
        rank.op("all_reduce", 60, 65, site=reduce, nbytes=8)
        for i in range(3):
            rank.op("all_gather", 100 + 10 * i, 105 + 10 * i, site=gather, nbytes=64)
        rank.op(
            "all_reduce" if rank.rank == 1 else "all_gather",
            200,
            site=reduce if rank.rank == 1 else gather,
            nbytes=8 if rank.rank == 1 else 64,
        )
    nothing, around = frozenset[tuple[str, int]](), {"loops": ((19, 22),), "fixed_loops": (19,)}
    fixed = (12,) if is_counted else ()
    places = {
        4: SourcePlace(in_loop=False, following=nothing),
        13: SourcePlace(in_loop=True, following=nothing, loops=((12, 13),), fixed_loops=fixed),
        20: SourcePlace(in_loop=True, following=frozenset({("all_reduce", 21)}), **around),
        21: SourcePlace(in_loop=True, following=nothing, **around),
    }
    inside = stack(("forward", 4), ("generate", 13), ("main", 20))
    stacks = {0: inside, 1: stack(("main", 21)), 2: inside}
    finding = decide(
        build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line), stacks=stacks)
    ).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == line


@pytest.mark.parametrize(
    ("later", "kind"),
    [(frozenset({("flush", 53)}), "group-order-inversion"), (frozenset[tuple[str, int]](), "rank-skipped-collective")],
)
def test_a_call_that_the_source_makes_before_and_after_that_of_the_others_is_in_another_order(
    later: frozenset[tuple[str, int]], kind: str
) -> None:
    """Line 51 flushes where a buffer is full, 52 averages, 53 flushes else; the step ends the round.

    Without line 53 the flush of line 51 may be that of the next round.
    """
    ranks = pair(3)
    for rank in ranks:
        metrics = rank.group("1", range(3))
        average, flush = rank.site(line=10, function="average"), rank.site(line=20, function="flush")
        for step in range(3):
            t = step * STEP
            rank.op("all_reduce", t, t + 9, site=average, step=step, nbytes=64)
            rank.op("all_reduce", t + 20, t + 29, site=flush, step=step, group=metrics, nbytes=8)
        if rank.rank == 1:
            rank.op("all_reduce", 3 * STEP, site=flush, step=3, group=metrics, nbytes=8)
        else:
            rank.op("all_reduce", 3 * STEP, site=average, step=3, nbytes=64)
    stacks = {rank: stack(("average", 10), ("main", 52)) for rank in (0, 2)} | {1: stack(("flush", 20), ("main", 51))}
    loop = ((50, 60),)
    places = {
        51: SourcePlace(in_loop=True, following=frozenset({("average", 52)}) | later, loops=loop),
        52: SourcePlace(in_loop=True, following=later, loops=loop),
    }
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize("function", ["main.<locals>.<lambda>", "step"])
def test_two_lambdas_of_one_line_one_of_which_calls_a_function_are_calls_of_a_list(function: str) -> None:
    """Line 60 calls what a list at line 50 has, `[lambda: table(), lambda: dist.barrier()]`, or a function there."""
    ranks = pair(3)
    for rank in ranks:
        table, barrier = rank.site(line=10, function="table"), rank.site(line=50, function=function)
        for step in range(3):
            rank.op("all_gather", step * STEP, step * STEP + 9, site=table, nbytes=8, step=step)
            rank.op("barrier", step * STEP + 20, step * STEP + 29, site=barrier, step=step)
        name, site = ("barrier", barrier) if rank.rank == 0 else ("all_gather", table)
        rank.op(name, 3 * STEP, site=site, nbytes=8 * (name == "all_gather"), step=3)
    inner = (function, 50), ("main", 60)
    stacks = {0: stack(*inner)} | {rank: stack(("table", 10), *inner) for rank in (1, 2)}
    finding = decide(build_job(ranks, exit_status=None, stacks=stacks)).findings[0]
    kind = "collective-order-mismatch" if "lambda" in function else "rank-skipped-collective"
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))


@pytest.mark.parametrize(("around", "kind"), [((), "step-mismatch"), (((1, 40),), "rank-skipped-collective")])
def test_an_extra_iteration_before_the_call_of_the_others_skips_nothing_without_an_outer_loop(
    around: tuple[tuple[int, int], ...], kind: str
) -> None:
    """Rank 1 broadcasts four times at line 10, the others three times, and then average at line 20."""
    ranks = pair(3)
    for rank in ranks:
        for i in range(3):
            rank.op("broadcast", 10 * i, 10 * i + 5, site=rank.site("broadcast", line=10), nbytes=8, peer=0)
        name, line = ("broadcast", 10) if rank.rank == 1 else ("all_reduce", 20)
        rank.op(name, 100, site=rank.site(name, line=line), nbytes=8, peer=0 if rank.rank == 1 else -1)
    stacks = {rank.rank: stack(("main", 10 if rank.rank == 1 else 20)) for rank in ranks}
    places = {
        10: SourcePlace(in_loop=True, following=frozenset(), loops=((9, 11), *around)),
        20: SourcePlace(in_loop=bool(around), following=frozenset(), loops=around),
    }
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(("made", "kind"), [(2, "rank-skipped-collective"), (3, "collective-order-mismatch")])
def test_a_step_with_fewer_calls_of_a_line_than_each_before_has_a_skip(made: int, kind: str) -> None:
    """Three gradients a step at line 10; rank 2 is in a table of the next step, at line 30, which is new."""
    ranks = pair(4)
    for rank in ranks:
        for step in range(3):
            for i in range(3 if step < 2 or rank.rank != 2 else made):
                done = step < 2 or i < 2 or made == 3
                t = step * STEP + 20 * i
                site = rank.site("all_reduce", line=10)
                rank.op("all_reduce", t, t + 9 if done else None, site=site, step=step, nbytes=64)
        if rank.rank == 2:
            rank.op("all_gather", 3 * STEP, site=rank.site("all_gather", line=30), step=3, nbytes=8)
        elif made == 3:
            rank.op("all_reduce", 3 * STEP, site=rank.site("all_reduce", line=10), step=3, nbytes=64)
    finding = decide(build_job(ranks, exit_status=None)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,))


@pytest.mark.parametrize(("thread", "kind"), [(2, "collective-order-mismatch"), (1, "rank-skipped-collective")])
def test_a_rank_whose_thread_is_ahead_of_a_like_call_of_another_thread_skips_nothing(thread: int, kind: str) -> None:
    ranks = pair(3)
    for rank in ranks:
        main, beat = rank.site("all_reduce", line=10), rank.site("all_gather", line=20)
        for t in range(0, 300, 100):
            rank.op("all_reduce", t, t + 9, site=main, nbytes=40)
            rank.op("all_gather", t + 10, t + 19, site=beat, thread=thread, nbytes=8)
        if rank.rank == 1:
            rank.op("all_gather", 300, site=beat, thread=thread, nbytes=8)
        if rank.rank != 1 or thread != 1:
            rank.op("all_reduce", 310, site=rank.site("all_reduce", line=12 if rank.rank == 1 else 10), nbytes=40)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


def test_a_rank_past_a_new_broadcast_counts_among_those_that_issued_it() -> None:
    ranks = pair(3)
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=10), rank.site("broadcast", line=20)
        for step in range(3):
            for number, size in enumerate((120, 4)):
                t = 100 * step + 10 * number
                rank.op("all_reduce", t, t + 9, site=average, step=step, nbytes=size)
        if rank.rank == 2:
            rank.op("all_reduce", 300, site=average, step=3, nbytes=120)
        else:
            rank.op("broadcast", 300, 309 if rank.rank == 1 else None, site=publish, step=3, nbytes=120, peer=0)
        if rank.rank == 1:
            rank.op("broadcast", 310, site=publish, step=3, nbytes=4, peer=0)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.op) == ("rank-skipped-collective", (2,), "broadcast")


@pytest.mark.parametrize(
    ("culprit", "begun", "instead", "kind"),
    [
        (0, 1, 24, "rank-skipped-collective"),
        (2, 1, 24, "rank-skipped-collective"),
        (0, 0, 32, "size-mismatch"),  # from the last on: another order
    ],
)
def test_a_skipped_tensor_of_a_loop_is_found_by_its_size_whoever_comes_first(
    culprit: int, begun: int, instead: int, kind: str
) -> None:
    """One line reduces gradients of 8, 16, 24 and 32 bytes in each step; in the last the culprit leaves this order."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=60)
        for step in range(3):
            for nth in range(4):
                t = step * STEP + 10 * nth
                rank.op("all_reduce", t, t + 9, site=site, nbytes=8 + 8 * nth, step=step)
        for _ in range(begun):
            rank.op("all_reduce", 3 * STEP, 3 * STEP + 9, site=site, nbytes=8, step=3)
        nbytes = instead if rank.rank == culprit else 8 + 8 * begun
        rank.op("all_reduce", 3 * STEP + 10, site=site, nbytes=nbytes, step=3)
    finding = judge(ranks, statuses={1: (-6, 3_000_000_000)}, exit_status=1, stalled=False).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (culprit,))
    assert ("sort the keys" in " ".join(finding.advice)) == (kind == "rank-skipped-collective")


@pytest.mark.parametrize(("line", "may_have_swapped"), [(20, False), (10, True)])
def test_calls_of_one_helper_come_in_the_order_of_the_lines_that_call_it(line: int, *, may_have_swapped: bool) -> None:
    """Lines 10 and 20 call the helper of line 5, for other models; or both calls come by line 10."""
    ranks = pair(3)
    for rank in ranks:
        sites = [rank.site(line=5, function="average", callers=(("main", at),)) for at in (10, line)]
        for step in range(4):
            for i, site in enumerate(sites):
                if step == 3 and i == (rank.rank != 1):
                    continue
                done = STEP * step + 100 * i + 9 if step < 3 else None
                rank.op("all_reduce", STEP * step + 100 * i, done, site=site, nbytes=64 + 8 * i, step=step)
    places = {at: SourcePlace(in_loop=True, following=frozenset(), loops=((8, 22),)) for at in (5, 10, 20)}
    finding = decide(build_job(ranks, exit_status=None, find_place=lambda _, at: places.get(at))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert (OR_SWAPPED in finding.evidence) == may_have_swapped


@pytest.mark.parametrize(("loops", "kind"), [(((9, 11),), "step-mismatch"), ((), "rank-skipped-collective")])
def test_an_extra_iteration_in_a_function_called_before_the_call_of_the_others_skips_nothing(
    loops: tuple[tuple[int, int], ...], kind: str
) -> None:
    """As after a resume from an older checkpoint: rank 1 is in `run`, called at line 15, the others are at line 20."""
    ranks = pair(3)
    for rank in ranks:
        for step in range(4):
            rank.op("all_reduce", 10 * step, 10 * step + 5, site=rank.site("all_reduce", line=10), nbytes=8, step=step)
        name, line = ("all_reduce", 10) if rank.rank == 1 else ("barrier", 20)
        rank.op(name, 100, site=rank.site(name, line=line), nbytes=8 * (line == 10), step=4)
    stacks = {0: stack(("main", 20)), 1: stack(("run", 10), ("main", 15)), 2: stack(("main", 20))}
    places = {
        10: SourcePlace(in_loop=bool(loops), following=frozenset(), loops=loops),
        15: SourcePlace(in_loop=False, following=frozenset({("barrier", 20)})),
        20: SourcePlace(in_loop=False, following=frozenset()),
    }
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))


@pytest.mark.parametrize(("line", "is_found"), [(30, True), (50, False)])
def test_a_rank_at_the_begin_of_a_loop_again_after_a_call_before_the_skipped_one_skipped_it(
    line: int, is_found: bool
) -> None:
    """Epochs train at line 20, evaluate at line 30 or 50, and gather at line 40 what is saved, for the first time."""
    ranks = pair(3)
    for rank in ranks:
        for number in range(3):
            site = rank.site("all_reduce", line=20)
            rank.op("all_reduce", 10 * number, 10 * number + 5, site=site, nbytes=64, step=number)
        rank.op("all_reduce", 40, 45, site=rank.site("all_reduce", line=line), nbytes=8, step=3)
        name, at = ("all_reduce", 20) if rank.rank == 1 else ("all_gather", 40)
        rank.op(name, 100, site=rank.site(name, line=at), nbytes=64, step=3)
    place = SourcePlace(in_loop=True, following=frozenset(), loops=((10, 60),))
    job = build_job(ranks, exit_status=None, find_place=lambda *_: place)
    found = [finding.culprit_ranks for finding in found_by("rank_skipped_collective", job)]
    assert found == ([(1,)] if is_found else [])


@pytest.mark.parametrize(("yields", "kind"), [(12, "rank-skipped-collective"), (0, "step-mismatch")])
def test_the_loop_of_a_generator_is_that_of_who_takes_what_it_yields(yields: int, kind: str) -> None:
    """A generator scatters at line 10 and yields; who loops over it at line 20 steps, and gathers at line 25."""
    ranks = pair(3)
    for rank in ranks:
        for number in range(3):
            t = 100 * number
            rank.op("reduce_scatter", t, t + 5, site=rank.site("reduce_scatter", line=10), nbytes=64, step=number)
            rank.op("all_gather", t + 20, t + 25, site=rank.site("all_gather", line=25), nbytes=64, step=number + 1)
        rank.op("reduce_scatter", 300, 305, site=rank.site("reduce_scatter", line=10), nbytes=64, step=3)
        name, line, step = ("reduce_scatter", 10, 3) if rank.rank == 1 else ("all_gather", 25, 4)
        rank.op(name, 400, site=rank.site(name, line=line), nbytes=64, step=step)
    inside, outside = stack(("shards", 10), ("main", 20)), stack(("main", 25))
    places = {
        10: SourcePlace(in_loop=True, following=frozenset(), loops=((8, 12),), yields=yields),
        20: SourcePlace(in_loop=False, following=frozenset()),
        25: SourcePlace(
            in_loop=True,
            following=frozenset(),
            loops=((20, 26),) if yields else (),
            ways_past=((22, "continue"),) if yields else (),
        ),
    }
    stacks = {0: outside, 1: inside, 2: outside}
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
