"""Memory of a rank: the peak, and what it is held for."""

from collections.abc import Sequence

import numpy as np
import pytest

from dtprof.analysis.memory.rank_memory import find_categories, find_largest, find_peak
from dtprof.analysis.results import MemoryGrowth
from dtprof.analysis.run_summary import summarise
from tests.builders import MemoryRun, RankBuilder


def sampled(**values: int) -> RankBuilder:
    rank = RankBuilder(0, world_size=1)
    for name, value in values.items():
        rank.sample(name, 10, value)
    return rank


def stepping(values: Sequence[int], name: str = "rss_bytes") -> RankBuilder:
    """Return a rank with a sample after each step, the first of which has no begin."""
    rank = RankBuilder(0, world_size=1)
    for step, value in enumerate(values):
        rank.span("backward", 100 * step, 100 * step + 50)
        rank.span("optimizer", 100 * step + 60, 100 * step + 80)
        rank.sample(name, 100 * step + 90, value)
    return rank


def growth_of(values: Sequence[int]) -> MemoryGrowth | None:
    return summarise(MemoryRun([stepping(values)])).ranks[0].memory_growth


KIB, MIB = 1 << 10, 1 << 20
NOISE = np.random.default_rng(1).integers(0, 4 * MIB, 400).tolist()


def test_memory_that_grows_by_a_mebibyte_a_step_leaks_by_that_much() -> None:
    growth = growth_of([500 * MIB + step * MIB + NOISE[step] for step in range(60)])
    assert growth is not None
    assert growth.leaks
    assert growth.bytes_per_step == pytest.approx(MIB, rel=0.1)
    assert growth.low_bytes_per_step < MIB < growth.high_bytes_per_step


@pytest.mark.parametrize(
    "values",
    [
        [500 * MIB + NOISE[step] for step in range(60)],  # noise
        [500 * MIB + min(step, 20) * 10 * MIB for step in range(60)],  # grows for a third of the run, then stays
        [500 * MIB + min(step, 36) * 10 * MIB for step in range(60)],  # for more than half: most slopes rise
        [500 * MIB + (step % 5) * 50 * MIB for step in range(60)],  # up and down
        [500 * MIB + step * 4096 for step in range(60)],  # by 240 KiB all in all
        [500 * MIB + 100 * MIB * (step > 40) for step in range(60)],  # once
        [120 * MIB + step * 37 * KIB for step in range(60)],  # settles: 1.1 MiB in the later half, under 1 %
    ],
)
def test_memory_that_does_not_go_on_growing_does_not_leak(values: Sequence[int]) -> None:
    growth = growth_of(values)
    assert growth is not None
    assert growth.leaks is False


def test_twenty_steps_show_no_leak_and_eight_no_slope() -> None:
    growth = growth_of([500 * MIB + step * 10 * MIB for step in range(20)])
    assert growth is not None
    assert growth.bytes_per_step == 10 * MIB
    assert growth.leaks is None
    assert growth_of([500 * MIB + step * 10 * MIB for step in range(8)]) is None


def test_noise_seldom_looks_like_a_leak() -> None:
    random = np.random.default_rng(0)
    found = [growth_of((500 * MIB + random.normal(0, 20 * MIB, 30)).astype(int).tolist()) for _ in range(100)]
    assert sum(bool(growth and growth.leaks) for growth in found) == 0


def test_the_peak_is_the_devices_where_one_is_used() -> None:
    assert find_peak({"peak_rss_bytes": 900}) == 900
    assert find_peak({"peak_rss_bytes": 900, "cuda_peak_allocated_bytes": 500}) == 500
    assert find_peak({}) is None


def test_each_category_is_the_most_that_was_held_and_other_is_what_is_left_of_the_peak() -> None:
    # 1000 - (200 + 150 + 300 + 50 + 40) = 260
    rank = sampled(
        peak_rss_bytes=1000, parameter_bytes=200, gradient_bytes=150, activation_bytes=20, communication_bytes=40
    )
    rank.sample("optimizer_state_bytes", 20, 300)
    rank.sample("activation_bytes", 30, 50)
    assert find_categories(find_largest(rank.tables())) == {
        "parameters": 200,
        "gradients": 150,
        "optimizer_state": 300,
        "activations": 50,
        "communication": 40,
        "other": 260,
    }
    assert find_largest(rank.tables())["activation_bytes"] == 50


def test_buffers_that_are_larger_than_all_that_was_resident_are_not_known() -> None:
    # DeepSpeed reserves 1,000,000,000 bytes in a process of 500: what of them it uses is not measured.
    rank = sampled(peak_rss_bytes=500, parameter_bytes=200, activation_bytes=20, communication_bytes=1_000_000_000)
    summary = summarise(MemoryRun([rank]))
    categories = summary.ranks[0].memory_categories
    assert (categories["communication"], categories["other"]) == (None, 280)
    assert any("reserves more than it uses" in caveat for caveat in summary.cannot_tell)


def test_categories_that_are_not_known_are_null_and_the_summary_says_why() -> None:
    rank = sampled(peak_rss_bytes=100, parameter_bytes=20, gradient_bytes=20, optimizer_state_bytes=80)
    summary = summarise(MemoryRun([rank]))
    categories = summary.ranks[0].memory_categories
    assert (categories["activations"], categories["communication"]) == (None, None)
    assert categories["other"] == 0  # 120 were held at different moments
    assert sum(caveat.startswith("memory:") for caveat in summary.cannot_tell) == 2


def test_without_samples_of_a_model_there_are_no_categories() -> None:
    summary = summarise(MemoryRun([sampled(peak_rss_bytes=100)]))
    assert summary.ranks[0].memory_categories == {}
    assert any(caveat.startswith("memory: its categories are not known") for caveat in summary.cannot_tell)
