"""Advice of a summary: the change that was predicted to gain most, or why none is named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.whatif import advice as advice_module
from dtprof.analysis.whatif.advice import state_advice, summarise_advised, summarise_closely
from dtprof.analysis.whatif.prediction import Prediction, Scenario
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import open_run
from dtprof.report.text.summary_text import summary_text
from dtprof.report.wording import advice_words
from tests.builders import MemoryRun, RankBuilder
from tests.report.example_summaries import empty_summary
from tests.synthetic import Job, generate

JOB = Job(dp=4, steps=10, jitter=0.02)


def advised(folder: Path, job: Job) -> Summary:
    generate(folder, job)
    return summarise_advised(open_run(folder))


def test_a_slow_rank_is_named_with_the_gain_that_its_repair_has(tmp_path: Path) -> None:
    slow = advised(tmp_path / "slow", replace(JOB, slow={2: 1.3}))
    sound = advised(tmp_path / "sound", JOB)
    assert slow.advice is not None
    assert slow.steps.duration_ns is not None
    assert sound.steps.duration_ns is not None
    assert slow.advice.fix == ("rank=2",)
    truth = 1 - sound.steps.duration_ns.median / slow.steps.duration_ns.median
    assert slow.advice.gain == pytest.approx(truth, abs=0.01)
    assert slow.advice.interval is not None
    assert slow.advice.interval[0] <= truth <= slow.advice.interval[1]
    assert "advice      rank 2 as fast as the others: " in summary_text(slow)


def test_all_else_of_the_summary_is_as_without_advice(tmp_path: Path) -> None:
    generate(tmp_path, replace(JOB, dp=1, pp=4, microbatches=4, slow={1: 1.2}))
    run = open_run(tmp_path)
    assert replace(summarise_advised(run), advice=None) == summarise(run)


def test_a_pipeline_that_idles_is_told_what_makes_it_shorter(tmp_path: Path) -> None:
    found = advised(tmp_path, replace(JOB, dp=1, pp=4, microbatches=4)).advice
    assert found is not None
    assert found.fix[0].split("=")[0] in ("microbatches", "schedule")
    assert found.gain is not None
    assert found.gain > 0.05


def test_a_job_in_which_nothing_gains_gets_no_advice(tmp_path: Path) -> None:
    found = advised(tmp_path, replace(JOB, dp=1, layers=40)).advice
    assert found is not None
    assert found.fix == ()
    assert found.gain is None
    assert found.reason == "no change that you can make shortens steps beyond noise"


def test_steps_that_are_too_long_to_replay_beside_the_summary_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice_module, "MAX_RECORDS", 10)
    found = advised(tmp_path, JOB).advice
    assert found is not None
    assert found.replay_error is None
    assert "a step of 4 ranks has" in found.reason
    assert "`dtprof whatif` does" in found.reason


def test_three_measured_steps_are_too_few(tmp_path: Path) -> None:
    found = advised(tmp_path, replace(JOB, steps=4)).advice
    assert found is not None
    assert found.reason == "a prediction takes 4 measured steps, the run has 3"


def test_replicas_whose_steps_are_not_the_same_are_not_replayed(tmp_path: Path) -> None:
    generate(tmp_path, replace(JOB, slow={2: 1.3}))
    run = open_run(tmp_path)
    summary = summarise_advised(replace(run, manifest=replace(run.manifest, replicas=2)))
    assert summary.advice is not None
    assert not summary.advice.fix
    assert summary.advice.reason.startswith("the run has 2 replicas")
    assert summary.critical_path is None
    assert summarise(run).critical_path is not None


def test_a_rank_that_never_steps_is_named_where_the_others_cannot_be_replayed_without_it() -> None:
    """Rank 0 trains, and asks the reward model of rank 1, which steps nothing."""
    trainer, reward = RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)
    for begin in range(0, 1000, 100):
        for rank in (trainer, reward):
            rank.op("broadcast", begin + 10, begin + 20, nbytes=8)
        for phase, at in (("forward", 20), ("backward", 40), ("optimizer", 80)):
            trainer.span(phase, begin + at, begin + at + 10)
    advice = summarise_advised(MemoryRun([trainer, reward])).advice
    assert advice is not None
    assert advice.reason.startswith("rank 1 ended no step; expected the same steps on every rank")


def test_a_replay_that_misses_the_run_names_no_change() -> None:
    why = "whatif: the replayed step is 6.2 % off the measured one, more than 5 %: ...; nothing is predicted"
    found = state_advice(Prediction(run="run", steps=(2, 9), replay_error=0.062, cannot_tell=("other", why)))
    assert found.gain is None
    assert found.reason == "the replay is 6.2 % off the measured steps"
    assert found.replay_error == 0.062


@pytest.mark.parametrize(
    ("gain", "interval", "named"),
    [(0.2, (0.1, 0.3), True), (0.2, (-0.01, 0.4), False), (0.004, (0.003, 0.005), False)],
)
def test_only_a_gain_beyond_noise_is_named(gain: float, interval: tuple[float, float], named: bool) -> None:
    scenario = Scenario(fix=("rank=1",), step_ns=80.0, gain=gain, interval=interval)
    found = state_advice(Prediction(run="run", replay_error=0.01, scenarios=(scenario,)))
    assert (found.gain is not None) == named


def test_full_overlap_is_a_bound_that_comes_after_every_real_change() -> None:
    bound = Scenario(fix=("overlap=full",), step_ns=70.0, gain=0.3, interval=(0.29, 0.31))
    rank = Scenario(fix=("rank=1",), step_ns=90.0, gain=0.1, interval=(0.09, 0.11))
    found = state_advice(Prediction(run="run", replay_error=0.0, scenarios=(bound, rank)))
    assert found.fix == ("rank=1",)
    alone = state_advice(Prediction(run="run", replay_error=0.0, scenarios=(bound,)))
    assert alone.is_bound
    assert "at most 30.0 % shorter steps" in advice_words(replace(empty_summary(), advice=alone))


def test_the_drawn_step_is_the_replayed_one_without_gaps_on_any_rank(tmp_path: Path) -> None:
    generate(tmp_path, replace(JOB, slow={2: 1.3}, jitter=0.0))
    _, _, prediction, _ = summarise_closely(open_run(tmp_path), THIS_PROCESS)
    before, after = prediction.timelines
    assert prediction.replayed_step_ns == pytest.approx(before.step_ns, rel=1e-6)
    assert prediction.best is not None
    assert prediction.best.step_ns == pytest.approx(after.step_ns, rel=1e-3)
    for step in (before, after):
        for rank in range(4):
            bars = sorted((bar.begin_ns, bar.end_ns) for bar in step.intervals if bar.rank == rank)
            gaps = np.array([begin for begin, _ in bars[1:]]) - np.array([end for _, end in bars[:-1]])
            assert abs(gaps).max() <= 2  # rounding
    waits = {bar.rank for bar in before.intervals if bar.kind == "exposed_wait" and bar.end_ns - bar.begin_ns > 1e6}
    assert waits == {0, 1, 3}
