"""Stragglers: ranks that others wait for again and again, their cost, and the cause of their lateness.

The last rank to arrive at an operation is waited for; who was done with a broadcast before the last one came waited for
its root; a receive waits for its send. Counted is the time in which a thread that runs the steps stood still before
that arrival: waits of several operations in flight together are one wait. A rank that came last because it waited
itself is not to blame: waits are passed on to the ranks whose own work was long (blame.py).
Only operations whose members all left a record on one clock count, and of these only waits beyond the clock error.

A rank is listed when all of these hold:
- its lag is at least MIN_COST of a step: the smaller one of its excess of work and of what it cost each rank that
  waited for it, mean over the steps, less the mean of the same over the other ranks (ranks that take turns are no
  slower than one another);
- in at least min(0.6, 2 / ranks) of the steps with a notable wait (MIN_WAIT of a step, 50 us at least) it was to blame
  for more of the waits than any other;
- it was so in at least 3 steps, or in all where fewer are measured: one bad step is an event. Where fewer than 5
  are measured, which may be chance, its lag is at least MIN_COST_OF_FEW of a step;
- without all that are listed a step would be shorter by at least MIN_GAIN, where that is known;
- its excess, less the mean of the others', is above 0 by more than chance, or far from usual in at least 3 steps;
- where all ranks of its pipeline stage, and no others, are slow in computation: their work is at least MIN_STAGE more
  than that of the others. Stages are seldom equal; that is the imbalance of the pipeline.
Behind them come slow ranks that others hide, for which hardly anybody waits while the others are slow, and ranks that
are equally slow and therefore come last in turns, such as those of a slow host (straggler_gains.py); in no pipeline.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dtprof.analysis.results import Caveat, StragglerResult, Waiter
from dtprof.analysis.stragglers.blame import (
    Cells,
    WaitGraph,
    beyond_the_others,
    exceeds_chance,
    find_excess,
    find_onset,
    pass_back,
    trace_forward,
)
from dtprof.analysis.stragglers.device_clocks import DeviceClock
from dtprof.analysis.stragglers.rank_waits import WORK, RankWaits
from dtprof.analysis.stragglers.straggler_gains import Mending, find_late
from dtprof.columns import distinct
from dtprof.formatting import format_ns, list_ranks
from dtprof.intervals import Column, Mask
from dtprof.records import events

MIN_COST = 0.05
MIN_WAIT = 0.01
MIN_WAIT_NS = 50_000
MIN_STEPS = 3
ENOUGH_STEPS, MIN_COST_OF_FEW = 5, 0.15
"""Chance makes some rank the last one in all of two or three steps: of fewer than these, a lag of so much counts."""
MIN_GAIN = 0.02
"""As a share of a step: the least gain without the rank. Less is within the noise of steps."""
MIN_STAGE = 0.25
MIN_PHASE = 0.1
"""Of the excess of a straggler, for a phase to be listed."""
MAX_CELLS = 1 << 22
"""Bins of steps times ranks; more steps than that go together in bins."""
MAX_TRACED = 4
"""Stragglers for which the ranks that waited are listed."""
MAX_WAITERS = 8
_CAUSES = {
    events.DATA: "input: it waits for its data loader",
    events.GARBAGE_COLLECTION: "garbage collection",
    events.COMPILE: "compilation",
    events.CHECKPOINT: "checkpoint",
    events.EVALUATION: "evaluation",
}
_COMPUTE = (events.FORWARD, events.BACKWARD, events.RECOMPUTE)
_ON_DEVICE = (*_COMPUTE, events.OPTIMIZER)


class SlackOf(Protocol):
    """Returns the slack: how much of the excess of ranks the bubbles of a pipeline absorb."""

    def __call__(self, rank: int, *, whole_stage: bool) -> int:
        """Return it for a rank, ns a step; `whole_stage`: all ranks of its stage are slow."""


def bin_width(num_steps: int, num_ranks: int) -> int:
    """Return how many steps go in one bin: a power of two, 1 wherever memory allows."""
    width = 1
    while -(-num_steps // width) * num_ranks > MAX_CELLS and width < num_steps:
        width *= 2
    return width


@dataclass(frozen=True, kw_only=True)
class _Balance:
    """All ranks side by side, a step on average in each bin; cells of shape (num_bins, num_ranks)."""

    ranks: Column
    graph: WaitGraph
    excess: Cells
    blocked: Cells  # NaN where not known
    unclear: Cells  # waits for nobody knows whom
    blame: Cells
    lag: Cells
    surplus: Cells  # by rank: its excess over all bins, as a share of the work of the others


def find_stragglers(
    waits: Sequence[RankWaits],
    *,
    measured: tuple[int, int],
    width: int,
    step_ns: int,
    mean_step_ns: float,
    stages: Mapping[int, tuple[int, ...]] | None = None,
    hosts: Mapping[int, str] | None = None,
    clocks: Mapping[int, DeviceClock | str] | None = None,
    slack_of: SlackOf | None = None,
) -> tuple[tuple[StragglerResult, ...], tuple[Caveat, ...]]:
    """Return the ranks that the others waited for notably, the costliest first, and caveats about the other ranks.

    Parameters:
        measured: the first and the last measured step.
        step_ns, mean_step_ns: median and mean of the steps.
        stages: pipeline stages by rank. hosts: host by rank. clocks: of the devices by rank, or why they are not known.
        slack_of: returns the slack of ranks, the excess that pipeline bubbles absorb.
    """
    waits = [rank for rank in waits if len(rank.work)]
    if len(waits) < 2:
        return (), ()
    balance = _weigh(waits, num_bins=-(-(measured[1] - measured[0] + 1) // width))
    threshold = max(MIN_WAIT_NS, int(MIN_WAIT * step_ns))
    notable = (balance.lag.max(axis=1) >= threshold) & (balance.blame.max(axis=1) > 0)
    foremost = np.where(notable, balance.blame.argmax(axis=1), -1)
    mean_lag = balance.lag.mean(axis=0)
    num_ranks, num_bins = len(balance.ranks), len(foremost)
    # What all ranks lag alike is no fault of one: the mean of the others is subtracted.
    lag = mean_lag - (mean_lag.sum() - mean_lag) / (num_ranks - 1)
    times_foremost = np.bincount(foremost[foremost >= 0], minlength=num_ranks)
    share = times_foremost / max(1, int(notable.sum()))
    # Over few steps noise looks like a straggler, so that it must cost more.
    min_cost = MIN_COST if measured[1] - measured[0] + 1 >= ENOUGH_STEPS else MIN_COST_OF_FEW
    chosen = (lag >= min_cost * step_ns) & (share >= min(0.6, 2 / num_ranks))
    chosen &= times_foremost >= min(MIN_STEPS, num_bins)
    more = beyond_the_others(balance.excess)
    times_late = find_late(balance.excess, least=MIN_COST * step_ns).sum(axis=0)
    # A rank that is far behind in few bins may be so by chance: all bins are tested together.
    for at in np.flatnonzero(chosen & (times_late < MIN_STEPS)).tolist():
        chosen[at] = exceeds_chance(more[:, at])
    blame = balance.blame.mean(axis=0)
    most_blamed = sorted(np.flatnonzero(chosen).tolist(), key=lambda at: (-blame[at], at))
    mending = None
    # Ranks of a pipeline wait by plan: there the gain is the lag that bubbles do not absorb, elsewhere waits are
    # replayed.
    if not stages:
        mending = Mending(graph=balance.graph, excess=balance.excess, blocked=balance.blocked, unclear=balance.unclear)
        most_blamed += mending.find_hidden(most_blamed, least=min_cost * step_ns, notable=threshold)
        whole = mending.mean_gain(most_blamed) if most_blamed else None
        if whole is not None and whole < MIN_GAIN * step_ns:
            most_blamed = []
    results: list[StragglerResult] = []
    for place, at in enumerate(most_blamed):
        phases_ns = _explain(waits, at)
        phase = next(iter(phases_ns), None)
        stage = _find_slow_part(balance, at, stages or {}) if phase in _COMPUTE else None
        if stage is not None and balance.surplus[at] < MIN_STAGE:
            continue
        rank = int(balance.ranks[at])
        gain: float | None
        if mending is None:
            slack = slack_of(rank, whole_stage=stage is not None) if slack_of is not None else 0
            gain, together = max(0.0, _lag_of(mean_lag, at, stage, balance) - slack), None
        else:
            gain = mending.mean_gain([at])
            together = mending.mean_gain(most_blamed[: place + 1]) if place else gain
        results.append(
            StragglerResult(
                rank=rank,
                last_share=float(share[at]),
                slowdown=_speed_up(step_ns, mean_step_ns, gain),
                blame_ns_per_step=int(blame[at]),
                lag_ns_per_step=None if gain is None else int(gain),
                together_ns_per_step=None if together is None else int(together),
                slowdown_together=_speed_up(step_ns, mean_step_ns, together),
                since_step=measured[0] + find_onset(balance.excess[:, at]) * width,
                phase=phase,
                phases_ns=phases_ns,
                cause=_find_cause(balance, at, phase, stage, hosts or {}, clocks or {}),
                waiters=_find_waiters(balance, at) if len(results) < MAX_TRACED else (),
            )
        )
    turns = () if mending is None else _tell_turns(mending, most_blamed, balance.ranks, step_ns, num_bins)
    return tuple(results), (*turns, *_tell_unknown_clocks(results, clocks or {}))


def _tell_unknown_clocks(results: Sequence[StragglerResult], clocks: Mapping[int, DeviceClock | str]) -> list[Caveat]:
    """Return of which slow ranks it is not known whether the clock of their GPU explains them, and why."""
    ranks_by_reason: dict[str, list[int]] = {}
    for result in results:
        clock = clocks.get(result.rank)
        if isinstance(clock, str) and result.cause is None and result.phase in _ON_DEVICE:
            ranks_by_reason.setdefault(clock, []).append(result.rank)
    return [
        Caveat("stragglers", f"whether the clock of a GPU slows {list_ranks(ranks)} down is not known: {reason}")
        for reason, ranks in ranks_by_reason.items()
    ]


def _tell_turns(
    mending: Mending, listed: Sequence[int], ranks: Column, step_ns: int, num_bins: int
) -> tuple[Caveat, ...]:
    """Return the sentence about ranks that are late in turns, if there are any."""
    turns = mending.find_turns(listed, least=MIN_COST * step_ns)
    if turns is None:
        return ()
    named = list_ranks(ranks[turns.at].tolist())
    late = f"{named} was late" if len(turns.at) == 1 else f"{named} were late, in turns"
    return (
        Caveat(
            "stragglers",
            f"in {turns.steps} of {num_bins} steps {late}: without that a step would take "
            f"{format_ns(int(turns.gain_ns))} less on average, but in too few steps each to be listed",
        ),
    )


def _speed_up(step_ns: int, mean_step_ns: float, gain: float | None) -> float | None:
    """Return the median step over what is left of it; the mean step where some are long, and the gain is more."""
    whole = step_ns if gain is not None and gain < step_ns else mean_step_ns
    return whole / (whole - gain) if gain is not None and gain < whole else None


def _lag_of(mean_lag: Cells, at: int, stage: Sequence[int] | None, balance: _Balance) -> float:
    """Return the lag of a rank less the mean of those that are not slow with it: of the others, or the other stages."""
    others = ~np.isin(balance.ranks, [balance.ranks[at]] if stage is None else stage)
    return float(mean_lag[at] - mean_lag[others].mean())


def _weigh(waits: Sequence[RankWaits], *, num_bins: int) -> _Balance:
    """Put all ranks side by side and pass waits back to their causes."""
    ranks = np.array([rank.rank for rank in waits], np.int64)
    num_ranks = len(ranks)
    steps = np.concatenate([rank.steps for rank in waits])  # of each rank bin by bin
    lengths = np.array([len(rank.steps) for rank in waits])
    first = np.cumsum(lengths) - lengths
    known = np.flatnonzero(steps)
    at = np.repeat(np.arange(num_ranks), lengths)[known]
    cell = known - first[at], at
    work, blocked, unclear = np.full((3, num_bins, num_ranks), np.nan)
    for table, columns in (
        (work, [rank.work for rank in waits]),
        (blocked, [rank.blocked for rank in waits]),
        (unclear, [rank.unclear for rank in waits]),
    ):
        table[cell] = np.concatenate(columns)[known] / steps[known]
    waiter = np.repeat(np.arange(num_ranks), [len(rank.bins) for rank in waits])
    bins, culprits, waited = (
        np.concatenate(columns)
        for columns in zip(*((rank.bins, rank.culprits, rank.waited) for rank in waits), strict=True)
    )
    culprit = np.minimum(np.searchsorted(ranks, culprits), num_ranks - 1)
    there = ranks[culprit] == culprits
    waited = waited / np.maximum(steps[first[waiter] + bins], 1)
    excess = find_excess(work)
    graph = WaitGraph(
        waiter=(bins * num_ranks + waiter)[there],
        culprit=(bins * num_ranks + culprit)[there],
        waited=waited[there],
        excess=excess.ravel(),
    )
    shape = (num_bins, num_ranks)
    # Who waited for a rank is the same in every step, by and large; with jitter in a single one anybody may.
    meets = distinct((graph.waiter % num_ranks) * num_ranks + graph.culprit % num_ranks) % num_ranks
    num_waiters = np.maximum(np.bincount(meets, minlength=num_ranks), 1)
    blame = np.minimum(pass_back(graph).reshape(shape), (num_ranks - 1) * excess)
    total = excess.sum(axis=0)
    return _Balance(
        ranks=ranks,
        graph=graph,
        excess=excess,
        blocked=blocked,
        unclear=unclear,
        blame=blame,
        lag=np.minimum(excess, blame / num_waiters),
        surplus=total / np.maximum(np.nansum(work, axis=0) - total, 1),
    )


def _explain(waits: Sequence[RankWaits], at: int) -> dict[str, int]:
    """Return in which phases the work of a rank exceeds the median of the others, ns a step, the longest first."""
    means = np.array([rank.phases / max(1, int(rank.steps.sum())) for rank in waits])
    excess = find_excess(means.T)[:, at]
    total = float(excess.sum())
    by_phase = sorted(zip(WORK, excess.tolist(), strict=True), key=lambda item: -item[1])
    return {phase: int(ns) for phase, ns in by_phase if ns > MIN_PHASE * total}


def _find_waiters(balance: _Balance, at: int) -> tuple[Waiter, ...]:
    """Return who paid for a straggler, those who paid most first."""
    num_ranks = len(balance.ranks)
    is_culprit: Mask = np.arange(len(balance.graph.excess)) % num_ranks == at
    cost = trace_forward(balance.graph, is_culprit).reshape(balance.excess.shape)
    mean = np.minimum(cost, balance.excess[:, at : at + 1]).mean(axis=0)
    mean[at] = 0
    order = np.argsort(-mean, kind="stable")[:MAX_WAITERS]
    return tuple(Waiter(rank=int(balance.ranks[i]), wait_ns=int(mean[i])) for i in order if mean[i] >= 1)


def _find_slow_part(balance: _Balance, at: int, part_of: Mapping[int, Hashable]) -> list[int] | None:
    """Return the ranks of the same part as this one where all of them are slow and no others; None where not."""
    excess = balance.excess.mean(axis=0)
    ranks = balance.ranks.tolist()
    mine = part_of.get(ranks[at])
    peers = np.array([mine is not None and part_of.get(rank) == mine for rank in ranks])
    if not peers.any() or peers.all():
        return None
    apart = excess[peers].min() > max(0.5 * excess[at], 2 * excess[~peers].max())
    return balance.ranks[peers].tolist() if apart else None


def _find_cause(
    balance: _Balance,
    at: int,
    phase: str | None,
    stage: list[int] | None,
    hosts: Mapping[int, str],
    clocks: Mapping[int, DeviceClock | str],
) -> str | None:
    """Return the cause of a rank's lateness where the records show it, else None."""
    if stage is not None:
        alone = " or its rank is slow" if len(stage) == 1 else ""
        return f"pipeline stage of {list_ranks(stage)}: it has more work than the others{alone}"
    rank = int(balance.ranks[at])
    clock = clocks.get(rank)
    if isinstance(clock, DeviceClock) and phase in _ON_DEVICE:
        others = [own for other, own in clocks.items() if other != rank and isinstance(own, DeviceClock)]
        if cause := clock.explain(others, surplus=float(balance.surplus[at])):
            return cause
    host = _find_slow_part(balance, at, hosts)
    if host is not None and len(host) > 1:
        return f"host {hosts[rank]}: all of its ranks are slow"
    return _CAUSES.get(phase or "")
