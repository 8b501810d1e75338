"""What the pages of a report show beyond the summary, against runs worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dtprof.analysis.communication.axis_collectives import sum_by_axis
from dtprof.analysis.pipeline.schedule_chart import LETTERS, lay_out
from dtprof.analysis.pipeline.schedule_plans import make_plan
from dtprof.analysis.pipeline.schedule_replay import FORWARD, Act, replay
from dtprof.analysis.results import Summary
from dtprof.analysis.timeline.run_closeup import Closeup, examine
from dtprof.analysis.timeline.run_tracks import COMMUNICATION, WORK, Track
from dtprof.records.tables import Action
from tests.analysis.test_bubbles import GPIPE, UNEVEN, WITH_MESSAGES, build
from tests.builders import MemoryRun, RankBuilder


def pair_of_ranks(*, steps: int = 4) -> list[RankBuilder]:
    """Return two ranks with steps of 1000: backward 100 to 900, an all_reduce that rank 1 enters 50 later, messages."""
    ranks = [RankBuilder(number, world_size=2) for number in range(2)]
    for step in range(steps):
        at = 1000 * step
        for rank, late in zip(ranks, (0, 50), strict=True):
            rank.span("backward", at + 100, at + 900)
            rank.op("all_reduce", at + 400 + late * 1000, at + 600 + late * 1000, nbytes=64, api="ddp")
            rank.span("optimizer", at + 900, at + 950)
            rank.sample("rss_bytes", at + 960, 1000 + 10 * step)
        ranks[0].op("send", at + 700, at + 710, nbytes=32, peer=1)
        ranks[1].op("recv", at + 700, at + 720, nbytes=32, peer=0)
    return ranks


def look(ranks: list[RankBuilder], *, max_bars: int = 1000) -> tuple[Summary, Closeup]:
    return examine(MemoryRun(ranks), max_bars=max_bars)


def lane(track: Track, number: int) -> list[tuple[int, int]]:
    """Return begin and length of the bars of a lane."""
    chosen = track.lane == number
    return list(zip(track.begin_ns[chosen].tolist(), track.length_ns[chosen].tolist(), strict=True))


def test_tracks_hold_every_phase_and_operation_on_one_clock() -> None:
    _, closeup = look(pair_of_ranks(steps=2))
    assert closeup.tracks is not None
    first = closeup.tracks.tracks[0]
    origin = closeup.tracks.origin_ns
    work = [(begin - origin, length) for begin, length in lane(first, WORK) if length in (800, 50)]
    assert work == [(0, 800), (800, 50), (1000, 800), (1800, 50)]  # backward from 100 on, optimizer
    assert [length for _, length in lane(first, COMMUNICATION)] == [200, 10, 200, 10]
    names = {closeup.tracks.names[name] for name in first.name[first.lane == COMMUNICATION].tolist()}
    assert names == {"all_reduce (ddp) of default_pg, 64 B", "send of default_pg, 32 B"}
    assert closeup.tracks.left_out == 0


def test_of_too_many_bars_the_longest_stay_and_the_rest_are_counted() -> None:
    _, closeup = look(pair_of_ranks(steps=40), max_bars=100)
    assert closeup.tracks is not None
    everything = look(pair_of_ranks(steps=40))[1].tracks
    assert everything is not None
    for kept, full in zip(closeup.tracks.tracks, everything.tracks, strict=True):
        assert len(kept.begin_ns) == 50
        assert kept.left_out == len(full.begin_ns) - 50
        assert kept.length_ns.min() >= sorted(full.length_ns.tolist())[-50]
        assert (kept.begin_ns[1:] >= kept.begin_ns[:-1]).all()


def test_messages_are_summed_by_pair() -> None:
    _, closeup = look(pair_of_ranks(steps=4))
    assert closeup.traffic.sent is not None
    assert closeup.traffic.sent.values.tolist() == [[0, 4 * 32], [0, 0]]


def test_lateness_is_the_time_from_the_first_to_the_last_arrival() -> None:
    # Rank 1 arrives 50,000 ns later, while steps are 1,000 apart: arrivals are compared by position.
    _, closeup = look(pair_of_ranks(steps=4))
    (group,) = closeup.traffic.lateness
    assert (group.group, group.ranks, group.count) == ("0", (0, 1), 4)
    assert group.spread_ns == (50_000, 50_000, 50_000, 50_000)
    assert group.last == {1: 4}
    assert (group.most_often_last, group.share_last) == (1, 1.0)


def test_a_pipeline_is_charted_as_it_ran_and_as_it_was_planned() -> None:
    ranks = build(WITH_MESSAGES)
    for number, rank in enumerate(ranks):
        order = [
            (Action(stage=number, name=name, microbatch=microbatch),)
            for name in ("pp_forward", "pp_backward")
            for microbatch in (0, 1)
        ]
        rank.pipelines[1] = replace(rank.pipelines[1], order=tuple(order))
    _, closeup = look(ranks)
    chart = closeup.pipeline
    assert chart is not None
    assert (chart.ranks, chart.stages, chart.measured_ns) == ((0, 1), ((0,), (1,)), 100)
    shown = [(one.rank, one.kind, one.microbatch, one.begin_ns, one.end_ns) for one in chart.measured]
    assert shown == [(rank, *action) for rank, actions in enumerate(WITH_MESSAGES) for action in actions]
    # Without messages GPipe takes 90, as in GPIPE.
    planned = sorted((one.rank, one.begin_ns, one.kind, one.microbatch, one.end_ns) for one in chart.planned)
    assert planned == sorted((rank, a[2], a[0], a[1], a[3]) for rank, actions in enumerate(GPIPE) for a in actions)
    assert chart.planned_ns == 90
    assert [dict(stage.mean_ns) for stage in chart.stage_times] == [{"F": 10, "B": 20}, {"F": 10, "B": 20}]


def test_more_microbatches_change_the_part_of_the_schedule_alone() -> None:
    # GPipe with p = 2: (p-1)/(m+p-1) = 1/3 with m = 2, 1/5 with 4, 1/9 with 8; interleaved 1/(2*2+1) = 1/5.
    _, closeup = look(build(GPIPE))
    assert closeup.pipeline is not None
    assert closeup.pipeline.changes.replay_error == pytest.approx(0)
    assert closeup.pipeline.changes.message_ns == 0
    changes = {change.what: change.bubble_fraction for change in closeup.pipeline.changes.found}
    assert changes == {
        "as it is: 2 microbatches": pytest.approx(1 / 3),
        "4 microbatches": pytest.approx(1 / 5),
        "8 microbatches": pytest.approx(1 / 9),
        "2 stages a rank, interleaved": pytest.approx(1 / 5),
    }
    best = closeup.pipeline.changes.best
    assert best is not None
    assert (best.what, best.other_fraction) == ("8 microbatches", pytest.approx(0))


def test_messages_are_replayed_as_long_as_they_were() -> None:
    # Messages of 5: the window is 100 where GPipe takes 90, and with m microbatches 30 (m + 1) + 10.
    _, closeup = look(build(WITH_MESSAGES))
    assert closeup.pipeline is not None
    changes = closeup.pipeline.changes
    assert changes.message_ns == 5
    assert changes.replay_error == pytest.approx(0, abs=1e-3)
    found = {change.what: change.bubble_fraction for change in changes.found}
    assert found["as it is: 2 microbatches"] == pytest.approx(1 - 60 / 100, abs=1e-3)
    assert found["4 microbatches"] == pytest.approx(1 - 120 / 160, abs=1e-3)
    assert found["8 microbatches"] == pytest.approx(1 - 240 / 280, abs=1e-3)


def test_stages_of_equal_time_lose_the_imbalance_when_replayed() -> None:
    # Stages take 30 and 60 a microbatch: the window is 150, of 45 each it would be 3 * 45.
    _, closeup = look(build(UNEVEN))
    assert closeup.pipeline is not None
    found = {change.what: change.bubble_fraction for change in closeup.pipeline.changes.found}
    assert found["stages of equal time"] == pytest.approx(1 - 180 / (2 * 135))


def test_where_ranks_do_not_act_by_their_schedule_the_formula_tells() -> None:
    swapped = [[WITH_MESSAGES[0][0], WITH_MESSAGES[0][1], ("B", 1, 60, 80), ("B", 0, 80, 100)], WITH_MESSAGES[1]]
    _, closeup = look(build(swapped))
    assert closeup.pipeline is not None
    changes = closeup.pipeline.changes
    assert (changes.replay_error, changes.message_ns) == (None, None)
    assert changes.found[1].schedule_fraction == pytest.approx(1 / 5)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 1, 4), (4, 1, 6), (2, 2, 4), (4, 2, 8), (3, 3, 6)])
def test_plans_have_the_bubble_of_their_formula(ranks: int, chunks: int, microbatches: int) -> None:
    names = ("GPipe", "1F1B") if chunks == 1 else ("Interleaved1F1B",)
    for name in names:
        plan = make_plan(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
        assert plan is not None
        took = np.array([[1.0 if act.kind == FORWARD else 2.0] for acts in plan for act in acts])
        bubble = replay(plan, took)
        assert bubble is not None
        assert bubble[0] == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))


def test_the_worst_rank_has_the_phases_of_its_steps() -> None:
    _, closeup = look(pair_of_ranks(steps=4))
    memory = closeup.memory
    assert memory.worst == 0
    assert memory.phases is not None
    assert memory.phases.first.tolist() == memory.phases.last.tolist() == [2, 3, 4]
    # Of each step of 1000 the backward pass takes 800 and the optimizer 50.
    assert memory.phases.mean_ns["backward"].tolist() == [800] * 3
    assert memory.phases.mean_ns["optimizer"].tolist() == [50] * 3


def test_a_plan_whose_actions_wait_for_each_other_is_not_laid_out() -> None:
    forward = next(kind for kind, letter in LETTERS.items() if letter == "F")
    assert lay_out([[Act(forward, 1, 0)]], {forward: 10}, [0]) == ()
    assert len(lay_out([[Act(forward, 0, 0), Act(forward, 1, 0)]], {forward: 10}, [0])) == 2


def test_communication_is_summed_by_axis_per_rank_and_step() -> None:
    ranks = [RankBuilder(number, world_size=2) for number in range(2)]
    for rank, late in zip(ranks, (0, 50), strict=True):
        group = rank.group("1", (0, 1), "mesh_dp")
        for step in range(5):
            at = 1000 * step
            rank.span("backward", at + 100, at + 500)
            rank.op("all_reduce", at + 600 + late, at + 700, nbytes=64, group=group)
            rank.span("optimizer", at + 900, at + 950)
    summary, _ = look(ranks)
    (axis,) = sum_by_axis(summary)
    # Rank 0 waits 50 and both see 50 of transfer: 25 and 50 a rank and step, all of it exposed.
    assert (axis.axis, axis.groups, axis.operations) == ("dp", 1, 1.0)
    assert (axis.wait_ns, axis.transfer_ns, axis.exposed_ns) == (25, 50, 75)


def test_a_run_with_nothing_in_it_has_nothing_to_look_at() -> None:
    summary, closeup = look([RankBuilder(0, world_size=1)])
    assert (closeup.tracks, closeup.pipeline, closeup.traffic.sent, closeup.traffic.lateness) == (None, None, None, ())
    assert sum_by_axis(summary) == ()
