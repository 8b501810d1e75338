"""Pipeline schedules of torch: every action once, in the order of the plan; every message under one label."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dtprof.records import events
from dtprof.records.reader import open_run
from dtprof.records.tables import Action, Pipeline, RankTables
from tests import jobs

F, B = events.PP_FORWARD, events.PP_BACKWARD
BACKWARD_INPUT, WEIGHT = events.PP_BACKWARD_INPUT, events.PP_BACKWARD_WEIGHT
COMPUTED = {F, B, BACKWARD_INPUT, WEIGHT}
STEPS = 2
SPLIT = {"ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"}
EITHER = {"ScheduleDualPipeV"}
LOCAL_TURN = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}
ORDER_BY_HAND = {  # of rank 0 and the last, two ranks and four microbatches
    "ScheduleGPipe": ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"),
    "Schedule1F1B": ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
}


def spans_within(tables: RankTables, step: np.void) -> list[tuple[Action, int]]:
    """Return what was computed in a step, in its order, and how long, as recorded."""
    spans = tables.spans
    inside = (spans["begin_ns"] >= step["begin_ns"]) & (spans["begin_ns"] < step["end_ns"])
    return [
        (Action(stage=row["stage"], name=tables.ops[row["op"]], microbatch=row["microbatch"]), int(row["end_ns"]))
        for row in spans[inside & (spans["stage"] >= 0)]
    ]


def steps_of(tables: RankTables, name: str, plan: int) -> np.ndarray:
    names = np.array(tables.ops)[tables.spans["op"]]
    return tables.spans[(names == name) & (tables.spans["microbatch"] == plan) & (tables.spans["stage"] == -1)]


def required(pipeline: Pipeline) -> Counter[tuple[int, str, int]]:
    """Return what a rank must have computed in a step."""
    kinds = [F, BACKWARD_INPUT, WEIGHT] if pipeline.schedule in SPLIT else [F, B]
    return Counter(
        (stage, kind, microbatch)
        for stage in pipeline.stages
        for kind in kinds
        for microbatch in range(pipeline.num_microbatches)
    )


def joined(actions: list[Action]) -> Counter[tuple[int, str, int]]:
    """Count actions, taking a backward in two parts for a whole one."""
    found = Counter((a.stage, a.name, a.microbatch) for a in actions if a.name in COMPUTED)
    inputs = [(a.stage, B, a.microbatch) for a in actions if a.name == BACKWARD_INPUT]
    weights = [(a.stage, B, a.microbatch) for a in actions if a.name == WEIGHT]
    assert sorted(inputs) == sorted(weights)
    return Counter({key: n for key, n in found.items() if key[1] in (F, B)}) + Counter(inputs)


def messages_of(tables: RankTables, step: np.void) -> list[tuple[str, int, int, int]]:
    """Return operation, stage, microbatch and the peer of every message in a step; all of them are labelled."""
    rows = tables.operations
    inside = rows[(rows["issued_ns"] >= step["begin_ns"]) & (rows["issued_ns"] < step["end_ns"])]
    found = []
    for row in inside:
        label = tables.sites[int(row["site"])].label
        assert label is not None
        assert label.api == "pp"
        if label.stage < 0:
            assert label.text == "pp set-up of stages"
            continue
        direction = label.text.split()[1]
        assert label.text == f"pp {direction} of stage {label.stage}, microbatch {label.microbatch}"
        found.append((tables.ops[row["op"]], direction, label.stage, label.microbatch, int(row["peer"])))
    return found


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "options"),
    [(2, 4, ()), pytest.param(4, 8, ("--no-native",), marks=pytest.mark.thorough)],
)
def test_actions_and_messages_follow_the_plan(
    tmp_path: Path, num_ranks: int, num_microbatches: int, options: tuple[str, ...]
) -> None:
    command = jobs.forked(num_ranks, jobs.PROGRAMS / "pipelines.py", str(num_microbatches))
    jobs.recorded(tmp_path / "run", command, *options)
    ranks = list(open_run(tmp_path / "run").load_all())
    assert [tables.problems for tables in ranks] == [()] * num_ranks
    assert [tables.notes for tables in ranks] == [()] * num_ranks

    assert {len(tables.pipelines) for tables in ranks} == {7}
    for plan in ranks[0].pipelines:
        pipelines = [tables.pipelines[plan] for tables in ranks]
        schedule = pipelines[0].schedule
        assert sorted(stage for one in pipelines for stage in one.stages) == list(range(pipelines[0].num_stages))
        assert {one.num_microbatches for one in pipelines} == {num_microbatches}
        assert [one.group_rank for one in pipelines] == list(range(num_ranks))
        messages = []
        for tables, pipeline in zip(ranks, pipelines, strict=True):
            steps = steps_of(tables, events.PP_STEP, plan)
            assert len(steps) == STEPS
            messages.append([messages_of(tables, step) for step in steps])
            for step in steps:
                spans = spans_within(tables, step)
                actions = [action for action, _ in spans]
                check_actions(pipeline, actions)
                by_hand = ORDER_BY_HAND.get(schedule)
                if by_hand and num_ranks == 2:
                    letter = {F: "F", B: "B"}
                    seen = [f"{letter[a.name]}{a.microbatch}" for a in actions if a.name in letter]
                    assert " ".join(seen) == by_hand[pipeline.group_rank]
        for number in range(STEPS):
            check_messages(schedule, pipelines, [of_rank[number] for of_rank in messages])

    for tables in ranks:
        (evaluation,) = steps_of(tables, events.PP_EVALUATION, 1)
        actions = [action for action, _ in spans_within(tables, evaluation)]
        assert {a.name for a in actions} <= {F, events.PP_LOSS, events.PP_REDUCE_GRAD}
        assert [a.microbatch for a in actions if a.name == F] == list(range(num_microbatches))
        assert tables.groups[0].axis == "pp"
        assert tables.coordinates == {"pp": tables.rank}


def check_actions(pipeline: Pipeline, actions: list[Action]) -> None:
    assert pipeline.order is not None
    if pipeline.schedule in SPLIT:
        assert Counter((a.stage, a.name, a.microbatch) for a in actions if a.name in COMPUTED) == required(pipeline)
    else:
        assert joined(actions) == required(pipeline)
        assert pipeline.schedule in EITHER or {a.name for a in actions} & {BACKWARD_INPUT, WEIGHT} == set()
    planned = [action for slot in pipeline.order for action in slot if action.name in COMPUTED]
    assert [action for action in actions if action.name in COMPUTED] == planned
    losses = [action.microbatch for action in actions if action.name == events.PP_LOSS]
    has_last = pipeline.num_stages - 1 in pipeline.stages
    assert losses == (list(range(pipeline.num_microbatches)) if has_last else [])
    reduced = [action.stage for action in actions if action.name == events.PP_REDUCE_GRAD]
    assert sorted(reduced) == sorted(pipeline.stages)


def check_messages(
    schedule: str, pipelines: list[Pipeline], by_rank: list[list[tuple[str, str, int, int, int]]]
) -> None:
    """Every output and every input gradient that goes to another rank is sent once and received once, by its peer."""
    owner = {stage: rank for rank, one in enumerate(pipelines) for stage in one.stages}
    last = pipelines[0].num_stages - 1
    expected = Counter(
        (direction, stage, microbatch, owner[stage], owner[to])
        for direction, hop in (("forward", 1), ("backward", -1))
        for stage in range(last + 1)
        for microbatch in range(pipelines[0].num_microbatches)
        if 0 <= (to := stage + hop) <= last and owner[stage] != owner[to]
    )
    num_hops = last - (1 if schedule in LOCAL_TURN else 0)
    assert expected.total() == 2 * num_hops * pipelines[0].num_microbatches
    sent, received = Counter(), Counter()
    for rank, messages in enumerate(by_rank):
        for op, direction, stage, microbatch, peer in messages:
            if op == "send":
                sent[direction, stage, microbatch, rank, peer] += 1
            else:
                received[direction, stage, microbatch, peer, rank] += 1
    assert sent == received == expected


@pytest.mark.jobs
@pytest.mark.thorough
def test_stages_of_several_ranks_reduce_under_the_label_of_their_framework(tmp_path: Path) -> None:
    jobs.recorded(
        tmp_path / "run",
        jobs.forked(4, jobs.PROGRAMS / "pipeline_of_replicas.py"),
        env={"PYTHONWARNINGS": "ignore"},
    )
    for tables in open_run(tmp_path / "run").load_all():
        assert (tables.problems, tables.notes) == ((), ())
        assert tables.coordinates == {"pp": tables.rank // 2, "dp": tables.rank % 2}
        assert {pipeline.stages for pipeline in tables.pipelines.values()} == {(tables.rank // 2,)}
        pipe = next(group.name for group in tables.groups.values() if group.axis == "pp")
        assert {pipeline.group for pipeline in tables.pipelines.values()} == {pipe}
        reduces = [row for row in tables.operations if tables.ops[row["op"]] in ("all_reduce", "reduce_scatter")]
        labels = [tables.sites[int(row["site"])].label for row in reduces]
        texts = [label.text for label in labels if label is not None]
        assert texts == ["ddp bucket 0, 0.00104 MiB"] * 2 + ["fsdp reduce-scatter of the root module"] * 2
        assert {tables.groups[int(row["group"])].axis for row in reduces} == {"dp"}
        # FSDP reduces once a step, after the last backward pass of the stage.
        after = tables.spans[np.array(tables.ops)[tables.spans["op"]] == events.PP_REDUCE_GRAD]
        for row in reduces[2:]:
            assert ((after["begin_ns"] <= row["issued_ns"]) & (row["issued_ns"] < after["end_ns"])).sum() == 1
