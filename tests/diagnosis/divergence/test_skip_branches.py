"""Branches and exits of the source by which a rank may have skipped the call of another."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from dtprof.diagnosis.divergence.call_divergence import RankCall, align_frames, frames_of
from dtprof.diagnosis.divergence.skip_branches import find_exit
from dtprof.diagnosis.job_state import JobState, Stack
from dtprof.diagnosis.verdict import decide
from dtprof.lint.program_order import SourcePlace
from dtprof.records.sites import Site
from dtprof.records.tables import CrashStack, ProcessExit
from tests.builders import RankBuilder
from tests.diagnosis.judging import CONNECTION_LOST, STEP, build_job

FILE = "/home/me/train.py"
LOOP = ((5, 40),)


def frames(*lines: tuple[str, int]) -> Stack:
    """Return the stack of a rank that waits, innermost first."""
    sites = tuple(Site(file=FILE, line=line, function=function) for function, line in lines)
    return Stack(state="sleeping", cpu_share=0.0, frames=sites)


def skipping(places: Mapping[int, SourcePlace]) -> JobState:
    """Return three ranks that average at line 10, called at line 8, and publish at 20; rank 1 publishes at once."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=10, function="average"), rank.site("broadcast", line=20)
        for step in range(3):
            rank.op("all_reduce", step * STEP, step * STEP + 9, site=average, nbytes=64)
            rank.op("broadcast", step * STEP + 20, step * STEP + 29, site=publish, nbytes=8)
        is_past = rank.rank == 1
        site, op = (publish, "broadcast") if is_past else (average, "all_reduce")
        rank.op(op, 3 * STEP, site=site, nbytes=8 if is_past else 64)
    stacks = {rank: frames(("average", 10), ("main", 8)) for rank in (0, 2)} | {1: frames(("main", 20))}
    return build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))


def source(**of_call: object) -> dict[int, SourcePlace]:
    """Return the loop of main, where line 8 calls what the function has at line 10: facts are those of line 10."""
    main = SourcePlace(in_loop=True, following=frozenset(), loops=LOOP)
    call = {"in_loop": False, "following": frozenset(), **of_call}
    return {8: main, 20: main, 10: SourcePlace(**call)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "line", "words"),
    [
        ({}, 20, ""),  # nothing leads past it: where it is now
        ({"ways_past": ((9, "return"),)}, 9, "`return` at"),
        ({"conditions": (9,)}, 9, "`if` at"),
        ({"conditions": (9,), "ways_past": ((7, "return"),)}, 20, "`return` at"),  # one of two
        (
            {"conditions": (9,), "ways_past": ((7, "return"),), "naming_rank": (7,)},
            7,
            "`return` at",
        ),  # that asks for the rank
    ],
)
def test_the_only_branch_past_a_call_is_the_line_of_its_culprit(
    facts: dict[str, object], line: int, words: str
) -> None:
    finding = decide(skipping(source(**facts))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == line
    assert words in " ".join(finding.evidence)


@pytest.mark.parametrize(("loops", "line"), [((), 13), (((1, 9),), 4)])
def test_a_rank_that_came_back_to_a_function_by_its_callers_loop_left_by_a_branch_of_the_caller(
    loops: tuple[tuple[int, int], ...], line: int
) -> None:
    """Rank 1 is at line 4 of a trial, the others at its line 8; line 12 of a loop calls it, under the handler of 13."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, begin = (
            rank.site("all_reduce", line=8, function="trial"),
            rank.site("broadcast", line=4, function="trial"),
        )
        for step in range(3):
            rank.op("broadcast", step * STEP, step * STEP + 9, site=begin, nbytes=8)
            for turn in range(2):
                t = step * STEP + 20 * turn
                rank.op("all_reduce", t + 20, t + 29, site=average, nbytes=64)
        rank.op("broadcast", 3 * STEP, 3 * STEP + 9, site=begin, nbytes=8)
        is_past = rank.rank == 1
        site, op = (begin, "broadcast") if is_past else (average, "all_reduce")
        rank.op(op, 3 * STEP + 20, site=site, nbytes=8 if is_past else 64)
    nothing = frozenset[tuple[str, int]]()
    places = {
        4: SourcePlace(in_loop=bool(loops), following=nothing, loops=loops),
        8: SourcePlace(in_loop=True, following=nothing, loops=((6, 8), *loops), fixed_loops=(6,)),
        12: SourcePlace(in_loop=True, following=nothing, loops=((10, 14),), ways_past=((13, "except"),)),
    }
    stacks = {rank: frames(("trial", 8), ("main", 12)) for rank in (0, 2)} | {1: frames(("trial", 4), ("main", 12))}
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == line


def test_a_condition_on_the_rank_skips_no_call_that_the_rank_has_made_before() -> None:
    facts = {"conditions": (9,), "ways_past": ((7, "return"),)}
    finding = decide(skipping(source(**facts, by_rank=(9,)))).findings[0]
    assert finding.culprit_call_sites[1].line == 7


@pytest.mark.parametrize(("turns", "line"), [(1, 20), (3, 7)])
def test_a_condition_inside_the_loop_around_a_call_skips_one_iteration(turns: int, line: int) -> None:
    """Rank 1 left out all turns of the loop in `average`: then what leads past the whole loop is its line."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=10, function="average"), rank.site("broadcast", line=20)
        for step in range(3):
            t = step * STEP
            for turn in range(turns):
                rank.op("all_reduce", t + 20 * turn, t + 20 * turn + 9, site=average, nbytes=64)
            rank.op("broadcast", t + 200, t + 209, site=publish, nbytes=8)
        is_past = rank.rank == 1
        site, op = (publish, "broadcast") if is_past else (average, "all_reduce")
        rank.op(op, 3 * STEP, site=site, nbytes=8 if is_past else 64)
    places = source(conditions=(9,), ways_past=((7, "return"),), loops=((9, 10),), in_loop=True)
    stacks = {rank: frames(("average", 10), ("main", 8)) for rank in (0, 2)} | {1: frames(("main", 20))}
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, line: places.get(line))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == line


def test_a_condition_on_a_counter_alone_shows_another_round() -> None:
    finding = decide(skipping(source(conditions=(9,), counted=(9,)))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("step-mismatch", (1,))
    assert finding.culprit_call_sites[1].line == 9


@pytest.mark.parametrize(
    ("counted", "kind", "line"),
    [
        ((6, 9), "rank-skipped-collective", 7),
        ((6, 7), "rank-skipped-collective", 9),
        ((), "rank-skipped-collective", 20),  # one of three
        ((7, 9), "step-mismatch", 9),  # as after a resume from another step
    ],
)
def test_of_several_continues_the_one_that_depends_on_more_than_a_counter_skipped_the_call(
    counted: tuple[int, ...], kind: str, line: int
) -> None:
    ways = ((6, "continue"),) if counted != (7, 9) else ()
    ways += ((7, "continue"), (9, "continue"))
    finding = decide(skipping(source(ways_past=ways, counted=counted))).findings[0]
    assert (finding.kind, finding.culprit_call_sites[1].line) == (kind, line)


def test_a_handler_that_a_rank_is_in_is_evidence_and_no_branch_past_the_call() -> None:
    places = source(ways_past=((9, "return"),))
    places[20] = SourcePlace(in_loop=True, following=frozenset(), loops=LOOP, handler=(19, True))
    finding = decide(skipping(places)).findings[0]
    assert finding.culprit_call_sites[1].line == 20
    assert "`finally` block at /home/me/train.py:19" in finding.evidence[-1]


def test_who_is_past_the_end_of_the_loop_left_it() -> None:
    inside = SourcePlace(in_loop=True, following=frozenset(), loops=((5, 15),), conditions=(7,), counted=(7,))
    places = source() | {8: inside, 20: SourcePlace(in_loop=False, following=frozenset())}
    finding = decide(skipping(places)).findings[0]
    assert (finding.kind, finding.culprit_call_sites[1].line) == ("rank-skipped-collective", 5)


def test_the_stack_of_a_rank_comes_before_what_the_signal_that_ended_it_has_left() -> None:
    """Names there are not qualified: frames of both kinds are of one function by the last part of their names."""
    job = skipping(source())
    rank = job.ranks[0]
    left = tuple(replace(site, function="f") for site in frames(("average", 10), ("main", 8)).frames)
    ended = replace(
        rank,
        exit=ProcessExit(pid=0, status=-15, t_ns=1),
        crash=CrashStack(signal=15, t_ns=1, thread="main", computes=False, frames=left),
    )
    (operation,) = ended.open_operations
    assert [frame.function for frame in frames_of(ended, operation)] == ["average", "main"]
    assert frames_of(replace(ended, stack=None), operation) == left
    qualified = replace(rank.stack, frames=(replace(left[0], function="Lab.f"), left[1])) if rank.stack else None
    other = RankCall(replace(job.ranks[2], stack=qualified), job.ranks[2].open_operations[0])
    assert align_frames(RankCall(replace(ended, stack=None), operation), other)[2] is None  # at one line


def test_a_handler_around_a_call_may_skip_it_though_its_line_is_later() -> None:
    finding = decide(skipping(source(ways_past=((12, "except"),)))).findings[0]
    assert (finding.kind, finding.culprit_call_sites[1].line) == ("rank-skipped-collective", 12)


@pytest.mark.parametrize("fixed", [(5,), ()])
@pytest.mark.parametrize(
    ("ways", "line"),
    [
        ((), 20),  # its last record
        (((25, "raise"),), 25),
        (((9, "raise"),), 20),  # before its last record
        (((25, "raise"), (7, "return")), 25),  # a `return` ends no more than a function
        (((25, "raise"), (7, "raise")), 20),
        (((7, "break"),), 7),
        (((7, "break"), (6, "continue")), 7),
        (((7, "break"), (6, "return")), 20),
    ],
)
def test_the_only_exit_of_the_source_is_the_line_of_a_rank_that_exited(
    ways: tuple[tuple[int, str], ...], line: int, fixed: tuple[int, ...]
) -> None:
    if not fixed and line == 7:
        line = 20  # the loop may have come to its end
    finding = decide(exiting(fixed_loops=fixed, ways_past=ways)).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-exited", (1,))
    assert finding.culprit_call_sites[1].line == line
    assert ("may have left" in " ".join(finding.evidence)) == (line != 20)


def exiting(**of_main: object) -> JobState:
    """Return the job of `skipping` where rank 1 ended its program after 3 steps: facts are those of line 8."""
    ranks = [RankBuilder(rank, 3, closed=rank == 1) for rank in range(3)]
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=10, function="average"), rank.site("broadcast", line=20)
        for step in range(3):
            rank.op("all_reduce", step * STEP, step * STEP + 9, site=average, nbytes=64)
            rank.op("broadcast", step * STEP + 20, step * STEP + 29, site=publish, nbytes=8)
        if rank.rank != 1:
            rank.op("all_reduce", 3 * STEP, site=average, nbytes=64)
    stacks = {rank: frames(("average", 10), ("main", 8)) for rank in (0, 2)}
    main = SourcePlace(in_loop=True, following=frozenset(), loops=LOOP, **of_main)  # type: ignore[arg-type]
    places = source() | {8: main}
    return build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, at: places.get(at))


@pytest.mark.parametrize(("ways", "line"), [(((25, "raise"),), 25), (((25, "raise"), (26, "raise")), 26)])
def test_an_exit_on_a_counter_counts_where_there_is_no_other(ways: tuple[tuple[int, str], ...], line: int) -> None:
    finding = decide(exiting(ways_past=ways, counted=(25,))).findings[0]
    assert (finding.kind, finding.culprit_call_sites[1].line) == ("rank-exited", line)


@pytest.mark.parametrize(("steps", "line"), [((0, 1, 2), 9), ((0, 0, 0), 10)])
def test_a_return_after_the_call_of_a_step_exits_before_that_of_the_next(steps: tuple[int, ...], line: int) -> None:
    """Line 10 averages parameters, in a loop of a function that main calls at 8, and leaves at 9."""
    ranks = [RankBuilder(rank, 3, closed=rank == 1) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=10, function="average")
        for number, step in enumerate(steps[: 2 if rank.rank == 1 else 3]):
            end = None if number == 2 else number * STEP + 9
            rank.op("all_reduce", number * STEP, end, site=site, nbytes=64, step=step)
    stacks = {rank: frames(("average", 10), ("main", 8)) for rank in (0, 2)}
    main = SourcePlace(in_loop=True, following=frozenset(), loops=LOOP, fixed_loops=(5,), ways_past=((9, "return"),))
    places = source(loops=((10, 11),)) | {8: main}
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, at: places.get(at))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[1].line) == ("rank-exited", (1,), line)


@pytest.mark.parametrize(
    ("of_main", "of_average", "line"),
    [
        ({"ways_past": ((7, "except"),), "fixed_loops": (5,)}, {}, 7),
        ({"ways_past": ((7, "continue"), (9, "continue")), "counted": (9,), "fixed_loops": (5,)}, {}, 7),
        ({"fixed_loops": (5,)}, {"ways_past": ((9, "return"),)}, 9),  # of a function that the loop calls
        ({"fixed_loops": (5,)}, {"conditions": (9,)}, 9),
        ({"ways_past": ((7, "except"),)}, {}, None),  # the loop may have ended earlier
        ({"ways_past": ((7, "return"),), "fixed_loops": (5,)}, {}, None),  # it left the loop, and is exited
        ({"ways_past": ((7, "except"), (6, "continue")), "fixed_loops": (5,)}, {}, 10),  # one of two: its last record
        ({"ways_past": ((7, "except"), (9, "break")), "fixed_loops": (5,)}, {}, None),  # behind the call
        ({"ways_past": ((7, "except"),), "fixed_loops": (5,)}, {"ways_past": ((9, "return"),)}, 9),  # the only `return`
        ({"fixed_loops": (5,)}, {}, None),
    ],
)
def test_a_rank_that_ended_after_all_rounds_left_its_call_out_of_one(
    of_main: dict[str, object], of_average: dict[str, object], line: int | None
) -> None:
    ranks = [RankBuilder(rank, 3, closed=rank == 1) for rank in range(3)]
    for rank in ranks:
        average = rank.site("all_reduce", line=10, function="average")
        for step in range(3 if rank.rank == 1 else 4):
            end = None if step == 3 else step * STEP + 9
            rank.op("all_reduce", step * STEP, end, site=average, nbytes=64)
    stacks = {rank: frames(("average", 10), ("main", 8)) for rank in (0, 2)}
    main = SourcePlace(in_loop=True, following=frozenset(), loops=LOOP, **of_main)  # type: ignore[arg-type]
    places = source(**of_average) | {8: main}
    finding = decide(
        build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, at: places.get(at))
    ).findings[0]
    assert finding.culprit_ranks == (1,)
    assert (finding.kind == "rank-skipped-collective") == (line is not None)
    if line is not None:
        assert finding.culprit_call_sites[1].line == line


@pytest.mark.parametrize(("way", "kind"), [("except", "rank-skipped-collective"), ("break", "rank-exited")])
def test_a_round_left_out_is_a_skip_though_the_others_catch_what_its_lack_raises(way: str, kind: str) -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=8)
        for step in range(3 if rank.rank == 1 else 4):
            state = "failed" if step == 3 else None
            rank.op("all_reduce", step * STEP, step * STEP + 9, site=site, nbytes=64, state=state)
    main = SourcePlace(in_loop=True, following=frozenset(), loops=LOOP, fixed_loops=(5,), ways_past=((7, way),))
    job = build_job(ranks, exit_status=0, stalled=False, find_place=lambda _, line: {8: main}.get(line))
    verdict = decide(job)
    finding = verdict.findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (1,))
    assert finding.culprit_call_sites[1].line == (7 if way == "except" else 8)


@pytest.mark.parametrize("now", [20, 14])  # past both loops, or in the outer one
@pytest.mark.parametrize(("steps", "line"), [((0, 1, 2), 6), ((0, 0, 0), None)])
def test_before_the_first_call_of_a_step_no_inner_loop_has_ended_early(
    steps: tuple[int, ...], line: int | None, now: int
) -> None:
    """Rank 1 is past the inner loop at least, by the `except` at 6 or the end of that loop, at 7."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, publish = rank.site("all_reduce", line=8), rank.site("broadcast", line=now)
        for number, step in enumerate(steps[:-1]):
            rank.op("all_reduce", number * STEP, number * STEP + 9, site=average, nbytes=64, step=step)
        is_past = rank.rank == 1
        op, site = ("broadcast", publish) if is_past else ("all_reduce", average)
        rank.op(op, 3 * STEP, site=site, nbytes=64, step=steps[-1])
    loops = ((7, 9), (5, 15))
    inside = SourcePlace(in_loop=True, following=frozenset(), loops=loops, fixed_loops=(5,), ways_past=((6, "except"),))
    outside = SourcePlace(in_loop=False, following=frozenset())
    places = {8: inside, 20: outside, 14: replace(outside, in_loop=True, loops=loops[1:])}
    stacks = {rank: frames(("main", 8)) for rank in (0, 2)} | {1: frames(("main", now))}
    finding = decide(
        build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, at: places.get(at))
    ).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == (line or (7 if now == 14 else 20))


@pytest.mark.parametrize("counted", [(), (9,)])
def test_a_rank_that_waits_elsewhere_has_not_ended_its_program(counted: tuple[int, ...]) -> None:
    finding = decide(skipping(source(ways_past=((9, "raise"), (6, "return")), counted=counted))).findings[0]
    assert (finding.kind, finding.culprit_call_sites[1].line) == ("rank-skipped-collective", 6)
    assert "raise" not in " ".join(finding.evidence)


def validating(*, turns: int = 3, raised: bool = False) -> list[RankBuilder]:
    """Return ranks of two rounds of 3 steps, at line 25, and some validation batches, at 30; rank 2 has one more."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        step_site = rank.site("Tensor.backward", line=10, function="step")
        validate = rank.site("all_reduce", line=30, function="main")
        calls = [(step_site, step) for step in range(3)] + [(validate, 3)] * turns
        calls += [(step_site, step) for step in range(3, 6)] + [(validate, 6)] * turns
        is_more = rank.rank == 2
        calls += [(validate if is_more else step_site, 6)]
        for number, (site, step) in enumerate(calls):
            is_last, nbytes = number == len(calls) - 1, 16 if site == step_site else 8
            end = None if is_last and not raised else number * STEP + 9
            state = "failed" if is_last and raised else None
            rank.op("all_reduce", number * STEP, end, site=site, step=step, nbytes=nbytes, state=state)
        if raised:
            t = len(calls) * STEP - STEP + 20
            message = "op.preamble.length <= op.nbytes. 16 vs 8" if is_more else CONNECTION_LOST
            where = [("main", 30)] if is_more else [("main", 25), ("step", 10)]
            rank.exception(t + 100 * (not is_more), message=message)
            frames_ = "".join(f'  File "{FILE}", line {line}, in {function}\n' for function, line in where)
            text = f"Traceback (most recent call last):\n{frames_}RuntimeError: {message}\n"
            rank.exceptions[-1] = replace(rank.exceptions[-1], traceback=text)
    return ranks


@pytest.mark.parametrize(("turns", "raised"), [(3, False), (3, True), (1, True)])
def test_one_more_turn_of_a_loop_is_no_other_size_and_no_skip(turns: int, raised: bool) -> None:
    places = {
        10: SourcePlace(in_loop=False, following=frozenset()),
        25: SourcePlace(in_loop=True, following=frozenset(), loops=((24, 26), (20, 40))),
        30: SourcePlace(in_loop=True, following=frozenset(), loops=((29, 31), (20, 40))),
    }
    statuses = dict.fromkeys(range(3), (1, 20 * STEP)) if raised else None
    ranks = validating(turns=turns, raised=raised)
    job = build_job(
        ranks, statuses=statuses, exit_status=1 if raised else None, find_place=lambda _, at: places.get(at)
    )
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.culprit_call_sites[2].line) == ("step-mismatch", (2,), 30)


def test_what_a_rank_raised_shows_who_called_what_it_was_in() -> None:
    state = build_job(validating(raised=True)).ranks[0]
    assert [frame.line for frame in frames_of(state, state.operations[-1])] == [10, 25]
    assert [frame.line for frame in frames_of(state, state.operations[-2])] == [30]


@pytest.mark.parametrize(("turns", "line"), [(0, 15), (1, 18)])
def test_a_condition_around_a_loop_skipped_it_where_no_iteration_ran(turns: int, line: int) -> None:
    """All train at line 10 and publish in the loop of line 18, under the condition of line 15; rank 1 is at 30."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        train, publish = rank.site("all_reduce", line=10), rank.site("broadcast", line=20)
        meet = rank.site("barrier", line=30)
        for step in range(4):
            t = step * STEP
            rank.op("all_reduce", t, t + 9, site=train, nbytes=64)
            is_last = step == 3
            for turn in range(turns if is_last else 2):
                rank.op("broadcast", t + 20 + turn, t + 29, site=publish, nbytes=8)
            if is_last:
                op, site = ("barrier", meet) if rank.rank == 1 else ("broadcast", publish)
                rank.op(op, t + 50, site=site, nbytes=0 if rank.rank == 1 else 8)
            else:
                rank.op("barrier", t + 50, t + 59, site=meet)
    around = ((5, 40),)
    places = {
        10: SourcePlace(in_loop=True, following=frozenset(), loops=around),
        20: SourcePlace(
            in_loop=True, following=frozenset(), loops=((18, 20), *around), branches=((18, 20),), conditions=(15,)
        ),
        30: SourcePlace(in_loop=True, following=frozenset(), loops=around),
    }
    finding = decide(build_job(ranks, exit_status=None, find_place=lambda _, at: places.get(at))).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    assert finding.culprit_call_sites[1].line == line


@pytest.mark.parametrize(("exits", "line"), [(((23, "break"),), 23), ((), 9)])
def test_who_left_a_loop_of_steps_met_no_condition_of_what_it_calls(
    exits: tuple[tuple[int, str], ...], line: int
) -> None:
    # main calls fit in line 39, and a barrier in 40; fit trains in line 22, in a `while True`; line 10 averages, two
    # gradients a step, under a condition. Rank 1 is at the barrier after three steps.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, barrier = rank.site("all_reduce", line=10, function="average"), rank.site("barrier", line=40)
        for i in range(6):
            rank.op("all_reduce", 10 * i, 10 * i + 5, site=average, step=i // 2, nbytes=8)
        if rank.rank == 1:
            rank.op("barrier", 100, site=barrier, step=3, nbytes=0)
        else:
            rank.op("all_reduce", 100, site=average, step=3, nbytes=8)
    nothing = frozenset[tuple[str, int]]()
    places = {
        10: SourcePlace(in_loop=True, following=nothing, loops=((8, 10),), conditions=(9,)),
        22: SourcePlace(in_loop=True, following=nothing, loops=((20, 25),), endless_loops=(20,), ways_past=exits),
        39: SourcePlace(in_loop=False, following=frozenset({("barrier", 40)})),
        40: SourcePlace(in_loop=False, following=nothing),
    }
    inside = frames(("average", 10), ("fit", 22), ("main", 39))
    stacks = {0: inside, 1: frames(("main", 40)), 2: inside}
    job = build_job(ranks, exit_status=None, stacks=stacks, find_place=lambda _, at: places.get(at))
    finding = decide(job).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-skipped-collective", (1,))
    # Without a way out of the loop nothing but the condition may have led past the calls.
    assert finding.culprit_call_sites[1].line == line


@pytest.mark.parametrize(("word", "line"), [("return", 36), ("continue", None)])
def test_who_ended_may_have_left_by_a_function_further_out_than_a_condition_in_a_loop(
    word: str, line: int | None
) -> None:
    rank = RankBuilder(0, 2, closed=False)
    average = rank.site("all_reduce", line=10, function="average")
    for i in range(3):
        rank.op("all_reduce", 10 * i, 10 * i + 5 if i < 2 else None, site=average, step=i, nbytes=8)
    gone = RankBuilder(1, 2)
    places = {
        10: SourcePlace(in_loop=True, following=frozenset(), loops=((8, 10),), conditions=(9,)),
        39: SourcePlace(
            in_loop=True, following=frozenset(), loops=((38, 39),), fixed_loops=(38,), ways_past=((36, word),)
        ),
    }
    stacks = {0: frames(("average", 10), ("main", 39))}
    job = build_job([rank, gone], statuses={1: (0, 100)}, stacks=stacks, find_place=lambda _, at: places.get(at))
    state = job.ranks[0]
    way = find_exit(job, job.ranks[1], {0: state.operations[-1]})
    assert (way.line if way is not None else None) == line
