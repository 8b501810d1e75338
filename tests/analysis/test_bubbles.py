"""Bubbles of pipelines, against schedules worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dtprof.analysis.caveats import condense_caveats
from dtprof.analysis.comparison.comparison_series import JOB, RANKS, Figure, measure_run
from dtprof.analysis.comparison.run_comparison import compare_runs
from dtprof.analysis.comparison.thresholds import Threshold, check_threshold
from dtprof.analysis.pipeline.bubbles import theory_fraction
from dtprof.analysis.results import PipelineResult, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.tables import Pipeline
from tests.builders import MemoryRun, RankBuilder

PERIOD = 1000
NUM_STEPS = 6
Action = tuple[str, int, int, int]
"""Kind, microbatch, begin and end within the step; the stage is that of the rank."""

# Two stages, two microbatches, forward 10, backward 20, messages free: each rank idles 30 of 90.
GPIPE = (
    [("F", 0, 0, 10), ("F", 1, 10, 20), ("B", 0, 50, 70), ("B", 1, 70, 90)],
    [("F", 0, 10, 20), ("F", 1, 20, 30), ("B", 0, 30, 50), ("B", 1, 50, 70)],
)
# The same with messages that take 5.
WITH_MESSAGES = (
    [("F", 0, 0, 10), ("F", 1, 10, 20), ("B", 0, 60, 80), ("B", 1, 80, 100)],
    [("F", 0, 15, 25), ("F", 1, 25, 35), ("B", 0, 35, 55), ("B", 1, 55, 75)],
)
# A second stage that takes twice as long.
UNEVEN = (
    [("F", 0, 0, 10), ("F", 1, 10, 20), ("B", 0, 90, 110), ("B", 1, 130, 150)],
    [("F", 0, 10, 30), ("F", 1, 30, 50), ("B", 0, 50, 90), ("B", 1, 90, 130)],
)
NAMES = {"F": "pp_forward", "B": "pp_backward"}


def build(
    ranks: Sequence[Sequence[Action]],
    *,
    without: tuple[int, int] = (-1, -1),
    optimizers: Sequence[tuple[int, int]] = ((210, 220), (210, 220)),
    **options: str,
) -> list[RankBuilder]:
    """Return ranks that repeat these actions in each step; `without` is a rank and a step that lack them.

    `optimizers` are the begin and end of the optimizer of each rank, within the step.
    """
    builders = []
    for number, actions in enumerate(ranks):
        rank = RankBuilder(number, world_size=len(ranks), **({} if number == 0 else options))  # type: ignore[arg-type]
        rank.pipelines[1] = Pipeline(
            schedule="ScheduleGPipe",
            num_stages=len(ranks),
            stages=(number,),
            num_microbatches=2,
            group="0",
            group_rank=number,
            group_size=len(ranks),
        )
        for step in range(NUM_STEPS):
            at = step * PERIOD
            rank.span("pp_step", at, at + 200, microbatch=1)
            for kind, microbatch, begin, end in actions:
                if (number, step) != without:
                    rank.span(NAMES[kind], at + begin, at + end, stage=number, microbatch=microbatch)
                if kind == "B":
                    rank.span("backward", at + begin, at + end)
            begin, end = optimizers[number]
            rank.span("optimizer", at + begin, at + end)
        builders.append(rank)
    return builders


def summary_of(ranks: Sequence[Sequence[Action]], **options: str) -> Summary:
    return summarise(MemoryRun(build(ranks, **options)))


def result_of(summary: Summary) -> PipelineResult:
    assert summary.pipeline is not None
    return summary.pipeline


def test_an_even_gpipe_has_the_bubble_of_theory_and_nothing_else() -> None:
    result = result_of(summary_of(GPIPE))
    assert (result.schedule, result.stages, result.ranks, result.microbatches) == ("GPipe", 2, 2, 2)
    assert result.bubble_fraction == pytest.approx(1 / 3)
    assert result.theory_fraction == pytest.approx(1 / 3)
    assert result.parts == pytest.approx({"schedule": 1 / 3, "imbalance": 0, "exposed_p2p": 0, "jitter": 0})
    assert [(one.rank, one.bubble_ns) for one in result.per_rank] == [(0, 30), (1, 30)]


def test_bubbles_belong_to_the_action_that_a_rank_waits_to_begin() -> None:
    # Rank 0 idles from 20 to 50 before the first backward; rank 1 until 10 before its first forward, and after 70.
    result = result_of(summary_of(GPIPE))
    found = {(one.stage, one.microbatch): one.bubble_ns for one in result.per_action}
    assert found == {(0, None): 0, (0, 0): 30, (0, 1): 0, (1, None): 20, (1, 0): 10, (1, 1): 0}
    first = next(one for one in result.per_action if (one.stage, one.microbatch) == (0, 0))
    assert (first.forward_ns, first.backward_ns, first.weight_ns) == (10, 20, 0)
    assert [(one.stage, one.forward_ns, one.backward_ns, one.bubble_ns) for one in result.per_stage] == [
        (0, 20, 40, 30),
        (1, 20, 40, 30),
    ]


def test_each_step_has_its_window_and_bubble() -> None:
    result = result_of(summary_of(WITH_MESSAGES))
    assert result.per_step  # each is busy 60 of 100 on both ranks
    assert {(one.window_ns, round(one.bubble_fraction, 9)) for one in result.per_step} == {(100, 0.4)}


def test_bubbles_are_distinguished_by_when_they_are() -> None:
    # Rank 0 idles from 20 to 50, after its last forward; rank 1 until 10, and from 70 to the end of the window at 90.
    assert result_of(summary_of(GPIPE)).by_time == pytest.approx({"warm_up": 10 / 180, "steady": 0, "drain": 50 / 180})
    # 1F1B, forward 10, backward 20, three microbatches. Rank 0 waits from 20 to 40 for its first gradient and after its
    # last forward from 90 to 100; rank 1 until 10, and from 100 until rank 0 is done at 120.
    one_f_one_b = (
        [("F", 0, 0, 10), ("F", 1, 10, 20), ("B", 0, 40, 60), ("F", 2, 60, 70), ("B", 1, 70, 90), ("B", 2, 100, 120)],
        [("F", 0, 10, 20), ("B", 0, 20, 40), ("F", 1, 40, 50), ("B", 1, 50, 70), ("F", 2, 70, 80), ("B", 2, 80, 100)],
    )
    assert result_of(summary_of(one_f_one_b)).by_time == pytest.approx(
        {"warm_up": (20 + 10) / 240, "steady": 0, "drain": (10 + 20) / 240}
    )


@pytest.mark.parametrize(
    ("schedule", "offered", "advice"),
    [
        ("ScheduleGPipe", None, "8 microbatches or more, or an interleaved or zero-bubble schedule"),
        ("1F1B", ("1F1B", "Interleaved1F1B"), "8 microbatches or more, or an interleaved schedule"),
        ("Interleaved1F1B", ("1F1B", "Interleaved1F1B"), "8 microbatches or more, or more stages a rank"),
        ("1F1B", ("1F1B",), "8 microbatches or more"),
        (
            "ScheduleInterleaved1F1B", None,
            "8 microbatches or more, more stages a rank, or a zero-bubble schedule",
        ),
        ("ScheduleInterleavedZeroBubble", None, "8 microbatches or more"),
    ],
)  # fmt: skip
def test_advice_names_no_schedule_that_the_framework_does_not_have(
    schedule: str, offered: tuple[str, ...] | None, advice: str
) -> None:
    ranks = build(GPIPE)
    for rank in ranks:
        rank.pipelines[1] = replace(rank.pipelines[1], schedule=schedule, offered=offered)
    assert result_of(summarise(MemoryRun(ranks))).advice == advice


def test_advice_follows_the_largest_part() -> None:
    assert result_of(summary_of(GPIPE)).advice == "8 microbatches or more, or an interleaved or zero-bubble schedule"
    slow_messages = (
        [("F", 0, 0, 5), ("F", 1, 5, 10), ("B", 0, 150, 160), ("B", 1, 160, 170)],
        [("F", 0, 70, 75), ("F", 1, 75, 80), ("B", 0, 80, 90), ("B", 1, 90, 100)],
    )
    assert result_of(summary_of(slow_messages)).advice == "faster links between stages, or smaller messages"
    # Six microbatches, forward 2 and backward 4 on rank 0, five times that on rank 1.
    much_uneven = (
        [("F", i, 2 * i, 2 * i + 2) for i in range(6)] + [("B", i, 82 + 20 * i, 86 + 20 * i) for i in range(6)],
        [("F", i, 2 + 10 * i, 12 + 10 * i) for i in range(6)] + [("B", i, 62 + 20 * i, 82 + 20 * i) for i in range(6)],
    )
    assert "those of rank 1 take longest" in (result_of(summary_of(much_uneven)).advice or "")


def test_messages_show_as_exposed_point_to_point() -> None:
    result = result_of(summary_of(WITH_MESSAGES))
    # Each rank is busy 60 of a window of 100.
    assert result.bubble_fraction == pytest.approx(0.4)
    assert result.parts == pytest.approx({"schedule": 1 / 3, "imbalance": 0, "exposed_p2p": 0.4 - 1 / 3, "jitter": 0})


def test_a_slow_stage_shows_as_imbalance() -> None:
    result = result_of(summary_of(UNEVEN))
    # Busy 60 and 120 of a window of 150.
    assert result.bubble_fraction == pytest.approx(0.4)
    assert result.parts == pytest.approx({"schedule": 1 / 3, "imbalance": 0.4 - 1 / 3, "exposed_p2p": 0, "jitter": 0})
    assert [one.bubble_ns for one in result.per_rank] == [90, 30]


def test_bubbles_are_a_part_of_the_step_and_the_parts_still_sum() -> None:
    for rank in summary_of(GPIPE).ranks:
        assert rank.partition_ns is not None
        assert rank.partition_ns["bubble"] == 30
        assert sum(filter(None, rank.partition_ns.values())) == rank.step_ns


def test_what_a_stage_does_for_itself_while_others_compute_is_no_bubble() -> None:
    # Rank 0 loads data from 22 to 40, where it waits for its first gradient. Rank 1 is done at 70 and steps its
    # optimizer from 72 to 90, where the window ends. Of the 30 each that the window has beyond their actions, 18 are
    # data or optimizer: what remains is the bubble.
    ranks = build(GPIPE, optimizers=((210, 220), (72, 90)))
    for step in range(NUM_STEPS):
        ranks[0].span("data", step * PERIOD + 22, step * PERIOD + 40)
    summary = summarise(MemoryRun(ranks))
    parts = [rank.partition_ns or {} for rank in summary.ranks]
    assert [(part["bubble"], part["data"], part["optimizer"]) for part in parts] == [(12, 18, 10), (12, 0, 18)]
    assert [sum(filter(None, part.values())) for part in parts] == [rank.step_ns for rank in summary.ranks]
    assert [one.bubble_ns for one in result_of(summary).per_rank] == [30, 30]


def test_a_rank_that_is_missing_leaves_the_bubble_unknown() -> None:
    summary = summarise(MemoryRun(build(GPIPE)[:1]))
    assert summary.pipeline is None
    assert [caveat for caveat in summary.cannot_tell if caveat.startswith("pipeline")] == [
        "pipeline: the bubble of rank 0 is not known, its time is in exposed_wait, host or idle: "
        "a rank of the pipeline, or aligned clocks of its hosts, are missing"
    ]
    assert_only_the_bubble_is_unknown(summary)


def test_hosts_whose_clocks_are_not_aligned_leave_the_bubble_unknown() -> None:
    summary = summary_of(GPIPE, boot_id="another")
    assert summary.pipeline is None
    assert any("aligned clocks of its hosts, are missing" in caveat for caveat in summary.cannot_tell)
    assert_only_the_bubble_is_unknown(summary)


def test_a_used_step_in_which_a_rank_did_not_act_leaves_the_bubble_unknown() -> None:
    # Rank 1 recorded no action in the last step, where rank 0 waited for it all the same.
    assert_only_the_bubble_is_unknown(summarise(MemoryRun(build(GPIPE, without=(1, NUM_STEPS - 1)))))


def assert_only_the_bubble_is_unknown(summary: Summary) -> None:
    for rank in summary.ranks:
        assert rank.partition_ns is not None
        assert [part for part, ns in rank.partition_ns.items() if ns is None] == ["bubble"]
        assert sum(ns for ns in rank.partition_ns.values() if ns is not None) == rank.step_ns


def test_a_bubble_that_one_run_does_not_know_is_not_compared() -> None:
    # Of the bubble of 30 of the first run nothing is known in the second: it is not smaller there.
    known, unknown = MemoryRun(build(GPIPE)), MemoryRun(build(GPIPE, boot_id="another"))
    result = compare_runs(measure_run(known), measure_run(unknown))
    told = {(c.figure.table, c.figure.rank, c.figure.name): c for c in result.changes}
    for table, rank in ((JOB, -1), (RANKS, 0), (RANKS, 1)):
        bubble = told[table, rank, "bubble_ns"]
        assert (bubble.a, bubble.b, bubble.difference, bubble.verdict) == (30, None, None, "unknown")
        assert bubble.reason.startswith("B: a rank of the pipeline, or aligned clocks of its hosts, are missing")
        assert told[table, rank, "host_ns"].reason == "B: the bubble, which is not known, is in it"
    assert (told[JOB, -1, "bubble_fraction"].b, told[JOB, -1, "bubble_fraction"].verdict) == (None, "unknown")
    assert told[JOB, -1, "step_ns"].difference == 0


def test_bubbles_that_both_runs_know_are_compared() -> None:
    run = MemoryRun(build(GPIPE))
    (bubble,) = [
        c for c in compare_runs(measure_run(run), measure_run(run)).changes if c.figure == Figure(JOB, "bubble_ns")
    ]
    assert (bubble.a, bubble.b, bubble.difference) == (30, 30, 0)


def test_actions_that_cannot_be_replayed_leave_the_parts_unknown() -> None:
    lost = [action for action in GPIPE[0] if action[:2] != ("F", 1)]
    result = result_of(summary_of((lost, GPIPE[1])))
    assert result.parts is None
    assert result.bubble_fraction > 1 / 3


def by_hand(axis: str, op: str) -> list[RankBuilder]:
    """Return two ranks that compute 40 of each step of 100 and exchange something over a group for 10."""
    ranks = [RankBuilder(number, world_size=2) for number in range(2)]
    for rank in ranks:
        group = rank.group("1", (0, 1), axis)
        for step in range(NUM_STEPS):
            at = step * 100
            peer = {"peer": 1 - rank.rank} if op != "all_reduce" else {}
            rank.op(op if op == "all_reduce" or rank.rank else "recv", at, at + 10, group=group, **peer)
            rank.span("backward", at + 10, at + 50)
            rank.span("optimizer", at + 80, at + 90)
    return ranks


@pytest.mark.parametrize(
    ("axis", "op", "is_known"),
    [
        ("mesh_pp", "all_reduce", False),  # a group of the axis pp: its ranks are stages
        ("undefined", "send", False),  # messages within steps, in a group whose axis nobody names
        ("mesh_pp", "send", False),
        ("mesh_cp", "send", True),  # ring attention
        ("mesh_dp", "all_reduce", True),
        ("undefined", "all_reduce", True),
    ],
)
def test_a_pipeline_written_by_hand_leaves_the_bubble_unknown(axis: str, op: str, is_known: bool) -> None:
    summary = summarise(MemoryRun(by_hand(axis, op)))
    assert summary.pipeline is None
    (why,) = (caveat for caveat in summary.cannot_tell if caveat.startswith("pipeline: "))
    if is_known:
        assert why not in map(str, condense_caveats(summary.cannot_tell))
        assert [(rank.partition_ns or {})["bubble"] for rank in summary.ranks] == [0, 0]
    else:
        assert why in map(str, condense_caveats(summary.cannot_tell))
        assert why.startswith("pipeline: the bubble of ranks 0, 1 is not known")
        assert_only_the_bubble_is_unknown(summary)
        assert summary.part_shares is not None
        assert summary.part_shares["bubble"] is None


def test_limits_and_comparisons_cannot_tell_the_bubble_of_a_pipeline_written_by_hand() -> None:
    figures = measure_run(MemoryRun(by_hand("mesh_pp", "send")))
    limit = Threshold(option="--max-bubble 25%", figure="bubble_fraction", bound=0.25)
    judged = check_threshold(limit, figures)
    assert (judged.outcome, judged.measured) == ("unknown", None)
    assert judged.reason.startswith("a pipeline written by hand may run there")
    told = {c.figure: c for c in compare_runs(figures, figures).changes}
    for figure in (Figure(JOB, "bubble_ns"), Figure(RANKS, "bubble_ns", rank=0), Figure(JOB, "bubble_fraction")):
        assert (told[figure].a, told[figure].b, told[figure].verdict) == (None, None, "unknown")
    assert figures.exposed_fraction is not None
    beyond = Threshold(option="--max-exposed 1%", figure="exposed_fraction", bound=0.01)
    assert check_threshold(beyond, figures).outcome == "unknown"  # what is exposed may be a bubble


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [
        ("ScheduleGPipe", 4, 3 / 11),
        ("Schedule1F1B", 4, 3 / 11),
        ("ScheduleInterleaved1F1B", 8, 3 / 19),
        ("ScheduleLoopedBFS", 8, 3 / 19),
        ("ScheduleZBVZeroBubble", 8, 0.0),
        ("ScheduleDualPipeV", 8, None),
        ("ScheduleInterleavedZeroBubble", 8, None),
    ],
)
def test_theory_by_schedule(schedule: str, stages: int, expected: float | None) -> None:
    pipeline = Pipeline(schedule=schedule, num_stages=stages, stages=(0,), num_microbatches=8, group_size=4)
    assert theory_fraction(pipeline) == (None if expected is None else pytest.approx(expected))
