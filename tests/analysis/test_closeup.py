"""What the pages of a report show beyond the summary, against runs worked out by hand."""

from dataclasses import replace

import pytest

from dtprof.analysis.closeup import Closeup, examine
from dtprof.analysis.pipeline_chart import LETTERS, lay_out
from dtprof.analysis.results import Summary
from dtprof.analysis.tracks import COMMUNICATION, WORK, Track
from dtprof.analysis.traffic import sum_by_axis
from dtprof.tables import Action
from tests.analysis.test_pipeline_bubbles import GPIPE, WITH_MESSAGES, build
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
    assert closeup.traffic.sent.tolist() == [[0, 4 * 32], [0, 0]]


def test_lateness_is_the_time_from_the_first_to_the_last_arrival() -> None:
    # Rank 1 arrives 50,000 ns later, while steps are 1,000 apart: arrivals are compared by position.
    _, closeup = look(pair_of_ranks(steps=4))
    (group,) = closeup.traffic.lateness
    assert (group.group, group.ranks, group.count) == ("0", (0, 1), 4)
    assert group.spread_ns == (50_000, 50_000, 50_000, 50_000)
    assert group.last == {1: 4}


def test_memory_that_grows_has_the_slope_of_its_later_half() -> None:
    ranks = [RankBuilder(0, world_size=1)]
    for step in range(10):
        at = 1000 * step
        ranks[0].span("backward", at + 100, at + 900)
        ranks[0].span("optimizer", at + 900, at + 950)
        ranks[0].sample("rss_bytes", at + 960, 5000 if step < 4 else 1000 + 10 * step)
    own = look(ranks)[1].memory.ranks[0]
    assert own.total == "rss_bytes"
    assert own.growth_bytes_per_step == pytest.approx(10)
    assert own.courses["rss_bytes"].value.tolist() == [5000] * 4 + [1000 + 10 * step for step in range(4, 10)]


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
    changes = {change.what: change.bubble_fraction for change in closeup.pipeline.changes}
    assert changes == {
        "as it is: 2 microbatches": pytest.approx(1 / 3),
        "4 microbatches": pytest.approx(1 / 5),
        "8 microbatches": pytest.approx(1 / 9),
        "2 stages a rank, interleaved": pytest.approx(1 / 5),
    }


def test_a_plan_whose_actions_wait_for_each_other_is_not_laid_out() -> None:
    forward = next(kind for kind, letter in LETTERS.items() if letter == "F")
    assert lay_out([[(0, forward, 1, 0)]], {forward: 10}, {0: 0}) == ()
    assert len(lay_out([[(0, forward, 0, 0), (0, forward, 1, 0)]], {forward: 10}, {0: 0})) == 2


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
