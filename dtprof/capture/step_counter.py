"""Count steps: by the optimizers of the program, or where it says so itself by dtprof.step()."""

import functools
import threading
from typing import Any

from dtprof import fence
from dtprof.capture.forward_passes import Forward
from dtprof.capture.memory_sampler import Memory
from dtprof.capture.spans import Spans
from dtprof.capture.window_control import Windows
from dtprof.records import events, schema


class _Stepping(threading.local):
    """The optimizers whose steps a thread is in, one inside the other."""

    def __init__(self) -> None:
        """Start with none; called in each thread at its first use."""
        self.spans: list[tuple[int, int]] = []
        """Id of the optimizer and its span."""


class Steps:
    """A row of optimizer steps with no backward pass between them ends one step together."""

    def __init__(self, spans: Spans, forward: Forward, memory: Memory, windows: Windows) -> None:
        """Record on these spans; memory is measured, and what the model was fed is told, where a step ends."""
        self._spans = spans
        self._forward = forward
        self._memory = memory
        self._windows = windows
        self._counted = 0
        self._before_marks = 0  # steps that were counted before the program said that it marks them itself
        self._marks = 0
        self._backward_since_step = False
        self._told_consumption = False
        self._stepping = _Stepping()
        self._seen = 0
        self._optimizers = memory.categories.optimizers

    @fence.fenced("steps")
    def install(self) -> None:
        """Hook optimizers and the gradient scaler."""
        import torch.optim.optimizer as optimizers

        self._spans.before_backward(self._before_backward)
        optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._hook_scaler()

    def _before_backward(self) -> None:
        self._backward_since_step = True

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._forward.close()
        if optimizer not in self._optimizers:
            self._see(optimizer)
        self._tell_consumption()
        open_spans = self._stepping.spans
        if open_spans:
            self._end_optimizer(id(optimizer), failed=True)  # its last step ended in an exception
        open_spans.append((id(optimizer), self._spans.begin(events.OPTIMIZER)))

    @fence.fenced("the model of an optimizer")
    def _see(self, optimizer: Any) -> None:
        """Find the model of an optimizer that steps for the first time."""
        self._memory.see_optimizer(optimizer)
        self._forward.roots.search(optimizer)

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._tell_consumption()  # where a closure ran the model inside the optimizer's step
        self._end_optimizer(id(optimizer))
        self._end_by_optimizer()

    def _end_optimizer(self, optimizer: int, *, failed: bool = False) -> None:
        """End the span of an optimizer, and those inside it, which an exception has left."""
        open_spans = self._stepping.spans
        if any(optimizer == known for known, _ in open_spans):
            known = 0
            while known != optimizer and open_spans:
                known, span = open_spans.pop()
                self._spans.end(span, failed=failed or known != optimizer)

    def _end_by_optimizer(self) -> None:
        """Count a step, unless this optimizer belongs to the same burst as the one before it."""
        self._seen += 1
        if self._backward_since_step:
            self._backward_since_step = self._told_consumption = False
            if not self._marks:
                self._end()

    def _tell_consumption(self) -> None:
        """Tell what was fed before the end of the step is recorded: the time then says to which step it belongs."""
        if self._backward_since_step and not self._marks and not self._told_consumption:
            self._told_consumption = True
            self._forward.consumption.end_step()

    @fence.fenced("the end of a step")
    def mark(self, tokens: object = None) -> None:
        """Count a step where the program says so; from now on only these count."""
        if not self._marks:
            self._before_marks = self._counted
        self._marks += 1
        self._forward.consumption.end_step(tokens)
        self._spans.mark(events.STEP, self._marks)
        self._end()

    @fence.fenced("the end of a step")
    def _end(self) -> None:
        recorder = self._spans.recorder(True)
        if recorder is not None:
            self._counted = recorder.advance_step()
            self._memory.at_step_end(recorder)
            self._forward.roots.forget()
            self._windows.at_step_end(self._counted - self._before_marks)

    @fence.fenced("steps that a GradScaler skips")
    def _hook_scaler(self) -> None:
        """See the steps that a GradScaler skips because gradients overflowed: no optimizer hook fires for them."""
        import torch.amp.grad_scaler

        scaler: Any = torch.amp.grad_scaler.GradScaler
        original = scaler.step

        @functools.wraps(original)
        def step(scaler_self: Any, *arguments: Any, **options: Any) -> Any:
            seen = self._seen
            result = original(scaler_self, *arguments, **options)
            if self._seen == seen:
                self._tell_consumption()
                self._spans.end(self._spans.begin(events.OPTIMIZER), flags=schema.FLAG["skipped"])
                self._end_by_optimizer()
            return result

        step._torchdynamo_disable = True  # type: ignore[attr-defined]
        scaler.step = step
