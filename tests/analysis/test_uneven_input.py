"""Ranks that are given unequal input, and work as long as that takes."""

import numpy as np
import pytest

from dtprof.analysis.results import UnevenInput
from dtprof.analysis.run_summary import summarise
from dtprof.analysis.stragglers import straggler_ranks
from dtprof.records import events
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
STEPS = 24
SAMPLES = np.random.default_rng(3).integers(10, 50, (STEPS, 4))
"""Of each step and rank."""


def train(work_ms: np.ndarray[tuple[int, int], np.dtype[np.float64]], *, tokens: int = 0) -> MemoryRun:
    """Return ranks that work so long in each step, wait for the last one, and reduce for 5 ms."""
    ranks = [RankBuilder(i, world_size=4, features=("ddp",)) for i in range(4)]
    t = 0
    for step in range(STEPS):
        lengths = [int(ms * MS) for ms in work_ms[step]]
        end = t + max(lengths) + 5 * MS
        for rank, length, samples in zip(ranks, lengths, SAMPLES[step].tolist(), strict=True):
            rank.span("forward", t, t + length // 2)
            rank.sample(events.CONSUMED[1], t + 1, samples)
            if tokens:
                rank.sample(events.CONSUMED[0], t + 1, tokens)
            rank.span("backward", t + length // 2, end)
            rank.op("all_reduce", t + length, end, nbytes=1 << 20, reduce_op="sum", dtype="float32")
            rank.span("optimizer", end, end + MS)
        t = end + MS
    return MemoryRun(ranks)


def found(run: MemoryRun) -> UnevenInput | None:
    return next(iter(summarise(run).uneven_input), None)


def test_batches_of_equal_size_gain_what_the_largest_is_above_the_mean() -> None:
    # A sample takes 1 ms: the step is as long as its largest batch, and would be as long as the mean one.
    summary = summarise(train(SAMPLES.astype(np.float64)))
    (uneven,) = summary.uneven_input
    first, last = summary.steps.used or (0, 0)
    measured = SAMPLES[first - 1 : last]
    beyond = measured.max(axis=1) - measured.mean(axis=1)
    assert uneven.quantity == "samples"
    assert uneven.explained == pytest.approx(1.0)
    assert uneven.mean_per_step == pytest.approx(measured.mean())
    assert uneven.largest_over_mean == pytest.approx((measured.max(axis=1) / measured.mean(axis=1)).mean())
    assert uneven.gain_ns_per_step == pytest.approx(beyond.mean() * MS, rel=1e-6)
    text = " ".join(summary_text(summary).split())
    assert "of a step has" in text
    assert "explains 100 % of the differences in the work of ranks: with equal samples a step takes" in text


def test_bins_of_several_steps_even_input_out_and_gain_less(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = found(train(SAMPLES.astype(np.float64)))
    monkeypatch.setattr(straggler_ranks, "MAX_CELLS", STEPS * 4 // 2)
    wide = found(train(SAMPLES.astype(np.float64)))
    assert narrow is not None
    assert wide is not None
    assert wide.explained == pytest.approx(1.0)
    assert wide.gain_ns_per_step < narrow.gain_ns_per_step


def test_work_that_does_not_follow_the_input_is_not_explained_by_it() -> None:
    others = np.random.default_rng(4).uniform(10, 50, SAMPLES.shape)
    assert found(train(others)) is None
    slow = np.full(SAMPLES.shape, 20.0)
    slow[:, 2] = 40.0
    assert found(train(slow)) is None, "one rank is slow in all steps"


def test_slow_ranks_and_noise_beside_unequal_input_leave_the_share_that_it_explains() -> None:
    noise = np.random.default_rng(5).normal(0, 8, SAMPLES.shape)
    uneven = found(train(np.maximum(1, SAMPLES + noise)))
    assert uneven is not None
    assert 0.4 < uneven.explained < 0.9


def test_tokens_tell_more_of_the_work_where_they_are_unequal() -> None:
    uneven = found(train(SAMPLES.astype(np.float64), tokens=4096))
    assert uneven is not None
    assert uneven.quantity == "samples", "all ranks have as many tokens"
