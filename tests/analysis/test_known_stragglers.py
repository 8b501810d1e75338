"""Stragglers of generated jobs: two at once, a slow host, one that begins or moves; clocks that jump, lost records.

What a step would gain is known: the same job runs without them, with the same noise.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run
from tests.synthetic import HostClock, Job, Spell, Truth, generate, take_turns
from tests.synthetic.simulation import Simulation

MAX_LAG_ERROR = 0.05
"""Of the step: docs/explanation/measurements/known-truth.md has it for many more jobs."""
JOB = Job(dp=4, tp=2, steps=16, layers=2, jitter=0.05)


def analyse(folder: Path, job: Job) -> tuple[Summary, Truth]:
    truth = generate(folder, job)
    return summarise(open_run(folder)), truth


def mean_step(truth: Truth, used: tuple[int, int] | None) -> float:
    assert used is not None
    return float((truth.end - truth.begin)[used[0] - 1 : used[1]].mean())


def gain_of(job: Job, truth: Truth, summary: Summary) -> float:
    """Return what a step of the summary would have gained if the job had been this one."""
    return mean_step(truth, summary.steps.used) - mean_step(Simulation(job).run(), summary.steps.used)


@pytest.mark.parametrize("seed", range(6))
def test_two_stragglers_are_reported_with_what_mending_each_and_both_gains(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    first, second = (int(rank) for rank in random.choice(8, 2, replace=False))
    job = dataclasses.replace(JOB, overlapped=bool(seed % 2), seed=seed, slow={first: 1.9, second: 1.5})
    summary, truth = analyse(tmp_path, job)
    listed = {straggler.rank: straggler for straggler in summary.stragglers}
    assert list(listed) == [first, second]
    step = mean_step(truth, summary.steps.used)
    for rank in (first, second):
        others = {other: factor for other, factor in job.slow.items() if other != rank}
        alone = gain_of(dataclasses.replace(job, slow=others), truth, summary)
        assert listed[rank].lag_ns_per_step == pytest.approx(alone, abs=MAX_LAG_ERROR * step)
    together = gain_of(dataclasses.replace(job, slow={}), truth, summary)
    assert listed[second].together_ns_per_step == pytest.approx(together, abs=MAX_LAG_ERROR * step)


@pytest.mark.parametrize("jitter", [0.02, 0.2])
def test_no_rank_of_a_balanced_job_is_listed(jitter: float, tmp_path: Path) -> None:
    for seed in range(4):
        job = Job(dp=(2, 4, 8, 16)[seed], tp=(8, 1, 2, 1)[seed], steps=12, layers=1, jitter=jitter, seed=seed)
        summary, _ = analyse(tmp_path / str(seed), job)
        assert summary.stragglers == ()
        assert not [caveat for caveat in summary.cannot_tell if caveat.startswith("stragglers")]


def test_all_ranks_of_a_slow_host_are_listed_and_the_host_is_the_cause(tmp_path: Path) -> None:
    job = dataclasses.replace(
        JOB, ranks_per_host=2, clocks={host: HostClock(offset_ns=host * 10**8) for host in (1, 2, 3)}
    )
    slow = dataclasses.replace(job, spells=(Spell(ranks=job.ranks_on(2), factor=1.6),))
    summary, truth = analyse(tmp_path, slow)
    assert sorted(straggler.rank for straggler in summary.stragglers) == [4, 5]
    assert {straggler.cause for straggler in summary.stragglers} == {"host host-2: all of its ranks are slow"}
    step = mean_step(truth, summary.steps.used)
    together = gain_of(job, truth, summary)
    assert summary.stragglers[-1].together_ns_per_step == pytest.approx(together, abs=MAX_LAG_ERROR * step)


def test_a_straggler_that_begins_at_a_step_is_reported_with_that_step(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, spells=(Spell(ranks=(6,), factor=1.8, first=9),))
    summary, truth = analyse(tmp_path, job)
    (found,) = summary.stragglers
    assert (found.rank, found.since_step) == (6, 10)  # steps are counted from 1 there
    expected = gain_of(JOB, truth, summary)
    assert found.lag_ns_per_step == pytest.approx(expected, abs=MAX_LAG_ERROR * mean_step(truth, summary.steps.used))


def test_slowness_that_moves_from_rank_to_rank_is_reported_and_nobody_is_called_slow(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, spells=take_turns(range(8), 1.8, every=1, steps=16))
    summary, truth = analyse(tmp_path, job)
    assert summary.stragglers == ()
    (caveat,) = (caveat for caveat in summary.cannot_tell if caveat.startswith("stragglers"))
    assert caveat.startswith("stragglers: in 15 of 15 steps ranks 0-7 were late, in turns")
    less_ms = float(caveat.partition("would take ")[2].partition(" ms less")[0])
    step = mean_step(truth, summary.steps.used)
    assert less_ms * 1e6 == pytest.approx(gain_of(JOB, truth, summary), abs=MAX_LAG_ERROR * step)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("jump_ns", [3_000_000, 400_000_000, -400_000])
def test_a_clock_that_jumps_is_reported_and_the_rest_analysed(jump_ns: int, *, measured: bool, tmp_path: Path) -> None:
    # At 1.1 s, in the seventh of 16 steps, the clock of the second host jumps.
    clock = HostClock(offset_ns=7 * 10**9, jump_ns=jump_ns, jumps_at_ns=1_100_000_000, measured=measured)
    job = dataclasses.replace(JOB, jitter=0.02, ranks_per_host=4, clocks={1: clock}, slow={1: 1.5})
    summary, truth = analyse(tmp_path, job)
    assert any(caveat.startswith("clock_error_ns") and "may have jumped" in caveat for caveat in summary.cannot_tell)
    assert summary.clock_error_ns is not None
    assert summary.clock_error_ns >= abs(jump_ns) / 20
    assert [straggler.rank for straggler in summary.stragglers] in ([], [1])
    for rank in summary.ranks:
        assert rank.partition_ns is not None
        assert sum(rank.partition_ns.values()) == rank.step_ns
        for part, expected in truth.mean_parts(rank.rank, *summary.steps.used or (1, 0)).items():
            # The step in which the clock of the rank itself jumps is so much longer.
            error = summary.clock_error_ns + abs(jump_ns) / 15
            assert rank.partition_ns[part] == pytest.approx(expected, abs=error), (rank.rank, part)


def test_steps_whose_records_were_dropped_are_skipped_and_the_rest_is_true(tmp_path: Path) -> None:
    # A step has 17 events on each rank: dropped are those of steps 4 to 7, and rank 2 lost more than the others.
    job = dataclasses.replace(JOB, slow={5: 1.5})
    _, whole = analyse(tmp_path / "whole", job)
    per_step = int(whole.events[0]) // job.steps
    lost = dict.fromkeys(range(8), (3 * per_step, 7 * per_step)) | {2: (3 * per_step, 8 * per_step + 5)}
    summary, truth = analyse(tmp_path / "dropped", dataclasses.replace(job, dropped=lost))
    assert summary.dropped_events == sum(end - begin for begin, end in lost.values())
    assert summary.steps.used == (11, 16)  # rank 2 lacks the beginning of step 9, and so the beginning of step 10
    assert any("dropped" in caveat for caveat in summary.cannot_tell)
    (found,) = summary.stragglers
    assert found.rank == 5
    for rank in summary.ranks:
        assert rank.partition_ns is not None
        for part, expected in truth.mean_parts(rank.rank, 11, 16).items():
            assert rank.partition_ns[part] == pytest.approx(expected, abs=1_000), (rank.rank, part)
