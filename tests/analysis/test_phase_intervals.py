"""Phases of a rank, with and without recorded forward spans."""

from dtprof.analysis.steps.phase_intervals import find_phases, find_user_phases
from dtprof.analysis.steps.step_boundaries import find_steps_of
from dtprof.job.valid_records import valid_spans
from tests.builders import START_NS, RankBuilder


def phases_of(builder: RankBuilder) -> dict[str, list[list[int]]]:
    tables = builder.tables()
    spans = valid_spans(tables.spans)
    found = find_phases(tables, spans, find_steps_of(tables))
    return {phase: (times - START_NS).tolist() for phase, times in found.items()}


def test_forward_is_inferred_from_the_end_of_the_data_to_the_begin_of_the_backward() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100):
        rank.span("data", begin + 5, begin + 10)
        rank.span("backward", begin + 40, begin + 60)
        rank.span("optimizer", begin + 60, begin + 70)
    assert phases_of(rank)["forward"] == [[10, 40], [110, 140]]


def test_forward_is_inferred_from_the_begin_of_the_step_where_nothing_else_is_recorded() -> None:
    # The first step has no begin, so its forward pass is not known; the second begins at 70.
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100):
        rank.span("backward", begin + 40, begin + 60)
        rank.span("optimizer", begin + 60, begin + 70)
    assert phases_of(rank)["forward"] == [[70, 140]]


def test_each_microbatch_has_its_inferred_forward() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("data", 0, 10)
    rank.span("backward", 20, 30)
    rank.span("data", 35, 40)
    rank.span("backward", 50, 60)
    rank.span("backward", 65, 70)
    rank.span("optimizer", 70, 80)
    assert phases_of(rank)["forward"] == [[10, 20], [40, 50], [60, 65]]


def test_a_recorded_forward_extends_over_the_loss_to_the_backward() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("forward", 10, 30)
    rank.span("backward", 40, 60)
    rank.span("optimizer", 60, 70)
    assert phases_of(rank)["forward"] == [[10, 40]]


def test_a_recorded_forward_does_not_extend_over_another_span() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("forward", 10, 30)
    rank.span("data", 32, 35)
    rank.span("backward", 40, 60)
    rank.span("optimizer", 60, 70)
    assert phases_of(rank)["forward"] == [[10, 30]]


def test_a_backward_inside_a_backward_counts_once() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("backward", 10, 60)
    rank.span("backward", 20, 30)
    rank.span("optimizer", 60, 70)
    assert phases_of(rank)["backward"] == [[10, 60]]


def test_spans_of_a_thread_that_runs_no_steps_are_skipped() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("checkpoint", 0, 1000, thread=2)
    rank.span("backward", 10, 60)
    rank.span("optimizer", 60, 70)
    assert phases_of(rank)["checkpoint"] == []


def test_a_forward_that_raised_is_skipped() -> None:
    # Its span ends when the next forward begins, long after it failed.
    rank = RankBuilder(0, world_size=1)
    rank.span("forward", 0, 100, state="failed")
    rank.span("forward", 100, 130)
    rank.span("backward", 130, 160)
    rank.span("optimizer", 160, 170)
    assert phases_of(rank)["forward"] == [[100, 130]]


def test_an_evaluation_between_data_and_backward_is_no_forward() -> None:
    # 10..25 evaluates; what follows up to the backward pass is inferred to be the forward pass.
    rank = RankBuilder(0, world_size=1)
    rank.span("data", 5, 10)
    rank.span("evaluation", 10, 25)
    rank.span("backward", 40, 60)
    rank.span("optimizer", 60, 70)
    phases = phases_of(rank)
    assert (phases["forward"], phases["evaluation"]) == ([[25, 40]], [[10, 25]])


def test_a_pause_between_forward_and_backward_does_not_end_the_loss() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("forward", 10, 30)
    rank.span("garbage_collection", 32, 35)
    rank.span("backward", 40, 60)
    rank.span("optimizer", 60, 70)
    assert phases_of(rank)["forward"] == [[10, 40]]


def test_phases_of_the_users_own_nest_and_repeat() -> None:
    # Two entries of "a" that overlap count once; "b" inside them counts for itself.
    rank = RankBuilder(0, world_size=1)
    rank.span("phase:a", 10, 30)
    rank.span("phase:a", 20, 40)
    rank.span("phase:b", 25, 35)
    rank.span("phase:c", 25, 35, thread=2)
    rank.span("backward", 40, 60)
    rank.span("optimizer", 60, 70)
    tables = rank.tables()
    spans = valid_spans(tables.spans)
    found = find_user_phases(tables, spans, find_steps_of(tables))
    assert {name: (times - START_NS).tolist() for name, times in found.items()} == {
        "a": [[10, 40]],
        "b": [[25, 35]],
        "c": [],
    }


def test_actions_of_a_pipeline_are_its_phases_and_waits_between_them_are_not() -> None:
    # The backward pass inside an action counts once; 30 to 40 waits for the gradient, so it is no loss.
    rank = RankBuilder(0, world_size=1)
    rank.span("pp_step", 0, 90)
    rank.span("pp_forward", 5, 20, stage=0, microbatch=0)
    rank.span("forward", 6, 19)
    rank.span("pp_forward", 20, 30, stage=0, microbatch=1)
    rank.span("pp_backward", 40, 60, stage=0, microbatch=0)
    rank.span("backward", 42, 58)
    rank.span("pp_backward_input", 70, 75, stage=0, microbatch=1)
    rank.span("pp_backward_weight", 80, 85, stage=0, microbatch=1)
    rank.span("pp_reduce_grad", 85, 90, stage=0, microbatch=-1)
    rank.span("optimizer", 90, 95)
    phases = phases_of(rank)
    assert phases["forward"] == [[5, 30]]
    assert phases["backward"] == [[40, 60], [70, 75], [80, 90]]


def test_a_step_whose_backward_is_seen_only_as_actions_of_a_pipeline_is_a_step() -> None:
    rank = RankBuilder(0, world_size=1)
    for begin in (0, 100, 200):
        rank.span("pp_forward", begin + 10, begin + 20, stage=0)
        rank.span("pp_backward", begin + 40, begin + 60, stage=0)
        rank.span("optimizer", begin + 60, begin + 70)
    tables = rank.tables()
    steps = find_steps_of(tables)
    assert (steps.windows - START_NS).tolist() == [[70, 170], [170, 270]]


def test_the_passes_of_a_closure_are_no_work_of_the_optimizer_that_runs_it() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("forward", 20, 30)
    rank.span("backward", 35, 60)
    rank.span("optimizer", 10, 80)
    found = phases_of(rank)
    assert found["forward"] == [[20, 35]]
    assert found["optimizer"] == [[10, 20], [60, 80]]


def test_an_optimizer_inside_the_backward_pass_is_an_optimizer() -> None:
    rank = RankBuilder(0, world_size=1)
    rank.span("forward", 0, 10)
    rank.span("backward", 10, 60)
    rank.span("optimizer", 30, 40)
    assert phases_of(rank)["optimizer"] == [[30, 40]]
