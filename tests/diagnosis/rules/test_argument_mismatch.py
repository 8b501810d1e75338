"""Members of a collective disagree on operation, root, type, reduction or sizes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from dtprof.diagnosis.job_state import JobState
from dtprof.lint.program_order import SourcePlace
from dtprof.report.text.verdict_text import verdict_text
from tests.builders import RankBuilder
from tests.diagnosis.judging import STEP, build_job, found_by, gradients, judge, kinds_after_success, ranks_in_step

USUAL = {"op": "all_reduce", "reduce_op": "sum", "dtype": "float32", "nbytes": 64, "peer": -1, "splits": (1, 1, 1)}
ODD = {
    "collective-order-mismatch": {"op": "all_gather"},
    "root-mismatch": {"peer": 1},
    "dtype-mismatch": {"dtype": "int32"},
    "reduce-op-mismatch": {"reduce_op": "max"},
    "size-mismatch": {"nbytes": 32},
    "split-size-mismatch": {"splits": (1, 1, 2)},
}


def called_with(kind: str, odd: Mapping[str, object]) -> JobState:
    """Return a job that went well, in which rank 1 made the last call otherwise."""
    ranks = ranks_in_step(3, 3)
    shared = {"root-mismatch": {"op": "broadcast", "peer": 0}, "split-size-mismatch": {"op": "all_to_all", "tag": 5}}
    for rank in ranks:
        given = USUAL | shared.get(kind, {}) | (odd if rank.rank == 1 else {})
        op, splits = given.pop("op"), given.pop("splits")
        if op == "all_to_all":
            rank.sizes[5] = (splits, (1, 1, 1))  # type: ignore[assignment]
            given |= {"nbytes": 8, "reduce_op": None}
        rank.op(str(op), 3000, 3050, site=rank.site(str(op), line=60), **given)  # type: ignore[arg-type]
    return build_job(ranks, exit_status=0, stalled=False)


def all_that_agree() -> JobState:
    return called_with("", {})


FAULTY = {kind: partial(called_with, kind, odd) for kind, odd in ODD.items()}
SOUND = all_that_agree


def test_another_operation_at_the_same_position_is_an_order_mismatch() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        if rank.rank == 1:
            rank.op("barrier", 2100, None, returned=2101, site=rank.site("barrier", line=50))
        else:
            gradients(rank, 2000, done=False)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (1,))
    assert finding.culprit_call_sites[1].line == 50


def test_different_roots_are_named() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        root = 2 if rank.rank == 0 else 1
        rank.op("broadcast", 1100, None, returned=1101, peer=root, site=rank.site("broadcast", line=60), nbytes=8)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("root-mismatch", (0,))


def test_of_two_calls_at_one_position_the_one_made_for_the_first_time_is_the_wrong_one() -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].op("barrier", 3100, site=ranks[0].site("barrier", line=50))
    gradients(ranks[1], 3000, done=False)
    job = build_job(ranks, exit_status=None, find_place=lambda *_: SourcePlace(in_loop=True, following=frozenset()))
    finding = found_by("argument_mismatch", job)[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("collective-order-mismatch", (0,), (1,))
    assert finding.culprit_call_sites[0].line == 50
    assert finding.confidence == 0.75


def test_another_size_at_the_usual_line_is_a_size_mismatch_and_no_skipped_call() -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        line = rank.site("reduce_scatter_tensor", line=9)
        for step in range(4):
            odd, last = step == 3 and rank.rank == 0, step == 3
            t = step * 1000
            done = None if last else t + 50
            rank.op("reduce_scatter", t, done, returned=t + 1, site=line, nbytes=80 if odd else 64, step=0)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("size-mismatch", (0,), (1,))


def test_of_two_calls_that_both_are_new_neither_is_known_to_be_wrong() -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].op("barrier", 3100, site=ranks[0].site("barrier", line=50))
    ranks[1].op("all_reduce", 3100, site=ranks[1].site("all_reduce", line=60), nbytes=8)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.confidence) == ("collective-order-mismatch", 0.6)
    assert any("guess" in fact for fact in finding.evidence)


@pytest.mark.parametrize(
    ("kind", "usual", "other"),
    [
        ("reduce-op-mismatch", {"reduce_op": "sum"}, {"reduce_op": "max"}),
        ("root-mismatch", {"peer": 0}, {"peer": 1}),
        ("dtype-mismatch", {"dtype": "float32"}, {"dtype": "int32"}),
        ("size-mismatch", {"nbytes": 64}, {"nbytes": 32}),
    ],
)
def test_arguments_that_the_back_end_let_pass_are_a_risk(
    kind: str, usual: dict[str, object], other: dict[str, object]
) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        given: dict[str, object] = {"reduce_op": "sum", "nbytes": 64} | (other if rank.rank == 1 else usual)
        name = "broadcast" if kind == "root-mismatch" else "all_reduce"
        rank.op(name, 3000, 3050, site=rank.site(name, line=60), **given)  # type: ignore[arg-type]
    verdict = judge(ranks, exit_status=0, stalled=False)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("risk", kind, (1,))
    assert (finding.waiting_ranks, finding.culprit_call_sites[1].line) == ((), 60)
    assert any("silently wrong" in fact for fact in finding.evidence)
    assert "  others: ranks 0, 2 at " in verdict_text(verdict), "nobody waits"


def test_what_passed_in_a_job_that_was_stopped_later_is_no_hang() -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        reduce_op = "max" if rank.rank == 1 else "sum"
        rank.op("all_reduce", 3000, 3050, site=rank.site("all_reduce", line=60), reduce_op=reduce_op, nbytes=64)
    statuses = dict.fromkeys(range(3), (-15, 9000))
    verdict = judge(ranks, exit_status=1, stalled=False, statuses=statuses)
    assert (verdict.outcome, verdict.findings[0].kind) == ("risk", "reduce-op-mismatch")


def test_an_exchange_in_which_one_expects_less_than_another_sends_is_a_split_mismatch() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.sizes[5] = ((1, 1, 2 if rank.rank == 0 else 1), (1, 1, 1))
        rank.op("all_to_all", 2200, 2250, nbytes=8, tag=5)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=0, stalled=False))[0]
    assert (finding.kind, finding.culprit_ranks) == ("split-size-mismatch", (0, 2))


@pytest.mark.parametrize(("odd", "world_size", "culprits"), [(2, 3, (2,)), (0, 3, (0,)), (1, 2, (0, 1))])
def test_of_even_exchanges_the_rank_with_another_size_than_most_is_the_culprit(
    odd: int, world_size: int, culprits: tuple[int, ...]
) -> None:
    ranks = ranks_in_step(world_size, 2)
    for rank in ranks:
        rank.op("all_to_all", 2200, nbytes=60 if rank.rank == odd else 48)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("split-size-mismatch", culprits)


def test_what_the_back_end_let_pass_before_a_mismatch_that_hangs_is_named() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        calls = ("reduce_scatter", "all_gather") if rank.rank == 0 else ("all_reduce", "all_reduce")
        rank.op(calls[0], 2200, 2250, site=rank.site(calls[0], line=60), nbytes=64)
        rank.op(calls[1], 2300, site=rank.site(calls[1], line=61), nbytes=64)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (0,))
    assert finding.culprit_call_sites[0].line == 60


def test_gathers_and_exchanges_of_uneven_size_that_fit_are_healthy() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.op("all_gather", 2000, 2050, nbytes=8 * (rank.rank + 1))
        rank.op("gather", 2100, 2150, nbytes=8 * (rank.rank + 1), peer=0)
        rank.sizes[5] = ((rank.rank + 1,) * 3, (1, 2, 3))
        rank.op("all_to_all", 2200, 2250, nbytes=8, tag=5)
    assert kinds_after_success(ranks) == []


def test_a_call_that_was_refused_before_any_message_shifts_no_position() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        if rank.rank == 1:
            rank.op("all_reduce", 1000, 1001, state="failed", is_async=True, nbytes=4, dtype="float32")
        rank.op("broadcast", 1100, 1150, peer=0, nbytes=8)
        rank.op("all_reduce", 1200, 1250, nbytes=64)
    assert kinds_after_success(ranks) == []


def test_a_tensor_of_a_size_that_the_program_does_not_have_is_a_size_mismatch() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        site = rank.site("all_reduce", line=10)
        for i in range(3):
            rank.op("all_reduce", 100 * i, 100 * i + 5, site=site, nbytes=64)
        rank.op("all_reduce", 400, site=site, nbytes=72 if rank.rank == 1 else 64)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (1,))


@pytest.mark.parametrize(("saving", "kind"), [((0, 1), "rank-skipped-collective"), ((0,), "collective-order-mismatch")])
def test_a_call_made_for_the_first_time_was_skipped_by_one_or_added_by_one(saving: tuple[int, ...], kind: str) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        if rank.rank in saving:
            site = rank.site("all_gather_object", line=50, function="save")
            rank.op("all_gather", 3050, None, returned=3051, site=site, nbytes=8)
        else:
            rank.span("backward", 3000, 3200)
            gradients(rank, 3000, done=False)
    finding = judge(ranks, exit_status=None).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (2,) if saving == (0, 1) else (0,))


@pytest.mark.parametrize(("in_operation", "kind"), [(True, "split-size-mismatch"), (False, "rank-crashed")])
def test_an_exception_that_came_out_of_a_mismatched_operation_is_its_consequence(
    *, in_operation: bool, kind: str
) -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        is_odd = rank.rank == 0
        rank.sizes[5] = ((1, 4, 1) if is_odd else (2, 2, 2), (2, 2, 2))
        state, end = ("failed", 2201) if is_odd else (None, None)
        rank.op("all_to_all", 2200, end, returned=end, state=state, nbytes=6, tag=5, site=rank.site(line=60))
    ranks[0].exception(2202 if in_operation else 2_000_000_000, "RuntimeError", "[enforce fail at alltoallv.cc:138]")
    verdict = judge(ranks, statuses={0: (1, 2_100_000_000)})
    assert (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == (kind, (0,))


def test_sizes_of_a_gather_that_crashed_native_code_are_why() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.op("all_gather", 2200, nbytes=4 if rank.rank == 1 else 8, site=rank.site(line=60))
    verdict = judge(ranks, statuses={1: (-6, 3000)})
    assert (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == ("size-mismatch", (1,))
    assert "killed by SIGABRT" in verdict.findings[0].evidence[-1]


def test_a_root_that_scatters_holds_the_elements_of_all() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        nbytes = {0: 18, 1: 6, 2: 3}[rank.rank]
        rank.op("scatter", 2200, nbytes=nbytes, peer=0, site=rank.site(line=60))
    finding = judge(ranks, statuses={2: (-6, 3000)}).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("size-mismatch", (2,))
    assert "rank 2 has 3 elements, the others 6 elements" in finding.summary


@pytest.mark.parametrize(
    ("conditions", "kind"), [((69,), "collective-order-mismatch"), ((), "size-mismatch"), ((59,), "size-mismatch")]
)
def test_a_call_under_a_condition_of_its_own_is_another_call_and_no_other_size(
    conditions: tuple[int, ...], kind: str
) -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        for t in (0, 1000):
            rank.op("all_reduce", t, t + 10, nbytes=64, site=rank.site(line=60))
        line, nbytes = (70, 16) if rank.rank == 0 else (60, 64)
        rank.op("all_reduce", 2000, nbytes=nbytes, site=rank.site(line=line))
    places = {
        60: SourcePlace(in_loop=True, following=frozenset(), conditions=(59,)),
        70: SourcePlace(in_loop=True, following=frozenset(), conditions=conditions),
    }
    job = build_job(ranks, statuses={0: (-6, 3000)}, find_place=lambda _, line: places.get(line))
    finding = found_by("argument_mismatch", job)[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))
    is_own = kind == "collective-order-mismatch"
    assert ("rank 0 makes a call of its own, all_reduce at /home/me/train.py:70" in finding.summary) == is_own
    assert finding.summary.endswith(", with other sizes." if is_own else " elements (all_reduce).")
    own = "Make the call at /home/me/train.py:70 (main) on every member of the group, or on none."
    assert (finding.advice == (own,)) == is_own


@pytest.mark.parametrize(("branches", "is_extra"), [(((70, 71),), True), ((), False)])
def test_a_call_in_a_branch_before_that_of_the_others_is_to_be_made_by_all_or_none(
    branches: tuple[tuple[int, int], ...], *, is_extra: bool
) -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        name, line = ("all_gather", 70) if rank.rank == 0 else ("barrier", 72)
        rank.op(name, 100, site=rank.site(line=line), nbytes=8 * (rank.rank == 0))
    places = {
        70: SourcePlace(in_loop=True, following=frozenset({("barrier", 72)}), branches=branches),
        72: SourcePlace(in_loop=True, following=frozenset()),
    }
    job = build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))
    finding = found_by("argument_mismatch", job)[0]
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (0,))
    assert ("rank 0 comes to the call of the others after its own" in finding.evidence) == is_extra
    assert finding.advice[0].endswith("on every member of the group, or on none.") == is_extra


@pytest.mark.parametrize("lines", [(60, 60), (60, 61)])
def test_another_argument_that_passed_at_one_line_is_a_fault_beside_a_hang(lines: tuple[int, int]) -> None:
    ranks = ranks_in_step(4, 3)
    for rank in ranks:
        own = rank.group("1", (0, 1), "pair") if rank.rank < 2 else rank.group("2", (2, 3), "other pair")
        for t in (3000, 3100, 3200):
            is_odd = rank.rank == 1 and t == 3200
            site = rank.site(line=lines[is_odd])
            rank.op("all_reduce", t, t + 10, nbytes=64, reduce_op="max" if is_odd else "sum", group=own, site=site)
        if rank.rank != 3:
            gradients(rank, 4000, done=False)
    found = judge(ranks, exit_status=None).findings
    assert (found[0].kind, found[0].culprit_ranks) == ("rank-stuck", (3,))
    assert [(one.kind, one.culprit_ranks) for one in found[1:]] == [("reduce-op-mismatch", (1,))] * (lines == (60, 60))


@pytest.mark.parametrize(("passed", "kind"), [(True, "collective-order-mismatch"), (False, "rank-crashed")])
def test_a_rank_that_died_of_what_a_call_made_again_gave_it_is_named_for_the_call(*, passed: bool, kind: str) -> None:
    # All agree on a length; rank 0 asks once more, meets the gradients of the others, and allocates what those say.
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        length, average = rank.site(line=20, function="longest"), rank.site(line=60, function="average")
        rank.op("all_reduce", 0, 9, nbytes=8, site=length, dtype="int64")
        if rank.rank:
            rank.op("all_reduce", 100, nbytes=16, site=average, dtype="float32")
        elif passed:
            rank.op("all_reduce", 100, 109, nbytes=8, site=length, dtype="int64")
    ranks[0].exception(2_000_000_000, "MemoryError", "")
    finding = judge(ranks, statuses={0: (1, 2_100_000_000)}).findings[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))
    if passed:
        assert "rank 0 makes the call before again, all_reduce at /home/me/train.py:20" in finding.summary
        assert "ran out of host memory" in finding.evidence[-1]


def test_the_call_before_made_again_with_another_reduction_is_another_call() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        average, share = rank.site(line=10, function="average"), rank.site(line=20, function="share")
        rank.op("all_reduce", 0, 9, nbytes=8, site=average, reduce_op="sum")
        again = rank.rank == 2
        site, how = (average, "sum") if again else (share, "max")
        rank.op("all_reduce", 100, nbytes=8, site=site, reduce_op=how)
    finding = found_by("argument_mismatch", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (2,))
    assert finding.summary.endswith("with other reductions.")


@pytest.mark.parametrize(("earlier", "is_read", "sure"), [(3, False, 0.6), (3, True, 0.9), (0, False, 0.9)])
def test_a_barrier_that_no_rank_has_come_to_may_be_the_end_of_a_loop_left_early_unless_the_source_tells(
    earlier: int, is_read: bool, sure: float
) -> None:
    ranks = ranks_in_step(3, earlier)
    for rank in ranks:
        t = STEP * earlier + 300
        name, line = ("barrier", 40) if rank.rank == 1 else ("all_reduce", 12)
        for number in range(earlier):
            rank.op("all_reduce", STEP * number + 300, STEP * number + 310, site=rank.site("all_reduce", line=12))
        rank.op(name, t, site=rank.site(name, line=line))
    place = SourcePlace(in_loop=False, following=frozenset())
    job = build_job(ranks, exit_status=None, find_place=lambda *_: place if is_read else None)
    finding = found_by("argument_mismatch", job)[0]
    assert (finding.kind, finding.culprit_ranks, finding.confidence) == ("collective-order-mismatch", (1,), sure)
    assert any("may as well have skipped" in fact for fact in finding.evidence) is (sure == 0.6)


@pytest.mark.parametrize("in_loop", [True, False])
def test_branches_of_one_if_in_a_loop_come_in_another_order(in_loop: bool) -> None:
    """A loop over meters reduces one and gathers another, in each of three rounds; rank 0 begins with the other one."""
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        calls = [("all_reduce", 11), ("all_gather", 9)]
        for number in range(3):
            for nth, (name, line) in enumerate(calls):
                t = STEP * number + 300 + 20 * nth
                rank.op(name, t, t + 9, site=rank.site(name, line=line), nbytes=8, step=number)
        name, line = calls[rank.rank == 0]
        rank.op(name, 4 * STEP, site=rank.site(name, line=line), nbytes=8, step=3)
    loops = ((7, 12),) if in_loop else ()
    place = SourcePlace(in_loop=in_loop, following=frozenset(), loops=loops, conditions=(8,))
    places = {line: replace(place, branches=((line, line),)) for line in (9, 11)}
    job = build_job(ranks, exit_status=None, find_place=lambda _, line: places.get(line))
    assert bool(found_by("rank_skipped_collective", job)) is not in_loop
    if in_loop:
        finding = found_by("argument_mismatch", job)[0]
        assert (finding.kind, finding.culprit_ranks) == ("collective-order-mismatch", (0,))
        assert finding.confidence == 0.7
        assert finding.advice[-1].startswith("If a loop makes both calls, go through it in one order")
