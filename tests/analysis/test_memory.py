"""Memory of a rank: the peak, and what it is held for."""

from dtprof.analysis.memory import find_categories, find_largest, find_peak
from dtprof.analysis.summary import summarise
from tests.builders import MemoryRun, RankBuilder


def sampled(**values: int) -> RankBuilder:
    rank = RankBuilder(0, world_size=1)
    for name, value in values.items():
        rank.sample(name, 10, value)
    return rank


def test_the_peak_is_the_devices_where_one_is_used() -> None:
    assert find_peak(sampled(peak_rss_bytes=900).tables()) == 900
    assert find_peak(sampled(peak_rss_bytes=900, cuda_peak_allocated_bytes=500).tables()) == 500
    assert find_peak(sampled().tables()) is None


def test_each_category_is_the_most_that_was_held_and_other_is_what_is_left_of_the_peak() -> None:
    # 1000 - (200 + 150 + 300 + 50 + 40) = 260
    rank = sampled(
        peak_rss_bytes=1000, parameter_bytes=200, gradient_bytes=150, activation_bytes=20, communication_bytes=40
    )
    rank.sample("optimizer_state_bytes", 20, 300)
    rank.sample("activation_bytes", 30, 50)
    assert find_categories(rank.tables()) == {
        "parameters": 200,
        "gradients": 150,
        "optimizer_state": 300,
        "activations": 50,
        "communication": 40,
        "other": 260,
    }
    assert find_largest(rank.tables())["activation_bytes"] == 50


def test_categories_that_are_not_known_are_null_and_the_summary_says_why() -> None:
    rank = sampled(peak_rss_bytes=100, parameter_bytes=20, gradient_bytes=20, optimizer_state_bytes=80)
    summary = summarise(MemoryRun([rank]))
    categories = summary.ranks[0].memory_categories
    assert (categories["activations"], categories["communication"]) == (None, None)
    assert categories["other"] == 0  # 120 were held at different moments
    assert sum(doubt.startswith("memory:") for doubt in summary.cannot_tell) == 2


def test_without_samples_of_a_model_there_are_no_categories() -> None:
    summary = summarise(MemoryRun([sampled(peak_rss_bytes=100)]))
    assert summary.ranks[0].memory_categories == {}
    assert any(doubt.startswith("memory: what it is held for") for doubt in summary.cannot_tell)
