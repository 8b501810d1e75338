"""Gradients that DDP reduces after each of several backward passes of a step, and what no_sync() gains."""

from pathlib import Path

import pytest

from dtprof.analysis.results import RepeatedReductions, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.whatif.whatif_changes import parse_option
from dtprof.records import events
from dtprof.records.reader import open_run
from dtprof.records.tables import BucketLayout
from dtprof.report.text.summary_text import summary_text
from dtprof.session.engines import make_engine
from dtprof.session.whatif_prediction import predict
from tests.builders import MemoryRun, RankBuilder, write_run

MS = 1_000_000
STEPS = 8
SIZES = (2 << 20, 1 << 20)
LAYOUT = BucketLayout(t_ns=0, reducer=1, group="0", sizes=SIZES, num_parameters=4)
OTHER = LAYOUT._replace(reducer=2)


def train(
    *,
    passes: int,
    reduced: int,
    layouts: tuple[BucketLayout, ...] = (LAYOUT,),
    optimizers: int = 1,
    counted: int = 0,
    extra: int = 0,
    stepped_each: bool = False,
    copied_ms: int = 0,
) -> list[RankBuilder]:
    """Return two ranks whose passes take 20 ms, of which the last `reduced` of a step block for 12 ms more.

    Two thirds of the gradients are reduced in 8 ms, the rest in 4 ms; the optimizer takes 5 ms. `copied_ms`: DDP takes
    the gradients out of its buckets, after that.
    """
    ranks = [RankBuilder(i, world_size=2, features=("ddp",), bucket_layouts=layouts) for i in range(2)]
    for rank in ranks:
        t = 0
        for step in range(STEPS):
            for number in range(passes):
                rank.span("forward", t, t + 8 * MS)
                is_reduced = number >= passes - reduced
                rank.span("backward", t + 8 * MS, t + (32 + copied_ms if is_reduced else 20) * MS)
                t += 20 * MS
                for nbytes, took in zip(SIZES, (8 * MS, 4 * MS), strict=True) if is_reduced else ():
                    backward = rank.site("backward", line=7)
                    rank.op("all_reduce", t, t + took, nbytes=nbytes, site=backward, reduce_op="sum", dtype="float32")
                    t += took
                t += copied_ms * MS if is_reduced else 0
                if stepped_each and number < passes - 1:
                    rank.span("optimizer", t, t + 5 * MS)
                    t += 5 * MS
            backward = rank.site("backward", line=7)
            for _ in range(extra):  # as under Join, one number each
                rank.op("all_reduce", t, t + MS, nbytes=4, site=backward, reduce_op="sum", dtype="float32")
                t += MS
            for _ in range(optimizers):
                rank.span("optimizer", t, t + 5 * MS)
                t += 5 * MS
            if counted and step % counted == counted - 1:
                rank.span(events.STEP, t, t, step=step // counted + 2, microbatch=step // counted + 1)
            if counted:
                rank._step = (step + 1) // counted + 1  # as dtprof.step() has it
    return ranks


def found(ranks: list[RankBuilder]) -> tuple[RepeatedReductions, ...]:
    return summary_of(ranks).repeated_reductions


def summary_of(ranks: list[RankBuilder]) -> Summary:
    return summarise(MemoryRun(ranks))


def test_reductions_of_each_backward_pass_are_counted_and_all_but_the_last_could_go() -> None:
    summary = summary_of(train(passes=4, reduced=4))
    (row,) = summary.repeated_reductions
    assert (row.axis, row.reductions_per_step, row.bytes_per_step) == ("default_pg", 4, 4 * sum(SIZES))
    assert (row.exposed_ns_per_step, row.gain_ns_per_step) == (48 * MS, 36 * MS)
    assert row.line is not None
    assert row.line.line == 7
    text = " ".join(summary_text(summary).split())
    assert "DDP reduces each gradient 4 times a step over world" in text
    assert "blocks the program for 48.0 ms: no_sync() around all backward passes but the last leaves one" in text


@pytest.mark.parametrize(
    ("passes", "reduced", "more"),
    [
        (4, 1, {}),  # as with no_sync()
        (1, 1, {}),
        # Two models in turn: each reduces its own gradients in a backward pass of its own.
        (2, 2, {"layouts": (LAYOUT, OTHER)}),
        (3, 3, {"layouts": (LAYOUT, OTHER)}),
        (4, 4, {"layouts": ()}),  # nobody knows how many buckets there are
        (2, 2, {"stepped_each": True, "counted": 1}),  # an optimizer step between them
        (1, 1, {"extra": 2}),  # two reductions of one number beside those of two buckets
    ],
)
def test_gradients_that_are_reduced_once_or_perhaps_once_are_not_reported(
    passes: int, reduced: int, more: dict[str, object]
) -> None:
    assert found(train(passes=passes, reduced=reduced, **more)) == ()  # type: ignore[arg-type]


def test_two_optimizers_of_one_model_step_together_after_the_last_pass() -> None:
    (row,) = found(train(passes=2, reduced=2, optimizers=2))
    assert (row.reductions_per_step, row.gain_ns_per_step) == (2, 12 * MS)


@pytest.mark.parametrize("copied_ms", [0, 3])
def test_no_sync_makes_the_step_that_was_predicted(copied_ms: int, tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "before", train(passes=4, reduced=4, copied_ms=copied_ms)))
    engine = make_engine("local")
    (scenario,) = predict(run, engine, [parse_option("sync", "last")]).scenarios
    after = train(passes=4, reduced=1, copied_ms=copied_ms)
    truth = predict(open_run(write_run(tmp_path / "after", after)), engine)
    assert truth.measured_step_ns == pytest.approx((97 + copied_ms) * MS)
    assert scenario.step_ns == pytest.approx(truth.measured_step_ns, rel=1e-6)
    best = predict(run, engine).best
    assert best is not None
    assert best.fix == ("sync=last",)
    assert "sync=last" not in [scenario.fix[0] for scenario in truth.scenarios]
    (refused,) = predict(open_run(tmp_path / "after"), engine, [parse_option("sync", "last")]).scenarios
    assert "in no measured step does DDP reduce its gradients more than once" in refused.reason


def test_gradients_that_an_optimizer_takes_within_the_step_are_needed(tmp_path: Path) -> None:
    # The program counts a step for every two of the optimizer: dtprof.step().
    run = open_run(write_run(tmp_path, train(passes=1, reduced=1, counted=2)))
    assert summarise(run).steps.count == STEPS / 2
    assert summarise(run).repeated_reductions == ()
    (refused,) = predict(run, make_engine("local"), [parse_option("sync", "last")]).scenarios
    assert refused.step_ns is None
