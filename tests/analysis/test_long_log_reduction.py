"""Runs that are read by ranges of steps: every figure is that of the whole run, and memory does not grow with it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.map_reduce import long_log_reduction, long_log_survey
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.timeline.run_closeup import examine
from dtprof.analysis.whatif.advice import summarise_advised
from dtprof.analysis.whatif.prediction import Replayable
from dtprof.analysis.whatif.run_graph import read_graph
from dtprof.records.reader import Run, open_run
from tests import builders
from tests.analysis.test_device_figures import rank_of_a_device_bound_job
from tests.analysis.test_inferred_stages import GPIPE, ONE_F_ONE_B, Action, build
from tests.golden.commands import unpack
from tests.monitor.test_live_run import MS, STEP, two_ranks
from tests.synthetic import Job, generate

NUMBERED = (
    "ddp",
    "fsdp",
    "pipeline-tensor",
    "slow",
    "two-hosts",
    "python-hook",
    "restarted",
    "profiler-window",
    "hung",
)
"""Stored runs whose programs count steps."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Read every run by ranges of a few steps; return the ranges that were summed."""
    ranges: list[tuple[int, int]] = []
    real = long_log_reduction.reduce_range

    def note(task: Any) -> Any:
        ranges.append(task.measured.within)
        return real(task)

    for module, name, value in (
        (long_log_survey, "LONG_LOG", 1),
        (long_log_survey, "ROWS_AT_ONCE", 40),
        (long_log_reduction, "MOST_ROWS", 120),
        (long_log_reduction, "MIN_ROWS_EACH", 1),
        (long_log_reduction, "reduce_range", note),
    ):
        monkeypatch.setattr(module, name, value)
    return ranges


def differences(run: Path, ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """Return in what the summary by ranges differs from that of the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_log_survey, "LONG_LOG", 1 << 40)
        whole = summarise(open_run(run))
    assert not ranges
    found = summarise(open_run(run))
    names = [field.name for field in dataclasses.fields(Summary)]
    unlike = {name: (getattr(found, name), getattr(whole, name)) for name in names}
    return {name: pair for name, pair in unlike.items() if pair[0] != pair[1]}


@pytest.mark.parametrize("name", NUMBERED)
def test_stored_run_by_ranges_gives_its_summary_exactly(name: str, tmp_path: Path, tiny: list[tuple[int, int]]) -> None:
    unpack(f"runs/{name}", tmp_path)
    run = next(tmp_path.rglob("run.json")).parent
    assert differences(run, tiny) == {}
    assert len(tiny) >= 2  # else it was read at once


@pytest.mark.parametrize(
    "job",
    [
        Job(dp=4, tp=2, steps=40, jitter=0.02, slow={3: 1.4}),
        Job(dp=2, tp=2, pp=2, microbatches=3, steps=23, jitter=0.2),
        Job(dp=4, steps=30, jitter=0.1, ranks_per_host=2, overlapped=True),
        Job(dp=2, tp=2, steps=30, jitter=0.1, killed={1: 150}),
        Job(dp=4, steps=30, jitter=0.1, lost=frozenset({2})),
        Job(dp=2, steps=20, repeats=4),
    ],
    ids=["data-parallel", "pipeline", "two hosts", "a rank killed", "a rank lost", "repeated"],
)
def test_synthetic_job_by_ranges_gives_its_summary_exactly(
    job: Job, tmp_path: Path, tiny: list[tuple[int, int]]
) -> None:
    generate(tmp_path / "run", job)
    assert differences(tmp_path / "run", tiny) == {}
    assert len(tiny) >= 2


def test_what_lasts_for_many_steps_counts_in_all_of_them(tmp_path: Path, tiny: list[tuple[int, int]]) -> None:
    ranks = two_ranks(60)
    ranks[0].span("phase:epoch", 5 * STEP + MS, 55 * STEP + MS, step=5)
    ranks[1].span("checkpoint", 20 * STEP + MS, 30 * STEP + MS, step=20)
    run = builders.write_run(tmp_path / "run", ranks)
    assert differences(run, tiny) == {}
    assert len(tiny) >= 3
    first, second = summarise(open_run(run)).ranks
    assert first.user_phases_ns is not None
    assert first.user_phases_ns["epoch"] > 0
    assert second.phases_ns is not None
    assert second.phases_ns["checkpoint"] > 0


@pytest.mark.parametrize("actions", [GPIPE, ONE_F_ONE_B], ids=["GPipe", "1F1B"])
def test_pipeline_written_by_hand_is_inferred_from_ranges(
    actions: tuple[list[Action], ...], tmp_path: Path, tiny: list[tuple[int, int]]
) -> None:
    run = builders.write_run(tmp_path / "run", build(actions, steps=40))
    assert differences(run, tiny) == {}
    assert len(tiny) >= 2
    pipeline = summarise(open_run(run)).pipeline
    assert pipeline is not None
    assert pipeline.inferred


def without_leads(unlike: dict[str, Any]) -> list[Any]:
    """Return both sides without how far hosts are ahead of devices, which by ranges is a median of medians."""
    assert set(unlike) <= {"device", "ranks"}
    ranks = [[dataclasses.replace(rank, host_lead_ns=0) for rank in side] for side in unlike.get("ranks", ())]
    devices = [dataclasses.replace(side, host_lead_ns=0) for side in unlike.get("device", ())]
    return [both for both in (ranks, devices) if both]


@pytest.mark.parametrize("stored", ["", "runs/nccl-ddp"], ids=["built", "recorded"])
def test_times_of_a_device_by_ranges_are_those_of_the_whole_run(
    stored: str, tmp_path: Path, tiny: list[tuple[int, int]]
) -> None:
    if stored:
        unpack(stored, tmp_path)
        run = next(tmp_path.rglob("run.json")).parent
    else:
        ranks = [rank_of_a_device_bound_job(0, 0, 600, steps=60), rank_of_a_device_bound_job(1, 60, 580, steps=60)]
        run = builders.write_run(tmp_path / "run", ranks)
    for found, whole in without_leads(differences(run, tiny)):
        assert found == whole
    assert len(tiny) >= 3


def test_run_that_counts_no_steps_is_read_whole(tmp_path: Path, tiny: list[tuple[int, int]]) -> None:
    ranks = [builders.RankBuilder(number, 2) for number in range(2)]
    for i in range(200):
        for rank in ranks:
            rank.op("all_reduce", i * MS, i * MS + MS // 2)
    run = builders.write_run(tmp_path / "run", ranks)
    assert differences(run, tiny) == {}
    assert tiny == []


@pytest.mark.usefixtures("tiny")
def test_what_is_held_at_once_does_not_grow_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = Run.load_steps

    def note(run: Run, *arguments: Any) -> Any:
        read = real(run, *arguments)
        held.append(read.num_events)
        return read

    monkeypatch.setattr(Run, "load_steps", note)
    monkeypatch.setattr(Run, "load_each", None)  # reads ranks whole
    most = []
    for name, repeats in (("short", 2), ("long", 10)):
        generate(tmp_path / name, Job(dp=2, steps=20, repeats=repeats))
        held.clear()
        assert summarise(open_run(tmp_path / name)).steps.count == 20 * repeats
        most.append(max(held))
    assert most[0] == most[1] < 250


def test_advice_and_replay_by_ranges_are_those_of_the_whole_run(
    tmp_path: Path, tiny: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(tmp_path / "run", Job(dp=4, tp=2, steps=40, jitter=0.02, slow={3: 1.4}))
    found, graph = summarise_advised(open_run(tmp_path / "run")), read_graph(open_run(tmp_path / "run"))
    assert len(tiny) >= 2
    monkeypatch.setattr(long_log_survey, "LONG_LOG", 1 << 40)
    assert summarise_advised(open_run(tmp_path / "run")).advice == found.advice
    assert found.advice is not None
    whole = read_graph(open_run(tmp_path / "run"))
    assert isinstance(graph, Replayable)
    assert isinstance(whole, Replayable)
    assert graph.graph.steps == whole.graph.steps


def test_pages_of_a_long_run_draw_its_newest_steps_and_say_so(tmp_path: Path, tiny: list[tuple[int, int]]) -> None:
    run = builders.write_run(tmp_path / "run", two_ranks(60))
    summary, closeup = examine(open_run(run))
    first, last = tiny[-1]
    assert last == 60
    assert f"are those of the steps {first} to 60" in summary.cannot_tell[-1].reason
    assert closeup.tracks is not None
    assert len(closeup.tracks.tracks) == 2
    assert [group.group for group in closeup.traffic.lateness] == [group.group for group in summary.lateness]
