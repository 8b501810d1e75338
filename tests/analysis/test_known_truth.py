"""Generated jobs whose truth is known: 210 small runs of any layout, sound, uneven, cut short, on skewed clocks.

The simulation counts what time goes to as it is spent; the analysis finds it in the records. Both must agree.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.nodes.host_clocks import host_clocks
from dtprof.records.reader import open_run
from tests.synthetic import HostClock, Job, Truth, generate
from tests.synthetic.simulation import Simulation

MAX_ERROR_NS = 1_000
"""A part of a step may be off by this much: durations are written as float32, means are rounded."""
NUM_SEEDS, JOBS_A_SEED = 10, 21


def draw(random: np.random.Generator) -> Job:
    """Return a job of up to 8 ranks with a few steps."""
    pp = int(random.choice([1, 1, 2, 3, 4]))
    return Job(
        pp=pp,
        dp=int(random.choice([1, 2, 4] if pp == 1 else [1, 2])),
        tp=int(random.choice([1, 2] if pp < 3 else [1])),
        steps=int(random.integers(5, 7)),
        microbatches=int(random.integers(1, 5)),
        layers=int(random.integers(1, 4)),
        interleave_backward=bool(random.integers(2)),
        stage_factor=tuple(random.uniform(1, 2, pp)),
        jitter=float(random.choice([0, 0.02, 0.1])),
        dp_ns=int(random.integers(10_000, 2_000_000)),
        tp_ns=int(random.integers(10_000, 500_000)),
        message_ns=int(random.integers(10_000, 500_000)),
        overlapped=bool(random.integers(2)),
        seed=int(random.integers(1 << 30)),
    )


def draw_jobs(seed: int) -> list[Job]:
    random = np.random.default_rng(seed)
    return [draw(random) for _ in range(JOBS_A_SEED)]


def analyse(folder: Path, job: Job) -> tuple[Summary, Truth]:
    truth = generate(folder, job)
    return summarise(open_run(folder)), truth


def assert_partitions_are_true(summary: Summary, truth: Truth) -> None:
    assert summary.steps.used is not None
    for rank in summary.ranks:
        assert rank.partition_ns is not None
        assert sum(rank.partition_ns.values()) == rank.step_ns
        for part, expected in truth.mean_parts(rank.rank, *summary.steps.used).items():
            assert rank.partition_ns[part] == pytest.approx(expected, abs=MAX_ERROR_NS), (rank.rank, part)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_partition_is_what_time_was_spent_on(seed: int, tmp_path: Path) -> None:
    for number, job in enumerate(draw_jobs(seed)):
        random = np.random.default_rng((seed, number))
        rank, step = int(random.integers(job.world_size)), int(random.integers(1, job.steps))
        late = dataclasses.replace(job, delays={(rank, step): int(random.integers(1_000_000, 20_000_000))})
        summary, truth = analyse(tmp_path / str(number), late)
        assert_partitions_are_true(summary, truth)
        assert summary.events == int(truth.events.sum())
        assert summary.complete
        assert summary.steps.count == job.steps


@pytest.mark.parametrize("seed", range(4))
def test_slow_rank_is_found_with_what_it_costs(seed: int, tmp_path: Path) -> None:
    for number, drawn in enumerate(draw_jobs(seed)[:8]):
        job = dataclasses.replace(drawn, pp=1, stage_factor=(), dp=4, overlapped=False, jitter=0.02, layers=3)
        slow = int(np.random.default_rng((seed, number)).integers(job.world_size))
        sound, _ = analyse(tmp_path / f"sound-{number}", job)
        assert [found.rank for found in (sound.stragglers or ())] == []
        summary, truth = analyse(tmp_path / f"slow-{number}", dataclasses.replace(job, slow={slow: 1.5}))
        assert [found.rank for found in (summary.stragglers or ())][:1] == [slow]
        unhurt = Simulation(job).run()
        expected = float(np.median(truth.end - truth.begin) / np.median(unhurt.end - unhurt.begin))
        assert (summary.stragglers or ())[0].slowdown == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("jitter", "too_long"), [(0.0, 0.01), (0.02, 0.1)])
def test_lag_in_a_large_group_is_too_long_by_what_chance_costs_at_most(
    jitter: float, too_long: float, tmp_path: Path
) -> None:
    # docs/reference/metrics.md: +6 % where computations vary by 2 %, for then another rank is late now and then.
    job = Job(tp=8, steps=8, layers=3, jitter=jitter, seed=3)
    summary, truth = analyse(tmp_path, dataclasses.replace(job, slow={3: 1.3}))
    unhurt = Simulation(job).run()
    gained = float((truth.end - truth.begin)[1:].mean() - (unhurt.end - unhurt.begin)[1:].mean())
    (found,) = summary.stragglers or ()
    assert found.rank == 3
    assert found.lag_ns_per_step is not None
    assert 0.99 * gained <= found.lag_ns_per_step <= (1 + too_long) * gained


def test_lost_killed_and_cut_ranks_are_reported_and_the_rest_is_analysed(tmp_path: Path) -> None:
    job = Job(dp=4, tp=2, steps=8, jitter=0.02, lost=frozenset({3}), killed={5: 40}, cut={6: 4096 + 64 * 50 + 10})
    summary, truth = analyse(tmp_path / "run", job)
    assert summary.missing_ranks == (3,)
    assert not summary.complete
    expected = truth.events.copy()
    expected[[3, 5, 6]] = 0, 40, 50
    assert [rank.events for rank in summary.ranks] == [int(n) for i, n in enumerate(expected) if i != 3]
    assert any("rank 5 did not close the log" in caveat for caveat in summary.cannot_tell)
    assert any("rank-00006.0/events.00000 is cut after 7306" in caveat for caveat in summary.cannot_tell)
    for rank in summary.ranks:
        if rank.partition_ns is not None:
            assert sum(rank.partition_ns.values()) == rank.step_ns
            assert rank.step_ns == pytest.approx(
                7_400_000, rel=0.1
            )  # 2 layers of 1 + 2 ms, transfers of 1.05, the rest 0.35


def test_archived_segments_give_the_same_summary(tmp_path: Path) -> None:
    job = Job(dp=2, steps=6_600, layers=4, jitter=0.02)  # 10 events a step: two segments
    plain, _ = analyse(tmp_path / "plain", job)
    archived, _ = analyse(tmp_path / "archived", dataclasses.replace(job, archived=True))
    assert len(list((tmp_path / "archived").glob("rank-*/events.*.z"))) == 2
    assert dataclasses.replace(archived, run=plain.run) == plain


def draw_skewed_job(seed: int) -> Job:
    """Return a job on four hosts whose clocks are up to a second apart and drift, with a slow rank."""
    random = np.random.default_rng(seed)
    clocks = {
        host: HostClock(
            offset_ns=int(random.integers(10**9)),
            drift_ppm=float(random.uniform(-50, 50)),
            error_ns=int(random.integers(500, 50_000)),
        )
        for host in range(4)
    }
    return Job(dp=8, steps=8, jitter=0.05, ranks_per_host=2, clocks=clocks, seed=seed, slow={5: 1.5})


@pytest.mark.parametrize("seed", range(8))
def test_measured_clocks_are_off_by_no_more_than_their_error(seed: int, tmp_path: Path) -> None:
    job = draw_skewed_job(seed)
    truth = generate(tmp_path / "run", job)
    known = host_clocks(tmp_path / "run")
    assert sorted(known) == ["host-0", "host-1", "host-2", "host-3"]
    for host in range(4):
        clock = known[f"host-{host}"]
        for moment in truth.end[:, 2 * host].tolist():
            own, reference = (job.show(moment, on) for on in (host, 0))
            assert abs(own + clock.offset_at(own) - reference) <= clock.error_at(own)


@pytest.mark.parametrize("seed", range(8))
def test_partition_across_hosts_is_true_within_the_clock_error(seed: int, tmp_path: Path) -> None:
    summary, truth = analyse(tmp_path / "run", draw_skewed_job(seed))
    assert summary.clock_error_ns is not None
    assert 0 < summary.clock_error_ns < 200_000  # clocks are a second apart
    assert [found.rank for found in (summary.stragglers or ())] == [5]
    assert summary.steps.used is not None
    for rank in summary.ranks:
        assert rank.partition_ns is not None
        assert sum(rank.partition_ns.values()) == rank.step_ns
        for part, expected in truth.mean_parts(rank.rank, *summary.steps.used).items():
            assert rank.partition_ns[part] == pytest.approx(expected, abs=summary.clock_error_ns), (rank.rank, part)


@pytest.mark.parametrize(("pp", "dp", "tp", "slow"), [(2, 2, 1, 1.5), (4, 1, 1, 1.3), (4, 2, 2, 1.5), (3, 2, 1, 1.4)])
def test_slow_stage_costs_what_a_step_would_gain_without_it(
    pp: int, dp: int, tp: int, slow: float, tmp_path: Path
) -> None:
    job = Job(pp=pp, dp=dp, tp=tp, steps=6, microbatches=8, layers=3, jitter=0.02)
    unhurt = Simulation(job).run()
    factors = (1.0, slow, *[1.0] * (pp - 2))
    summary, truth = analyse(tmp_path / "run", dataclasses.replace(job, stage_factor=factors))
    gained = np.median(truth.end - truth.begin) - np.median(unhurt.end - unhurt.begin)
    (found,) = summary.stragglers or ()
    assert dp * tp <= found.rank < 2 * dp * tp
    assert "pipeline stage" in (found.cause or "")
    assert found.lag_ns_per_step == pytest.approx(gained, rel=0.1)


@pytest.mark.parametrize("slow", [3, 19, 29])
def test_slow_rank_of_a_pipeline_is_found_and_bubbles_take_up_a_part_of_its_time(slow: int, tmp_path: Path) -> None:
    job = Job(pp=4, dp=8, steps=6, microbatches=8, layers=4, jitter=0.02)
    unhurt = Simulation(job).run()
    summary, truth = analyse(tmp_path / "run", dataclasses.replace(job, slow={slow: 1.3}))
    gained = np.median(truth.end - truth.begin) - np.median(unhurt.end - unhurt.begin)
    (found,) = summary.stragglers or ()
    assert found.rank == slow
    # It works 0.3 * 8 microbatches * 4 layers * 3 ms longer.
    assert sum(found.phases_ns.values()) == pytest.approx(28_800_000, rel=0.05)
    assert found.lag_ns_per_step == pytest.approx(gained, rel=0.15)
