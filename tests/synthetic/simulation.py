"""Let a synthetic job run: every rank has a clock that computations advance and communication brings together.

All ranks of a stage do the same, so that one array operation advances all of them. What the time went to is kept as it
is spent, with no arithmetic of intervals: tests compare this truth with what the analysis finds in the records.
"""

import numpy as np

from dtprof.intervals import Column
from dtprof.records import events
from tests.synthetic.job import WORLD, Event, Job, Truth

CALL_NS = 2_000
"""From the issue of an operation until the call returns."""
WORK_OF_ITS_OWN = ("data", "checkpoint", "optimizer")
PARTS = ("compute", "exposed_transfer", "exposed_wait", "bubble", "data", "checkpoint", "optimizer", "host", "idle")


class Simulation:
    """A job while it runs. `now` has the shape (pp, dp, tp)."""

    def __init__(self, job: Job) -> None:
        """Start all ranks at the same moment."""
        self.job = job
        self.tapes: list[list[Event]] = [[] for _ in range(job.pp)]
        self.now = np.full((job.pp, job.dp, job.tp), 1_000_000_000, np.int64)
        self._random = np.random.default_rng(job.seed)
        self._pace = np.ones(self.now.shape)
        self._pace *= np.array(job.stage_factor or (1.0,) * job.pp).reshape(-1, 1, 1)
        self._slow = np.ones(self.now.shape)
        self._step = 0
        self._parts = {part: np.zeros((job.steps, *self.now.shape), np.int64) for part in PARTS}
        self._ends = np.zeros((job.steps, *self.now.shape), np.int64)
        self._window: tuple[Column, Column] | None = None
        self._deferred: list[tuple[int, str, Column, Column]] | None = None  # what was spent before the window is known

    def run(self) -> Truth:
        """Let all steps pass."""
        started = self.now.copy()
        for step in range(self.job.steps):
            self._step = step
            self._run_step()
            self._ends[step] = self.now
        flat = (self.job.steps, self.job.world_size)
        begin = np.concatenate([started[None], self._ends[:-1]])
        return Truth(
            begin=begin.reshape(flat),
            end=self._ends.reshape(flat),
            parts={part: values.reshape(flat) for part, values in self._parts.items()},
            events=np.repeat([len(tape) for tape in self.tapes], self.job.dp * self.job.tp),
        )

    def _run_step(self) -> None:
        job = self.job
        self._window, self._deferred = None, [] if job.pp > 1 else None
        factors = job.factors_in(self._step)
        self._slow = np.ones(self.now.shape)
        self._slow.flat[list(factors)] = list(factors.values())
        delays = np.zeros(self.now.shape, np.int64)
        delays.flat[[rank for rank, step in job.delays if step == self._step]] = [
            delay for (_, step), delay in job.delays.items() if step == self._step
        ]
        for stage in range(job.pp):
            self._spend(stage, "host", delays[stage])
        for stage in range(job.pp):
            self._spend(stage, "data", np.full(self.now[stage].shape, job.data_ns), name=events.DATA)
            self._spend(stage, "host", np.full(self.now[stage].shape, job.host_ns))
        pending = self._run_pipeline() if job.pp > 1 else self._run_microbatches()
        for stage in range(job.pp):
            self._settle(stage, pending[stage])
        self._meet_world()
        for stage in range(job.pp):
            self._spend(stage, "optimizer", np.full(self.now[stage].shape, job.optimizer_ns), name=events.OPTIMIZER)
            self._add(stage, events.PEAK_RSS_BYTES, self.now[stage], self.now[stage], value=(4 << 30) + self._step)

    def _run_microbatches(self) -> list[list[tuple[Column, Column, Column]]]:
        job = self.job
        pending: list[tuple[Column, Column, Column]] = []
        for microbatch in range(job.microbatches):
            begin = self.now[0].copy()
            self._forward(0)
            self._add(0, events.FORWARD, begin, self.now[0])
            begin = self.now[0].copy()
            pending = self._backward(0, reduces=microbatch == job.microbatches - 1)
            self._add(0, events.BACKWARD, begin, self.now[0])
        return [pending]

    def _run_pipeline(self) -> list[list[tuple[Column, Column, Column]]]:
        """Run the actions of all stages, each as soon as what it needs has been sent."""
        stages = range(self.job.pp)
        begin = [self.now[stage].copy() for stage in stages]
        left = [self.job.order(stage)[::-1] for stage in stages]
        sent: dict[tuple[str, int, int], Column] = {}  # action, its stage, microbatch: when what it needs was sent
        pending: list[list[tuple[Column, Column, Column]]] = [[] for _ in stages]
        first: Column | None = None
        last = np.zeros_like(self.now[0])
        while any(left):
            for stage in stages:
                while left[stage]:
                    kind, microbatch = left[stage][-1]
                    source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
                    if source in stages and (kind, stage, microbatch) not in sent:
                        break
                    left[stage].pop()
                    if source in stages:
                        self._receive(stage, source, sent.pop((kind, stage, microbatch)))
                    first = self.now[stage].copy() if first is None else first
                    pending[stage] = self._act(stage, kind, microbatch) or pending[stage]
                    last = np.maximum(last, self.now[stage])
                    if target in stages:
                        sent[kind, target, microbatch] = self._send(stage, target)
        assert first is not None
        for stage in stages:
            self._add(stage, events.PP_STEP, begin[stage], self.now[stage], microbatch=1)
        deferred, self._deferred, self._window = self._deferred or [], None, (first, last)
        for stage, part, spent_from, spent_to in deferred:
            self._account(stage, part, spent_from, spent_to)
        return pending

    def _act(self, stage: int, kind: str, microbatch: int) -> list[tuple[Column, Column, Column]]:
        deferred, self._deferred = self._deferred, None
        begin = self.now[stage].copy()
        pending = []
        if kind == "F":
            self._forward(stage)
        else:
            pending = self._backward(stage, reduces=microbatch == self.job.microbatches - 1)
        name = events.PP_FORWARD if kind == "F" else events.PP_BACKWARD
        self._add(stage, name, begin, self.now[stage], acts_for=stage, microbatch=microbatch)
        self._deferred = deferred
        return pending

    def _forward(self, stage: int) -> None:
        for _ in range(self.job.layers):
            self._compute(stage, self.job.layer_ns)
            self._all_reduce(stage, "tp", self.job.tp_ns)

    def _backward(self, stage: int, *, reduces: bool) -> list[tuple[Column, Column, Column]]:
        """Run a backward pass; return issue, arrival and end of the reductions that go on after it."""
        pending: list[tuple[Column, Column, Column]] = []
        for _ in range(self.job.layers):
            self._compute(stage, 2 * self.job.layer_ns)
            self._all_reduce(stage, "tp", self.job.tp_ns)
            if reduces and self.job.dp > 1:
                if self.job.overlapped:
                    pending.append(self._issue(stage, pending))
                else:
                    self._all_reduce(stage, "dp", self.job.dp_ns, nbytes=4 << 20)
        return pending

    def _compute(self, stage: int, duration_ns: int) -> None:
        pace = self._pace[stage] * self._slow[stage]
        if self.job.jitter:
            pace = pace * np.clip(self._random.normal(1.0, self.job.jitter, pace.shape), 0.2, 5.0)
        self._spend(stage, "compute", (duration_ns * pace).astype(np.int64))

    def _spend(self, stage: int, part: str, duration: Column, *, name: str = "") -> None:
        begin = self.now[stage].copy()
        self.now[stage] += duration
        self._account(stage, part, begin, self.now[stage])
        if name:
            self._add(stage, name, begin, self.now[stage])

    def _account(self, stage: int, part: str, begin: Column, end: Column) -> None:
        """Count a stretch for a part; what of it lies in the window of the pipeline, outside actions, is bubble.

        A stage that works for itself there, while others still compute, is in no bubble.
        """
        if self._deferred is not None:
            self._deferred.append((stage, part, begin, end.copy()))
            return
        length = np.maximum(end - begin, 0)
        if self._window is not None and part not in WORK_OF_ITS_OWN:
            inside = np.clip(np.minimum(end, self._window[1]) - np.maximum(begin, self._window[0]), 0, length)
            self._parts["bubble"][self._step, stage] += inside
            length = length - inside
        self._parts[part][self._step, stage] += length

    def _block(self, stage: int, begin: Column, arrival: Column, end: Column) -> None:
        """Count a stretch in which a rank was blocked, before and after the last one arrived."""
        middle = np.clip(arrival, begin, end)
        self._account(stage, "exposed_wait", begin, middle)
        self._account(stage, "exposed_transfer", middle, end)

    def _arrival(self, stage: int, axis: str) -> Column:
        over = {"dp": 0, "tp": 1}[axis]
        arrival: Column = np.zeros_like(self.now[stage]) + self.now[stage].max(axis=over, keepdims=True)
        return arrival

    def _all_reduce(self, stage: int, axis: str, transfer_ns: int, *, nbytes: int = 1 << 20) -> None:
        """Reduce over an axis and wait for it."""
        if self.now.shape[{"dp": 1, "tp": 2}[axis]] == 1:
            return
        begin, arrival = self.now[stage].copy(), self._arrival(stage, axis)
        self.now[stage] = arrival + transfer_ns
        self._block(stage, begin, arrival, self.now[stage])
        self._add_waited(stage, "all_reduce", axis, begin, self.now[stage], nbytes=nbytes)

    def _issue(self, stage: int, before: list[tuple[Column, Column, Column]]) -> tuple[Column, Column, Column]:
        """Issue the reduction of a layer's gradients; one after the other they pass through the group."""
        begin, arrival = self.now[stage].copy(), self._arrival(stage, "dp").copy()
        end = np.maximum(arrival, before[-1][2] if before else 0) + self.job.dp_ns
        self.now[stage] += CALL_NS
        self._block(stage, begin, arrival, self.now[stage])
        return begin, arrival, end

    def _settle(self, stage: int, pending: list[tuple[Column, Column, Column]]) -> None:
        """Wait for reductions in flight, in their order."""
        for begin, arrival, end in pending:
            waited_from = self.now[stage].copy()
            self.now[stage] = np.maximum(waited_from, end)
            self._block(stage, waited_from, arrival, self.now[stage])
            self._add(
                stage,
                "all_reduce",
                begin,
                end,
                axis="dp",
                nbytes=4 << 20,
                waited=(waited_from, self.now[stage]),
                is_async=True,
            )

    def _meet_world(self) -> None:
        if self.job.world_size == 1:
            return
        arrival = np.full(self.now[0].shape, self.now.max())
        for stage in range(self.job.pp):
            begin = self.now[stage].copy()
            self.now[stage] = arrival + self.job.world_ns
            self._block(stage, begin, arrival, self.now[stage])
            self._add_waited(stage, "all_reduce", WORLD, begin, self.now[stage], nbytes=8)

    def _send(self, stage: int, target: int) -> Column:
        """Send a message and return when; it is off before anybody receives it."""
        begin: Column = self.now[stage].copy()
        self.now[stage] += self.job.send_ns
        self._account(stage, "exposed_transfer", begin, self.now[stage])
        self._add_waited(stage, "send", "pp", begin, self.now[stage], peer=target, nbytes=1 << 20)
        return begin

    def _receive(self, stage: int, source: int, sent: Column) -> None:
        begin = self.now[stage].copy()
        self.now[stage] = np.maximum(begin, sent) + self.job.message_ns
        self._block(stage, begin, sent, self.now[stage])
        self._add_waited(stage, "recv", "pp", begin, self.now[stage], peer=source, nbytes=1 << 20)

    def _add_waited(
        self, stage: int, name: str, axis: str, begin: Column, end: Column, *, nbytes: int, peer: int = -1
    ) -> None:
        """Add an operation that was waited for at once."""
        waited = (begin + CALL_NS, end.copy())
        self._add(stage, name, begin, end, axis=axis, peer=peer, nbytes=nbytes, waited=waited)

    def _add(
        self,
        stage: int,
        name: str,
        begin: Column,
        end: Column,
        *,
        axis: str = "",
        peer: int = -1,
        acts_for: int = -1,
        microbatch: int = 0,
        nbytes: int = 0,
        waited: tuple[Column, Column] | None = None,
        is_async: bool = False,
        value: int = -1,
    ) -> None:
        wait_begin, wait_end = waited if waited is not None else (None, None)
        self.tapes[stage].append(
            Event(
                name=name,
                step=self._step,
                begin=begin.flatten(),
                end=end.flatten(),
                axis=axis,
                peer=peer,
                stage=acts_for,
                microbatch=microbatch,
                nbytes=nbytes,
                wait_begin=None if wait_begin is None else wait_begin.flatten(),
                wait_end=None if wait_end is None else wait_end.flatten(),
                is_async=is_async,
                value=value,
            )
        )
