"""Time messages between pairs of ranks, and collectives of growing size, within a budget that rank 0 keeps.

Every repetition begins together; a collective takes as long as on its slowest rank. Nothing of the program runs.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from dtprof.launch.rank_probe.rank_rendezvous import Deadline
from dtprof.records.rank_probes import CollectiveTimes, Link, RankProbe

MOST_SERIAL_PAIRS = 66
"""Up to this many pairs (12 ranks) take turns; more meet in rounds of pairs that share no rank."""
MESSAGE_BYTES = 4 << 20
MESSAGES = 5
PINGS = 30
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 24, 1 << 26)
REPETITIONS = 5
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def pair_rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return every pair of ranks once, in rounds: one pair each where they are few, else as in a tournament."""
    pairs = list(itertools.combinations(ranks, 2))
    if len(pairs) <= MOST_SERIAL_PAIRS:
        return [[pair] for pair in pairs]
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


class Timings:
    """The measurements of one rank on one back end."""

    def __init__(self, dist: Any, torch: Any, probe: RankProbe, *, backend: str, group: Any, device: Any) -> None:
        """Measure on a group of all ranks, with tensors of a device."""
        self._dist, self._torch, self._probe = dist, torch, probe
        self._backend, self._group, self._device = backend, group, device
        self.links: list[Link] = []
        self.collectives: list[CollectiveTimes] = []
        self.unmeasured: list[str] = []

    def measure_pairs(self, deadline: Deadline) -> None:
        """Time messages between all pairs, as far as the time goes."""
        rounds = pair_rounds(range(self._probe.world_size))
        ping = self._torch.zeros(8, dtype=self._torch.uint8, device=self._device)
        message = self._torch.zeros(MESSAGE_BYTES, dtype=self._torch.uint8, device=self._device)
        for number, pairs in enumerate(rounds):
            if not self._goes_on(deadline):
                left = sum(map(len, rounds[number:]))
                self.unmeasured.append(
                    f"{left} pairs of ranks were not measured: the time was up; give more with --time"
                )
                break
            for first, second in pairs:
                if self._probe.rank in (first, second):
                    self._measure_pair(first, second, ping, message)

    def _measure_pair(self, first: int, second: int, ping: Any, message: Any) -> None:
        other = second if self._probe.rank == first else first
        for sender, receiver in ((first, second), (second, first)):
            latencies = [self._round_trip_ns(sender, other, ping, ping) / 2 for _ in range(PINGS)][2:]
            times = [self._round_trip_ns(sender, other, message, ping) for _ in range(MESSAGES + 1)][1:]
            if self._probe.rank == sender:
                latency = min(latencies)
                rates = [MESSAGE_BYTES / max(1.0, taken - latency) for taken in times]
                self.links.append(
                    Link(
                        sender=sender,
                        receiver=receiver,
                        gb_per_s=rates,
                        latency_ns=latencies,
                        backend=self._backend,
                    )
                )

    def _round_trip_ns(self, sender: int, other: int, sent: Any, answer: Any) -> float:
        """Send a tensor one way and a small one back; return the time that the sender saw."""
        began = time.perf_counter_ns()
        if self._probe.rank == sender:
            self._dist.send(sent, other, group=self._group)
            self._dist.recv(answer, other, group=self._group)
        else:
            self._dist.recv(sent, other, group=self._group)
            self._dist.send(answer, other, group=self._group)
        self._synchronize()
        return time.perf_counter_ns() - began

    def measure_collectives(self, name: str, ranks: list[int], group: Any, deadline: Deadline) -> None:
        """Time each collective of growing size on a group; sizes end where one takes too long for what is left."""
        if self._probe.rank in ranks:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # names that newer versions of torch deprecate
                self._measure_collectives(name, ranks, group, deadline)

    def _measure_collectives(self, name: str, ranks: list[int], group: Any, deadline: Deadline) -> None:
        for op in OPERATIONS:
            per_op = Deadline(deadline.left_s() / (len(OPERATIONS) - OPERATIONS.index(op)))
            for nbytes in SIZES:
                try:
                    issue, moved = self._prepare(op, nbytes, len(ranks), ranks[0], group)
                    issue()
                except (RuntimeError, ValueError, NotImplementedError) as error:  # the back end lacks the operation
                    text = str(error).strip().splitlines()
                    self.unmeasured.append(f"{op} on {self._backend}: {text[0] if text else type(error).__name__}")
                    break
                times = [self._time(issue, group) for _ in range(REPETITIONS)]
                self.collectives.append(
                    CollectiveTimes(group=name, ranks=ranks, op=op, nbytes=moved, times_ns=times, backend=self._backend)
                )
                # The next size takes some eight times as long: all ranks see the same times and stop together.
                if sum(times) * 8 / 1e9 > self._least(per_op.left_s(), group):
                    break

    def _prepare(self, op: str, nbytes: int, size: int, root: int, group: Any) -> tuple[Callable[[], object], int]:
        """Return what issues the operation, and S: the bytes by which nccl-tests counts it."""
        dist, count = self._dist, max(1, nbytes // 4 // size)
        part = self._torch.zeros(count, device=self._device)
        whole = self._torch.zeros(count * size, device=self._device)
        moved = whole.numel() * 4
        if op == "all_reduce":
            return lambda: dist.all_reduce(whole, group=group), moved
        if op == "broadcast":
            return lambda: dist.broadcast(whole, root, group=group), moved
        if op == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group), moved
        if op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group), moved
        result = self._torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(result, whole, group=group), moved

    def _time(self, issue: Callable[[], object], group: Any) -> float:
        """Return the time of one operation on its slowest rank, from a common begin."""
        self._dist.barrier(group=group)
        self._synchronize()
        began = time.perf_counter_ns()
        issue()
        self._synchronize()
        return -self._least(-float(time.perf_counter_ns() - began), group)

    def _least(self, value: float, group: Any) -> float:
        """Return the smallest of the values of all ranks."""
        tensor = self._torch.tensor([value], dtype=self._torch.float64, device=self._device)
        self._dist.all_reduce(tensor, op=self._dist.ReduceOp.MIN, group=group)
        return float(tensor.item())

    def _goes_on(self, deadline: Deadline) -> bool:
        return self._least(0.0 if deadline.is_over() else 1.0, self._group) > 0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()
