"""The lag of a straggler in groups of many members: a step gains less than the rank works longer than the others.

What a step would gain is known: the same job runs without the slow rank, with the same noise.
"""

import dataclasses
from pathlib import Path

import pytest

from dtprof.analysis.results import StragglerResult
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.whatif.advice import add_replayed_lag, summarise_advised
from dtprof.analysis.whatif.prediction import Prediction, Scenario
from dtprof.records.reader import open_run
from tests.synthetic import Job, Spell, generate
from tests.synthetic.simulation import Simulation

MAX_LAG_ERROR = 0.02
"""Of the step. What the work of the slow rank exceeds that of the others by is off by more in these jobs."""


@pytest.mark.parametrize(("tp", "dp"), [(8, 2), pytest.param(16, 1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("seed", range(2))
def test_the_lag_in_a_large_tensor_parallel_group_is_the_true_gain_and_lies_in_its_bounds(
    tp: int, dp: int, seed: int, tmp_path: Path
) -> None:
    job = Job(tp=tp, dp=dp, steps=12, layers=2, jitter=0.1, seed=seed, slow={3: 1.4})
    truth, sound = generate(tmp_path / "run", job), Simulation(dataclasses.replace(job, slow={})).run()
    run = open_run(tmp_path / "run")
    (found,) = summarise_advised(run).stragglers
    (plain,) = summarise(run).stragglers
    step, without = (float((one.end - one.begin)[1:].mean()) for one in (truth, sound))
    assert found.rank == 3
    assert found.replayed_lag_ns_per_step == pytest.approx(step - without, abs=MAX_LAG_ERROR * step)
    assert found.lag_ns_per_step == plain.lag_ns_per_step
    assert plain.lag_ns_per_step is not None
    assert plain.lag_ns_per_step > step - without + MAX_LAG_ERROR * step
    assert found.replayed_lag_interval_ns_per_step is not None
    low, high = found.replayed_lag_interval_ns_per_step
    assert low <= step - without <= high
    assert found.replayed_slowdown is not None
    assert found.replayed_slowdown[0] == pytest.approx(step / without, abs=0.05)


def test_of_a_large_run_the_newest_steps_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tp=4, pp=4, microbatches=8, steps=60, layers=1, jitter=0.05, slow={3: 1.6})
    truth, sound = generate(tmp_path / "run", job), Simulation(dataclasses.replace(job, slow={})).run()
    monkeypatch.setattr("dtprof.analysis.whatif.advice.MAX_SHARE", 0.0)
    monkeypatch.setattr("dtprof.analysis.whatif.advice.MAX_READ_ONCE_MORE", 25_000)
    monkeypatch.setattr("dtprof.analysis.whatif.advice.RECORDS_OF_LAG", 12_000)
    monkeypatch.setattr("dtprof.records.reader.MIN_OF_EACH", 256)
    (found,) = summarise_advised(open_run(tmp_path / "run")).stragglers
    step, without = (float((one.end - one.begin)[1:].mean()) for one in (truth, sound))
    assert found.lag_ns_per_step is not None
    assert found.lag_ns_per_step > step - without + MAX_LAG_ERROR * step
    assert found.replayed_lag_ns_per_step == pytest.approx(step - without, abs=MAX_LAG_ERROR * step)


def test_of_a_straggler_that_was_not_replayed_from_its_first_slow_step_on_the_lag_has_no_bounds(tmp_path: Path) -> None:
    job = Job(tp=8, steps=16, layers=2, jitter=0.05, spells=(Spell(ranks=(3,), factor=2.0, first=8),))
    generate(tmp_path / "run", job)
    (found,) = summarise_advised(open_run(tmp_path / "run")).stragglers
    assert found.since_step == 9
    assert found.lag_ns_per_step is not None
    assert found.replayed_lag_interval_ns_per_step is None
    assert found.replayed_slowdown is None


def test_of_several_stragglers_and_without_a_replay_lags_stay_as_they_are() -> None:
    one = StragglerResult(
        rank=1, last_share=0.9, slowdown=1.25, blame_ns_per_step=10, lag_ns_per_step=20, since_step=2
    )  # a step of 100 ns
    other = dataclasses.replace(one, rank=2)
    scenario = Scenario(fix=("rank=1",), step_ns=90.0, gain=0.1, interval=(-0.05, 0.15))
    found = Prediction(run="run", steps=(2, 9), measured_step_ns=100.0, scenarios=(scenario,))
    (replayed,) = add_replayed_lag([one], found)
    # A tenth of 100 ns; slowdowns 1 / (1 - 0.1), and 1 / (1 - 0) to 1 / (1 - 0.15).
    assert (replayed.replayed_lag_ns_per_step, replayed.replayed_lag_interval_ns_per_step) == (10, (0, 15))
    assert (replayed.lag_ns_per_step, replayed.slowdown) == (20, 1.25)
    assert replayed.replayed_slowdown == pytest.approx((1 / 0.9, 1.0, 1 / 0.85))
    assert add_replayed_lag([one, other], found) == (one, other)
    assert add_replayed_lag([one], Prediction(run="run", cannot_tell=("too many records",))) == (one,)
    assert add_replayed_lag([other], found) == (other,)
