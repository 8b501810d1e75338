"""Changes of generated jobs, whose truth is known: the changed job runs too, with the same noise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.pipeline.schedule_plans import make_h1_plan, make_plan, make_zero_bubble_plan
from dtprof.analysis.pipeline.schedule_replay import BACKWARD, SchedulePlan, replay_actions, replay_plan
from dtprof.analysis.whatif.prediction import MAX_ERROR, Prediction, Replayable, predict
from dtprof.analysis.whatif.replay import Dependencies
from dtprof.analysis.whatif.run_graph import read_graph
from dtprof.analysis.whatif.schedule_fixes import measure_gaps
from dtprof.analysis.whatif.whatif_changes import Fix, parse_fix, parse_fixes, parse_option
from dtprof.errors import UsageError
from dtprof.records.reader import Run, open_run
from dtprof.records.schema import FLAG
from dtprof.session import whatif_prediction
from dtprof.session.engines import make_engine
from tests.builders import RankBuilder, write_run
from tests.synthetic import Job, generate

MS = 1_000_000
JOB = Job(dp=4, steps=8, jitter=0.02)
LAYOUTS = {
    "dp": JOB,
    "tp": replace(JOB, dp=2, tp=2),
    "pp": replace(JOB, dp=1, pp=4, microbatches=8),
    "3d": replace(JOB, dp=2, tp=2, pp=2, microbatches=4),
    "overlapped": replace(JOB, overlapped=True),
}


def what_if_of(folder: Path, job: Job, *fixes: str) -> Prediction:
    generate(folder, job)
    parsed = [parse_option(*fix[2:].split("=")) if fix.startswith("--") else parse_fix(fix) for fix in fixes]
    return whatif_prediction.predict(open_run(folder), make_engine("local"), parsed)


def graph_of(folder: Path, job: Job) -> Replayable:
    generate(folder, job)
    source = read_graph(open_run(folder))
    assert isinstance(source, Replayable)
    return source


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_straggler_that_is_mended_gains_what_was_predicted(layout: str, tmp_path: Path) -> None:
    job = LAYOUTS[layout]
    predicted = what_if_of(tmp_path / "slow", replace(job, slow={1: 1.3}), "rank=1")
    truth = what_if_of(tmp_path / "sound", job).measured_step_ns
    (scenario,) = predicted.scenarios
    assert predicted.replay_error is not None
    assert predicted.replay_error < 0.01
    assert scenario.step_ns == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("more", [4, 16])
def test_more_microbatches_of_the_same_batch_make_the_step_that_was_predicted(more: int, tmp_path: Path) -> None:
    job = Job(dp=1, pp=4, steps=8, microbatches=8, layers=4)
    predicted = what_if_of(tmp_path / "before", job, f"--microbatches={more}")
    changed = replace(job, microbatches=more, layer_ns=job.layer_ns * 8 // more)
    truth = what_if_of(tmp_path / "after", changed).measured_step_ns
    assert predicted.scenarios[0].step_ns == pytest.approx(truth, rel=0.02)


def test_bounds_of_other_microbatches_allow_for_time_that_does_not_depend_on_their_size(tmp_path: Path) -> None:
    # 0.12 of each action does not depend on the size: half of it takes 0.88 / 2 + 0.12 = 0.56 times as long, of which
    # 0.12 are 21 %. Bounds allow for a quarter: 0.5 to 1 / (0.25 + 0.75 * 2) = 0.571.
    job = Job(dp=1, pp=2, steps=8, microbatches=4, layers=4)
    (found,) = what_if_of(tmp_path / "before", job, "--microbatches=8").scenarios
    launched = replace(job, microbatches=8, layer_ns=round(job.layer_ns * (0.88 / 2 + 0.12)))
    truth = what_if_of(tmp_path / "after", launched).measured_step_ns
    before = what_if_of(tmp_path / "same", job).measured_step_ns
    assert truth is not None
    assert before is not None
    assert found.interval is not None
    assert found.interval[0] < 1 - truth / before < found.interval[1]
    assert "does not depend on their size" in found.assumes


def test_an_even_split_makes_the_step_that_was_predicted(tmp_path: Path) -> None:
    # Stages that take 1 and 1.5 times as long become two of 1.25.
    uneven = Job(dp=1, pp=2, steps=8, microbatches=8, layers=4, stage_factor=(1.0, 1.5))
    (found,) = what_if_of(tmp_path / "before", uneven, "--split=even").scenarios
    truth = what_if_of(tmp_path / "after", replace(uneven, stage_factor=(1.25, 1.25))).measured_step_ns
    assert found.step_ns == pytest.approx(truth, rel=0.02)


def test_another_schedule_makes_the_step_that_was_predicted(tmp_path: Path) -> None:
    job = Job(dp=1, pp=4, steps=8, microbatches=8, layers=4, jitter=0.02)
    gpipe = replace(job, interleave_backward=False)
    changed = what_if_of(tmp_path / "gpipe", gpipe, "--schedule=1f1b").scenarios[0]
    truth = what_if_of(tmp_path / "1f1b", job).measured_step_ns
    assert changed.step_ns == pytest.approx(truth, rel=0.02)


def test_without_changes_single_ones_are_listed_by_gain_with_the_straggler_as_the_best(tmp_path: Path) -> None:
    predicted = what_if_of(tmp_path, replace(JOB, slow={2: 1.5}))
    gains = [scenario.gain for scenario in predicted.scenarios if scenario.gain is not None]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) == len(predicted.scenarios) > 8
    assert predicted.best is not None
    assert predicted.best.fix == ("rank=2",)


def test_changes_together_gain_more_than_each(tmp_path: Path) -> None:
    job = replace(JOB, slow={1: 1.3, 2: 1.5})
    generate(tmp_path, job)
    run, engine = open_run(tmp_path), make_engine("local")
    both, one = (
        whatif_prediction.predict(run, engine, list(map(parse_fix, fixes))) for fixes in (["rank=1,2"], ["rank=2"])
    )
    assert (both.scenarios[0].gain or 0) > (one.scenarios[0].gain or 0) > 0.1


def test_collectives_that_are_waited_for_at_the_end_of_the_step_overlap(tmp_path: Path) -> None:
    # Two layers a step, each with 300 us of gradients, of which only the last ones have nothing left to hide behind.
    predicted = what_if_of(tmp_path, replace(JOB, jitter=0.0), "--overlap=full").scenarios[0]
    assert predicted.gain is not None
    assert 0.02 < predicted.gain < 0.1


def test_bounds_of_more_ranks_allow_for_transfers_that_are_latency_alone(tmp_path: Path) -> None:
    # All gradients have one size. From 4 to 8 ranks a ring takes (7 / 8) / (3 / 4) = 7 / 6 of the time, or 7 / 3 where
    # only its turns count.
    before = what_if_of(tmp_path / "before", JOB, "--ranks=8")
    (found,) = before.scenarios
    assert found.interval is not None
    assert "latency" in found.assumes
    for i, factor in enumerate((7 / 6, 7 / 3)):
        changed = replace(JOB, dp_ns=round(JOB.dp_ns * factor), world_ns=round(JOB.world_ns * factor))
        truth = what_if_of(tmp_path / str(i), changed).measured_step_ns
        assert truth is not None
        assert before.measured_step_ns is not None
        gain = 1 - truth / before.measured_step_ns
        assert found.interval[0] - 0.003 <= gain <= found.interval[1]
        if i == 0:
            assert found.gain == pytest.approx(gain, abs=0.003)


def test_a_replay_that_misses_the_step_predicts_nothing_and_names_the_part(tmp_path: Path) -> None:
    source = graph_of(tmp_path, JOB)
    graph = source.graph
    transfers = graph.is_of(lambda kind: kind.op == "all_reduce")
    missed = replace(graph, modelled=(np.where(transfers, 5 * graph.durations, graph.durations),))
    found = predict("run", replace(source, graph=missed), [])
    assert found.replay_error is not None
    assert found.replay_error > MAX_ERROR
    assert found.slowdowns is None
    assert not found.scenarios
    assert "transfers of all_reduce" in found.cannot_tell[-1]
    assert "nothing is predicted" in found.cannot_tell[-1]


def test_long_runs_are_replayed_in_part_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtprof.analysis.whatif.run_graph.MAX_RECORDS", 200)
    found = what_if_of(tmp_path, replace(JOB, steps=20))
    assert found.steps is not None
    assert found.steps[1] - found.steps[0] < 10
    assert "measured steps" in found.cannot_tell[0]


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ("rank=9", "the run has no rank 9; expected one of ranks 0-3"),
        ("rank=0,1,2,3", "names every rank"),
        ("host=x", "no rank ran on this host"),
        ("stage=1", "no pipeline of several stages"),
        ("op=all_to_all", "the measured steps have no such operation"),
        ("phase=checkpoint", "no rank spent time in it"),
    ],
)
def test_what_the_run_does_not_have_is_refused_with_what_it_has(fix: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        what_if_of(tmp_path, JOB, fix)


@pytest.mark.parametrize(
    ("fix", "sentence"),
    [
        ("--microbatches=16", "no pipeline schedule"),
        ("--schedule=zbv", "no pipeline schedule"),
        ("--split=even", "no pipeline schedule"),
        ("--ranks=4000", "4,000 replicas from the 4"),
        ("--buckets=1MB", "about as large"),
        ("--reduce-dtype=bf16", "no gradients of 32 bits on a device"),
        ("--sync=last", "reduce its gradients more than once"),
    ],
)
def test_what_the_run_does_not_show_is_not_predicted(fix: str, sentence: str, tmp_path: Path) -> None:
    found = what_if_of(tmp_path, JOB, fix)
    assert found.scenarios[0].step_ns is None
    assert "scenarios: " in found.cannot_tell[-1]
    assert sentence in found.cannot_tell[-1]


@pytest.mark.parametrize("text", ["rank", "rank=", "rank=x", "stage=first", "speed=2", "=3"])
def test_what_is_no_change_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--fix is"):
        parse_fix(text)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("network", "0"),
        ("compute", "-1x"),
        ("overlap", "half"),
        ("schedule", "fastest"),
        ("split", "3,1"),
        ("sync", "first"),
        ("without", ""),
        ("buckets", "50XB"),
        ("reduce-dtype", "fp8"),
        ("ranks", "0"),
        ("microbatches", "2.5"),
    ],
)
def test_impossible_values_are_refused_with_what_is_expected(option: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--{option} is .*; expected"):
        parse_option(option, text)


def test_a_completion_recorded_after_the_backward_pass_that_waited_for_it_is_no_computation(tmp_path: Path) -> None:
    """Steps of 100 ms: both compute 20 ms, rank 1 after 60 ms of its own; 10 ms of transfer, 10 ms of optimizer.

    The completion on rank 0 is recorded 1 ms after its backward pass has ended. Without the 60 ms a step takes 40.
    """
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank, late in zip(ranks, (0, 60), strict=True):
        for begin in range(0, 1200 * MS, 100 * MS):
            done = begin + (91 if rank.rank == 0 else 90) * MS
            rank.span("backward", begin + late * MS, begin + 90 * MS)
            rank.op("all_reduce", begin + (late + 20) * MS, done, is_async=True, nbytes=4096, api="Tensor.backward")
            rank.span("optimizer", begin + 90 * MS, begin + 100 * MS)
    run = open_run(write_run(tmp_path / "run", ranks))
    (scenario,) = whatif_prediction.predict(run, make_engine("local"), [parse_fix("rank=1")]).scenarios
    assert scenario.step_ns == pytest.approx(40 * MS, rel=0.01)


def train_on_devices(folder: Path, *, dtype: str = "float32") -> Run:
    """Write 12 steps of 100 ms: 20 ms of computation, 40 and 20 ms of gradients in buckets of 32 and 16 MiB, 20 ms."""
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    flags = FLAG["completion"] | FLAG["device"]
    for rank in ranks:
        for begin in range(0, 1200 * MS, 100 * MS):
            rank.span("backward", begin, begin + 80 * MS)
            first, second = begin + 20 * MS, begin + 60 * MS
            rank.op("all_reduce", first, second, nbytes=32 << 20, dtype=dtype, reduce_op="sum", flags=flags)
            rank.op("all_reduce", second, begin + 80 * MS, nbytes=16 << 20, dtype=dtype, reduce_op="sum", flags=flags)
            rank.span("optimizer", begin + 80 * MS, begin + 100 * MS)
    return open_run(write_run(folder, ranks))


def test_gradients_of_half_the_width_take_half_the_transfer(tmp_path: Path) -> None:
    run, engine = train_on_devices(tmp_path / "wide"), make_engine("local")
    fixes = parse_fixes([], {"reduce_dtype": "bf16"})
    (scenario,) = whatif_prediction.predict(run, engine, fixes).scenarios
    assert scenario.step_ns == pytest.approx(70 * MS, rel=1e-6)
    assert "as well with gradients reduced in bf16" in scenario.assumes
    best = whatif_prediction.predict(run, engine).best
    assert best is not None
    assert best.fix == ("reduce-dtype=bf16",)
    narrow = whatif_prediction.predict(train_on_devices(tmp_path / "narrow", dtype="bfloat16"), engine, fixes)
    assert narrow.scenarios[0].step_ns is None
    assert "no gradients of 32 bits" in narrow.cannot_tell[-1]


def pause_and_meet(folder: Path) -> Run:
    """Write 12 steps of 100 ms of two ranks: garbage collection 30, backward 40, barrier 10, optimizer 20 ms."""
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        for begin in range(0, 1200 * MS, 100 * MS):
            rank.span("garbage_collection", begin, begin + 30 * MS)
            rank.span("backward", begin + 30 * MS, begin + 70 * MS)
            rank.op("barrier", begin + 70 * MS, begin + 80 * MS)
            rank.span("optimizer", begin + 80 * MS, begin + 100 * MS)
    return open_run(write_run(folder, ranks))


@pytest.mark.parametrize(
    ("fix", "step_ms", "assumed"),
    [
        (parse_option("without", "barrier"), 90, "the program is right without barrier"),
        (parse_fix("phase=garbage_collection"), 70, "garbage is collected between steps"),
    ],
)
def test_what_nobody_does_any_more_takes_no_time(fix: Fix, step_ms: int, assumed: str, tmp_path: Path) -> None:
    run, engine = pause_and_meet(tmp_path), make_engine("local")
    (scenario,) = whatif_prediction.predict(run, engine, [fix]).scenarios
    assert scenario.step_ns == pytest.approx(step_ms * MS, rel=1e-6)
    assert assumed in scenario.assumes
    best = whatif_prediction.predict(run, engine).best
    assert best is not None
    assert best.fix == ("phase=garbage_collection",), "of the two it gains more"


def train(folder: Path, *operations: tuple[int, int, int, int]) -> Run:
    """Write 12 steps of 100 ms of two ranks, 80 of backward, with all_reduces: issue, done, begin of the wait, MiB."""
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        for begin in range(0, 1200 * MS, 100 * MS):
            rank.span("backward", begin, begin + 80 * MS)
            rank.span("optimizer", begin + 80 * MS, begin + 100 * MS)
            for issue, done, wait, mib in operations:
                at, end, waits = (begin + ms * MS for ms in (issue, done, wait))
                rank.op("all_reduce", at, end, is_async=True, waits=(waits, end), nbytes=mib << 20, reduce_op="sum")
    return open_run(write_run(folder, ranks))


def test_bounds_of_what_is_left_out_allow_for_the_computation_that_it_slowed_down(tmp_path: Path) -> None:
    """The 10 ms of the wait go for sure; the 40 ms of computation before it, beside the operation, may take 20."""
    fix = parse_option("without", "all_reduce")
    (scenario,) = whatif_prediction.predict(train(tmp_path, (20, 70, 60, 4)), make_engine("local"), [fix]).scenarios
    assert scenario.gain == pytest.approx(0.1, abs=1e-6)
    assert scenario.interval == pytest.approx((0.1, 0.3), abs=1e-3)
    assert "slow down to half its speed" in scenario.assumes


def test_gradients_that_are_waited_for_in_turn_tell_nothing_of_larger_buckets(tmp_path: Path) -> None:
    engine, fix = make_engine("local"), parse_option("buckets", "64MB")
    in_turn = train(tmp_path / "in-turn", (20, 30, 20, 1), (30, 50, 30, 8), (50, 60, 50, 1))
    found = whatif_prediction.predict(in_turn, engine, [fix])
    assert found.scenarios[0].step_ns is None
    assert "waits for most reductions before it issues the next" in found.cannot_tell[-1]
    at_once = train(tmp_path / "at-once", (20, 30, 75, 1), (30, 50, 75, 8), (50, 60, 75, 1))
    assert whatif_prediction.predict(at_once, engine, [fix]).scenarios[0].step_ns is not None


def test_only_operations_between_ranks_can_be_left_out(tmp_path: Path) -> None:
    run, engine = pause_and_meet(tmp_path), make_engine("local")
    with pytest.raises(UsageError, match=r"--without backward: .*; expected one of barrier, barrier world"):
        whatif_prediction.predict(run, engine, [parse_option("without", "backward")])


def test_runs_without_steps_and_with_missing_ranks_are_not_replayed(tmp_path: Path) -> None:
    stepless = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in stepless:
        rank.op("all_reduce", 10, 20)
    found = whatif_prediction.predict(open_run(write_run(tmp_path / "stepless", stepless)), make_engine("local"))
    assert "no measured steps" in found.cannot_tell[0]
    found = what_if_of(tmp_path / "lost", replace(JOB, lost=frozenset({2})))
    assert "rank 2 of 4 left no records" in found.cannot_tell[0]


def test_nodes_begin_when_the_last_of_what_they_depend_on_ends() -> None:
    #   0 (10) --> 2 (5) --> 3 (1)
    #   1 (20) -->
    graph = Dependencies(num_nodes=4, before=np.array([0, 1, 2]), after=np.array([2, 2, 3]))
    ends = graph.replay(np.array([[10.0, 30.0], [20.0, 20.0], [5.0, 5.0], [1.0, 1.0]]))
    assert ends.T.tolist() == [[10, 20, 25, 26], [30, 20, 35, 36]]
    assert graph.is_acyclic


def test_nodes_that_wait_for_each_other_are_a_circle() -> None:
    graph = Dependencies(num_nodes=3, before=np.array([0, 1, 2]), after=np.array([1, 2, 1]))
    assert not graph.is_acyclic


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b(ranks: int, microbatches: int) -> None:
    one_by_one = make_plan("1F1B", ranks=ranks, chunks=1, microbatches=microbatches)
    apart = make_h1_plan(ranks=ranks, microbatches=microbatches)
    assert one_by_one is not None
    before, after = (window_of(plan) - 3 * microbatches for plan in (one_by_one, apart))
    # Qi et al.: (p - 1) (F + B + W) becomes (p - 1) (F + B - W).
    assert before == 3 * (ranks - 1)
    assert after == ranks - 1


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_host_between_actions_and_messages_are_told_apart(schedule: str) -> None:
    # Actions of 10 with 1 of the host before each, and 2 more where one waits for a message.
    plan = make_plan(schedule, ranks=2, chunks=1, microbatches=4)
    assert plan is not None
    replayed = replay_actions(plan, np.full((sum(map(len, plan)), 3), 11.0), message_ns=2.0)
    assert replayed is not None
    begins, ends = replayed
    assert measure_gaps(plan, begins + 1, ends) == (1.0, 2.0)


def window_of(plan: SchedulePlan) -> float:
    took = np.array([[2.0 if act.kind == BACKWARD else 1.0] for acts in plan for act in acts])
    window = replay_plan(plan, took)
    assert window is not None
    return float(window[0])


def test_stages_in_a_v_leave_next_to_no_bubble() -> None:
    ranks, microbatches = 4, 16
    plan = make_zero_bubble_plan(
        ranks=ranks,
        rank_of_stage=[0, 1, 2, 3, 3, 2, 1, 0],
        microbatches=microbatches,
        took=([1.0] * 8, [1.0] * 8, [1.0] * 8),
    )
    assert window_of(plan) - 6 * microbatches < 3 * (ranks - 1)
