"""What a synthetic job is: its layout, what a step costs, and what is wrong with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dtprof.intervals import Column

AXES = ("pp", "dp", "tp")
WORLD = "world"


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """How the clock of a host runs: it shows offset + (1 + drift) * true time, from a jump on so much more."""

    offset_ns: int = 0
    drift_ppm: float = 0.0
    jump_ns: int = 0
    jumps_at_ns: int = 0  # true time
    error_ns: int = 2_000  # of the measurements that the launcher is taken to have made
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class Spell:
    """Steps in which some ranks compute so many times as long; steps count from 0."""

    ranks: tuple[int, ...]
    factor: float
    first: int = 0
    last: int | None = None  # None: to the end


def take_turns(ranks: Sequence[int], factor: float, *, every: int, steps: int) -> tuple[Spell, ...]:
    """Return the spells of a slowness that moves from rank to rank, `every` so many steps."""
    return tuple(
        Spell(ranks=(ranks[turn % len(ranks)],), factor=factor, first=first, last=first + every - 1)
        for turn, first in enumerate(range(0, steps, every))
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job. Ranks count through tp first, then dp, then pp; times in ns."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    steps: int = 8
    microbatches: int = 1  # with pp: of each step; without: gradient accumulation
    layers: int = 2  # of each stage
    interleave_backward: bool = True  # 1F1B; else all forwards first (GPipe)
    layer_ns: int = 1_000_000  # forward; backward takes twice as long
    stage_factor: tuple[float, ...] = ()  # how much slower each stage is; empty: all alike
    jitter: float = 0.0  # standard deviation of each computation, relative
    data_ns: int = 100_000
    host_ns: int = 50_000  # between the data and the forward pass, in no phase
    optimizer_ns: int = 200_000
    tp_ns: int = 100_000  # transfer of each all_reduce of activations
    dp_ns: int = 300_000  # of each layer's gradients
    world_ns: int = 50_000  # of the all_reduce of the gradient norm
    message_ns: int = 20_000  # between stages
    send_ns: int = 5_000  # a sender is blocked this long
    overlapped: bool = False  # gradients are reduced while backward goes on
    seed: int = 0

    slow: Mapping[int, float] = field(default_factory=dict)  # rank -> how much longer it computes
    spells: tuple[Spell, ...] = ()  # what makes ranks slow for some steps only
    delays: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (rank, step from 0) -> before its data
    ranks_per_host: int = 0  # 0: all on one
    clocks: Mapping[int, HostClock] = field(default_factory=dict)  # host -> its clock; others show true time
    lost: frozenset[int] = frozenset()  # ranks that left nothing
    killed: Mapping[int, int] = field(default_factory=dict)  # rank -> events it could still record
    cut: Mapping[int, int] = field(default_factory=dict)  # rank -> bytes that are left of its last segment
    dropped: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # rank -> first event lost, first kept again
    archived: bool = False  # full segments are archives
    repeats: int = 1  # the log has the steps so many times over: long runs that take no more memory to write

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.dp * self.tp)

    def host_of(self, rank: int) -> int:
        """Return the number of the host of a rank."""
        return rank // self.ranks_per_host if self.ranks_per_host else 0

    def ranks_on(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(rank for rank in range(self.world_size) if self.host_of(rank) == host)

    def factors_in(self, step: int) -> dict[int, float]:
        """Return how many times as long ranks compute in a step, of those that are slow."""
        factors = dict(self.slow)
        for spell in self.spells:
            if spell.first <= step and (spell.last is None or step <= spell.last):
                factors.update({rank: factors.get(rank, 1.0) * spell.factor for rank in spell.ranks})
        return factors

    def show(self, true_ns: int, host: int) -> int:
        """Return what the clock of a host shows at this moment."""
        return int(self.show_all(np.array([true_ns]), host)[0])

    def show_all(self, true_ns: Column, host: int) -> Column:
        """Return what the clock of a host shows at these moments."""
        clock = self.clocks.get(host, HostClock())
        drifted: Column = np.round(true_ns * (clock.drift_ppm * 1e-6)).astype(np.int64)
        jumped: Column = np.where(true_ns >= clock.jumps_at_ns, clock.jump_ns, 0)
        return true_ns + clock.offset_ns + drifted + jumped

    def groups_of(self, rank: int) -> dict[str, tuple[str, range]]:
        """Return name and members of the groups of a rank, by axis; axes of size 1 have none."""
        inner, replica, stage = rank % self.tp, rank // self.tp % self.dp, self.stage_of(rank)
        per_stage = self.dp * self.tp
        members = {
            WORLD: range(self.world_size),
            "dp": range(stage * per_stage + inner, (stage + 1) * per_stage, self.tp),
            "tp": range(rank - inner, rank - inner + self.tp),
            "pp": range(replica * self.tp + inner, self.world_size, per_stage),
        }
        return {
            axis: ("0" if axis == WORLD else f"{axis}{ranks[0]}", ranks)
            for axis, ranks in members.items()
            if axis == WORLD or len(ranks) > 1
        }

    def order(self, stage: int) -> list[tuple[str, int]]:
        """Return what a stage does: F or B and the microbatch."""
        count = self.microbatches
        ahead = min(self.pp - stage, count) if self.interleave_backward else count
        actions = [("F", i) for i in range(ahead)]
        for i in range(count):
            actions.append(("B", i))
            if ahead + i < count:
                actions.append(("F", ahead + i))
        return actions


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event of all ranks of a stage. Columns have one value a rank; times are true time."""

    name: str
    step: int
    begin: Column
    end: Column
    axis: str = ""  # of its group; empty: a span or sample
    peer: int = -1
    stage: int = -1
    microbatch: int = 0
    nbytes: int = 0
    wait_begin: Column | None = None  # begin and end of the wait; None: none
    wait_end: Column | None = None
    is_async: bool = False
    value: int = -1  # of a sample


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What really happened, in true time; arrays of shape (steps, ranks)."""

    begin: Column
    end: Column
    parts: dict[str, Column]
    events: Column  # of each rank

    def mean_parts(self, rank: int, first: int, last: int) -> dict[str, float]:
        """Return the mean of each part over the steps numbered first to last, from 1."""
        return {part: float(np.mean(values[first - 1 : last, rank])) for part, values in self.parts.items()}
