"""Runs of two ranks and more whose steps have a known mean and known noise, for the tests of comparisons."""

import math

import numpy as np

from tests.builders import MemoryRun, RankBuilder

US = 1_000
STEP_US = {"data": 500, "forward": 3_000, "backward": 6_000, "reduce": 2_000, "optimizer": 500}
"""Means: 12 ms a step; the all_reduce is issued when the backward pass of the rank ends."""


def noise(random: np.random.Generator, count: int, *, sigma: float, memory: float) -> list[float]:
    """Return factors around 1 of a first-order autoregression: each remembers this much of the one before."""
    value = random.normal() * sigma
    values = []
    for _ in range(count):
        values.append(math.exp(value))
        value = memory * value + math.sqrt(1 - memory**2) * sigma * random.normal()
    return values


def build_ranks(
    seed: int,
    *,
    num_ranks: int = 2,
    num_steps: int = 30,
    sigma: float = 0.05,
    memory: float = 0.5,
    drift: float = 0.0,
    delay_us: float = 0.0,
    slow_rank: int | None = None,
    slower_reduce_us: float = 0.0,
    extra_bytes: int = 0,
    tokens: int = 0,
) -> list[RankBuilder]:
    """Return the ranks: `delay_us` of compute more in each step of the slow rank, or of all ranks.

    Each rank is given so many tokens a step, in sequences of 64. The machine drifts: from first to last step all
    gets longer, or shorter, by a share whose standard deviation is `drift`, and on average by nothing.
    """
    random = np.random.default_rng(seed)
    ranks = [RankBuilder(rank, world_size=num_ranks) for rank in range(num_ranks)]
    factors = [noise(random, num_steps, sigma=sigma, memory=memory) for _ in ranks]
    reduce_factors = noise(random, num_steps, sigma=sigma, memory=memory)
    if drift:
        pace = 1 + drift * random.normal() * (np.linspace(-0.5, 0.5, num_steps))
        factors = [(np.array(own) * pace).tolist() for own in factors]
        reduce_factors = (np.array(reduce_factors) * pace).tolist()
    now = 0.0
    for step in range(num_steps):
        arrivals = []
        for rank, own in zip(ranks, factors, strict=True):
            begin = now
            at = begin + STEP_US["data"] * own[step]
            rank.span("data", _ns(begin), _ns(at))
            forward = at + STEP_US["forward"] * own[step]
            rank.span("forward", _ns(at), _ns(forward))
            delay = delay_us if slow_rank in (None, rank.rank) else 0.0
            arrivals.append((forward, forward + STEP_US["backward"] * own[step] + delay))
        end = max(end for _, end in arrivals) + STEP_US["reduce"] * reduce_factors[step] + slower_reduce_us
        now = end + STEP_US["optimizer"]
        for rank, (forward, issued) in zip(ranks, arrivals, strict=True):
            rank.span("backward", _ns(forward), _ns(issued))
            rank.op("all_reduce", _ns(issued), _ns(end), nbytes=1 << 20, api="all_reduce")
            rank.span("optimizer", _ns(end), _ns(now))
            resident = (1 << 30) + extra_bytes + int(random.integers(0, 64)) * 4096
            if tokens and step == 0:
                rank.sample("step_tokens", _ns(forward), tokens)
                rank.sample("step_samples", _ns(forward), tokens // 64)
            rank.sample("rss_bytes", _ns(now) + 10, resident)
            rank.sample("peak_rss_bytes", _ns(now) + 10, (1 << 30) + (1 << 28))
    return ranks


def noisy_run(seed: int, **chosen: object) -> MemoryRun:
    """Return such a run in memory; the same options as `build_ranks`."""
    return MemoryRun(build_ranks(seed, **chosen))  # type: ignore[arg-type]


def _ns(us: float) -> int:
    return round(us * US)
