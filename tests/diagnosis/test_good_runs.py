"""Hand-built jobs that went well: what is found in them all the same, and what must not be."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dtprof.analysis.results import StragglerResult
from dtprof.diagnosis.job_state import Stragglers, assemble_job
from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.diagnosis.verdict import decide
from dtprof.records import events, schema
from dtprof.records.codes import DTYPES, REDUCE_OPS
from dtprof.records.schema import FLAG
from dtprof.records.tables import Manifest
from dtprof.report.text.verdict_text import verdict_text
from tests.builders import RankBuilder
from tests.diagnosis.judging import judge, ranks_in_step

SECOND = 1_000_000_000


def kinds(ranks: Sequence[RankBuilder]) -> list[str]:
    verdict = judge(ranks, exit_status=0, stalled=False)
    assert verdict.outcome == ("healthy" if not verdict.findings else verdict.outcome)
    return [finding.kind for finding in verdict.findings]


def test_names_of_codes_are_those_of_the_format() -> None:
    assert tuple(name for name, _ in schema.DTYPES) == DTYPES
    assert schema.REDUCE_OPS == REDUCE_OPS


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


def test_gathers_and_exchanges_of_uneven_size_that_fit_are_healthy() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.op("all_gather", 2000, 2050, nbytes=8 * (rank.rank + 1))
        rank.op("gather", 2100, 2150, nbytes=8 * (rank.rank + 1), peer=0)
        rank.sizes[5] = ((rank.rank + 1,) * 3, (1, 2, 3))
        rank.op("all_to_all", 2200, 2250, nbytes=8, tag=5)
    assert kinds(ranks) == []


def test_an_exchange_in_which_one_expects_less_than_another_sends_is_a_split_mismatch() -> None:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        rank.sizes[5] = ((1, 1, 2 if rank.rank == 0 else 1), (1, 1, 1))
        rank.op("all_to_all", 2200, 2250, nbytes=8, tag=5)
    finding = judge(ranks, exit_status=0, stalled=False).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("split-size-mismatch", (0, 2))


def test_a_call_that_was_refused_before_any_message_shifts_no_position() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        if rank.rank == 1:
            rank.op("all_reduce", 1000, 1001, state="failed", is_async=True, nbytes=4, dtype="float32")
        rank.op("broadcast", 1100, 1150, peer=0, nbytes=8)
        rank.op("all_reduce", 1200, 1250, nbytes=64)
    assert kinds(ranks) == []


def logged(rank: RankBuilder, step: int, t: int) -> None:
    rank.span(events.BACKWARD, t, t + 5)
    rank.span(events.OPTIMIZER, t + 6, t + 8)
    rank.op("all_reduce", t + 10, t + 20, site=rank.site("all_reduce", line=9), nbytes=8, step=step + 1)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_left_a_call_out_and_makes_it_up_later_is_out_of_step(culprit: int, world_size: int) -> None:
    ranks = [RankBuilder(rank, world_size) for rank in range(world_size)]
    for rank in ranks:
        for step in range(10):
            if rank.rank != culprit or step != 4:
                logged(rank, step, 100 * step)
        if rank.rank == culprit:
            rank.op("all_reduce", 1100, 1120, site=rank.site("all_reduce", line=30), nbytes=8)
    finding = judge(ranks, exit_status=0, stalled=False).findings[0]
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (culprit,), 4)
    assert finding.culprit_call_sites[culprit].line == 9


@pytest.mark.parametrize(
    ("others_ahead", "said"),
    [
        (1, "Rank 1 skipped an optimizer step: at #6 of the default group it is in step 6, the others in step 7."),
        (2, "Rank 1 skipped 2 optimizer steps: at #6 of the default group it is in step 6, the others in step 8."),
        (-1, "Rank 1 made an optimizer step more than the others: at #6 of the default group it is in step 6, "),
    ],
)
def test_calls_that_go_together_after_as_many_forwards_tell_of_an_optimizer_step(others_ahead: int, said: str) -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for i in range(12):
            rank.span(events.FORWARD, 100 * i, 100 * i + 5)
            ahead = others_ahead if rank.rank != 1 and i >= 6 else 0
            rank.op("all_reduce", 100 * i + 10, 100 * i + 20, site=rank.site("", line=9), nbytes=8, step=i + ahead)
    (finding,) = judge(ranks, exit_status=0, stalled=False).findings
    assert (finding.kind, finding.culprit_ranks, finding.seq) == ("step-mismatch", (1,), 6)
    assert finding.summary.startswith(said)
    assert "condition around optimizer.step()" in finding.advice[0]


def test_ranks_whose_steps_differ_from_the_start_are_in_step() -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for step in range(10):
            logged(rank, step + (rank.rank == 0), 100 * step)  # rank 0 made a step of its own before
    assert kinds(ranks) == []


def test_one_call_at_a_line_of_rank_0_alone_is_no_shift() -> None:
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for step in range(10):
            line = 30 if rank.rank == 0 and step == 4 else 9
            rank.op("all_reduce", 100 * step, 100 * step + 9, site=rank.site("all_reduce", line=line), nbytes=8, step=0)
    assert kinds(ranks) == []


@pytest.mark.parametrize("waiting", [(True, False, True), (False, False, False), (True, True, True)])
def test_a_handle_is_said_to_be_dropped_only_where_others_wait_for_theirs(waiting: Sequence[bool]) -> None:
    ranks = ranks_in_step(3, 1)
    for rank, waits in zip(ranks, waiting, strict=True):
        for t in (1000, 1200):
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, waits=(t + 1, t + 50) if waits else None, site=site)
        rank.op("barrier", 1500, 1510)
    assert kinds(ranks) == (["unwaited-async"] if waiting == (True, False, True) else [])


def test_nothing_is_left_out_yet_by_a_rank_of_a_job_that_goes_on() -> None:
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        late = rank.rank == 1
        for t in (1000, 1200, 1400):
            site = rank.site("all_reduce", line=40)
            rank.op("all_reduce", t, t + 50, is_async=True, waits=None if late else (t + 1, t + 50), site=site)
        for i in range(1 if late else 2):
            rank.span(events.NEW_GROUP, 1500 + i, 1501 + i, site=rank.site(line=70 + i))
    assert judge(ranks, exit_status=None, stalled=False).findings == ()
    kinds_at_the_end = {finding.kind for finding in judge(ranks, exit_status=0, stalled=False).findings}
    assert kinds_at_the_end == {"unwaited-async", "group-creation-mismatch"}


def dropping(*, flags: int = FLAG["completion"], barrier: bool = False, hook: str = "native") -> list[RankBuilder]:
    """Return ranks that average two tensors in each of three steps, and drop both handles."""
    ranks = [RankBuilder(rank, 3, hook=hook) for rank in range(3)]
    for rank in ranks:
        for step in range(3):
            t = 1000 * step
            for i in range(2):
                site = rank.site("all_reduce", line=40)
                rank.op("all_reduce", t + i, t + 50, is_async=True, step=step, site=site, flags=flags)
            if barrier:
                rank.op("barrier", t + 60, t + 70, step=step)
    return ranks


def test_handles_that_all_ranks_drop_are_named_with_their_line() -> None:
    finding = judge(dropping(), exit_status=0, stalled=False).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("unwaited-async", (0, 1, 2))
    assert {site.line for site in finding.culprit_call_sites.values()} == {40}
    assert "6 times" in finding.summary


def test_an_abort_at_the_end_of_the_interpreter_is_a_consequence_of_a_dropped_handle() -> None:
    verdict = judge(dropping(), statuses={1: (-6, 9000)}, exit_status=1, stalled=False)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "unwaited-async", (0, 1, 2))
    assert any("SIGABRT" in fact for fact in finding.evidence)


@pytest.mark.parametrize(("status", "is_usual"), [(-6, True), (-11, False)])
def test_a_signal_at_the_end_of_the_interpreter_is_told_with_what_to_let_go_of(status: int, is_usual: bool) -> None:
    ranks = dropping(flags=FLAG["completion"] | FLAG["asked"])
    verdict = judge(ranks, statuses={1: (status, 9000)}, exit_status=1, stalled=False)
    finding = verdict.findings[0]
    assert (verdict.outcome, finding.kind, finding.culprit_ranks) == ("crash", "rank-killed", (1,))
    assert "while its interpreter shut down" in finding.summary
    assert any("asks for the GIL" in fact for fact in finding.evidence) == is_usual
    assert any("gc.collect()" in advice for advice in finding.advice)


def test_handles_asked_for_completion_or_covered_by_a_barrier_are_not_dropped() -> None:
    assert kinds(dropping(flags=FLAG["completion"] | FLAG["asked"])) == []
    assert kinds(dropping(barrier=True)) == []
    assert kinds(dropping(hook="python")) == []  # which does not see questions
    assert kinds(dropping(flags=FLAG["device"])) == []  # a stream may wait for it


@pytest.mark.parametrize(("made", "found"), [((1, 1, 1), []), ((2, 2, 1), ["group-creation-mismatch"])])
def test_a_group_that_not_all_ranks_made_is_a_risk_though_it_went_well(made: Sequence[int], found: list[str]) -> None:
    ranks = ranks_in_step(3, 1)
    for rank, number in zip(ranks, made, strict=True):
        for i in range(number):
            rank.span(events.NEW_GROUP, 1100 + i, 1101 + i, site=rank.site(line=70 + i))
    assert kinds(ranks) == found
    for finding in judge(ranks, exit_status=0, stalled=False).findings:
        assert (finding.severity, finding.culprit_ranks) == ("warning", (2,))
        assert {site.line for site in finding.call_sites.values()} == {71}
    ranks[2].dropped_events = 100  # it may have made the other one, too
    assert kinds(ranks) == []


@pytest.mark.parametrize(
    ("slowdown", "share", "steps", "lag_ms", "found"),
    [
        (1.8, 0.9, 20, 5, ["slow-rank"]),
        (1.8, 0.9, 20_000, 5, ["slow-rank"]),
        (1.1, 0.9, 20, 5, []),  # costs little
        (1.8, 1.0, 3, 5, []),  # three steps are too few
        (1.8, 0.6, 8, 5, []),  # five steps of eight: one of three ranks is so in 26 % of all cases
        (1.8, 0.9, 20, 1, []),  # a millisecond
    ],
)
def test_a_rank_late_again_and_again_is_slow_and_one_that_may_be_so_by_chance_is_not(
    slowdown: float, share: float, steps: int, lag_ms: int, found: list[str]
) -> None:
    ranks = ranks_in_step(3, 4)
    straggler = StragglerResult(
        rank=1,
        last_share=share,
        slowdown=slowdown,
        blame_ns_per_step=5_000_000,
        lag_ns_per_step=lag_ms * 1_000_000,
        phase=events.DATA,
    )
    job = assemble_job(
        [rank_state(rank.tables(), exit=None, stack=None, alive=None) for rank in ranks],
        world_size=3,
        manifest=Manifest(exit_status=0, ended_realtime_ns=1),
        stalled=False,
        stopped_on_hang_ns=None,
        find_stragglers=lambda: Stragglers(steps=steps, found=(straggler,)),
    )
    verdict = decide(job, ("run",))
    assert [finding.kind for finding in verdict.findings] == found
    assert verdict.outcome == ("slow" if found else "healthy")


@pytest.mark.parametrize(("seconds", "found"), [(20, ["long-operation"]), (4, [])])
def test_checkpoints_in_a_row_that_all_others_wait_for_are_one_long_operation(seconds: int, found: list[str]) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks:
        begin = SECOND
        if rank.rank == 0:
            for part in range(4):
                at = begin + part * seconds * SECOND // 4
                rank.span(events.CHECKPOINT, at, at + seconds * SECOND // 4 - 1000)
        rank.op("barrier", begin + (seconds * SECOND if rank.rank == 0 else 5), begin + seconds * SECOND + 9)
    assert kinds(ranks) == found


def test_only_the_newest_operations_are_kept_one_by_one() -> None:
    ranks = ranks_in_step(2, 2)
    tables = replace(ranks[0].tables(), world_size=1_000_000)
    assert len(rank_state(tables, exit=None, stack=None, alive=None).operations) == 4
    many = np.repeat(tables.operations, 100)
    kept = rank_state(replace(tables, operations=many), exit=None, stack=None, alive=None)
    assert len(kept.operations) == 256
