"""Count steps: by the optimizers of the program, or by its calls of dtprof.step()."""

import functools
import threading
from typing import Any

from dtprof import fence
from dtprof.capture.forward_passes import Forward
from dtprof.capture.memory_sampler import Memory
from dtprof.capture.spans import Spans
from dtprof.capture.string_entries import timed_entry
from dtprof.capture.window_control import Windows
from dtprof.records import events, schema


class _OpenOptimizers(threading.local):
    """The optimizers whose step() a thread is inside, outermost first."""

    def __init__(self) -> None:
        """Start with none; Python calls this in each thread at its first use."""
        self.spans: list[tuple[int, int]] = []
        """Id of the optimizer, handle of its span."""


def _number_of_steps(value: Any) -> int | None:
    """Return a count of steps as optimizers keep it; None of one on a device, which would make the host wait for it."""
    device = getattr(value, "device", None)
    if value is None or (device is not None and device.type != "cpu"):
        return None
    return int(value)


class CountedSteps:
    """Counts steps; optimizers that step with no backward pass between them end the same step."""

    def __init__(self, spans: Spans, forward: Forward, memory: Memory, windows: Windows) -> None:
        """Record through these spans; the end of a step also samples memory and records tokens and samples."""
        self._spans = spans
        self._forward = forward
        self._memory = memory
        self._windows = windows
        self._counted = 0
        self._before_marks = 0  # steps counted by optimizers before the first dtprof.step()
        self._marks = 0
        self._backward_since_step = False
        self._consumption_recorded = False
        self._open_optimizers = _OpenOptimizers()
        self._optimizer_steps = 0
        self._optimizers = memory.categories.optimizers

    @fence.fenced("steps")
    def install(self) -> None:
        """Hook optimizers and the gradient scaler."""
        import torch.optim.optimizer as optimizers

        self._spans.before(events.BACKWARD, self._before_backward)
        self._spans.before(events.GRAPH_REPLAY, self._before_replay)
        optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._hook_scaler()

    def _before_backward(self) -> None:
        self._backward_since_step = True

    def _before_replay(self) -> None:
        # A graph may hold the backward pass; one that an optimizer replays holds its own work.
        if not self._open_optimizers.spans:
            self._backward_since_step = True

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._forward.close()
        if optimizer not in self._optimizers:
            self._register(optimizer)
        self._record_consumption()
        open_spans = self._open_optimizers.spans
        if open_spans:
            self._end_optimizer(id(optimizer), failed=True)  # its last step raised: no post hook ran
        open_spans.append((id(optimizer), self._spans.begin(events.OPTIMIZER)))

    @fence.fenced("the model of an optimizer")
    def _register(self, optimizer: Any) -> None:
        """Remember an optimizer that steps for the first time, and search for its model."""
        self._optimizers.add(optimizer)
        self._record_age(optimizer)
        self._forward.roots.search(optimizer)

    @fence.fenced("the model of an optimizer")
    def _record_age(self, optimizer: Any) -> None:
        """Write how many steps an optimizer that steps for the first time here has made before: 0 without a state."""
        recorder = self._spans.recorder(True)
        if recorder is None:
            return
        import torch

        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        with torch._C.DisableTorchFunction():  # a program may watch what is asked of its tensors
            held = [
                optimizer.state[parameter].get("step") for parameter in parameters[:1] if parameter in optimizer.state
            ]
            steps = 0 if not optimizer.state else _number_of_steps(held[0]) if held else None
            elements = sum(parameter.numel() for parameter in parameters)
        if steps is not None:
            recorder.write_entry(timed_entry("optimizer", steps=steps, parameters=len(parameters), elements=elements))

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._record_consumption()  # a closure may have run the model inside the optimizer's step
        self._end_optimizer(id(optimizer))
        self._end_by_optimizer()

    def _end_optimizer(self, optimizer: int, *, failed: bool = False) -> None:
        """End the span of an optimizer, and the failed spans inside it."""
        open_spans = self._open_optimizers.spans
        if any(optimizer == known for known, _ in open_spans):
            known = 0
            while known != optimizer and open_spans:
                known, span = open_spans.pop()
                self._spans.end(span, failed=failed or known != optimizer)

    def _end_by_optimizer(self) -> None:
        """Count a step, unless no backward pass came since the optimizer before this one."""
        self._optimizer_steps += 1
        if self._backward_since_step:
            self._backward_since_step = self._consumption_recorded = False
            if not self._marks:
                self._end()

    def _record_consumption(self) -> None:
        """Record tokens and samples before the end of the step, whose time assigns them to it."""
        if self._backward_since_step and not self._marks and not self._consumption_recorded:
            self._consumption_recorded = True
            self._forward.consumption.end_step()

    @fence.fenced("the end of a step")
    def mark(self, tokens: object = None) -> None:
        """Count a step that the program marks; from the first one on, optimizers count none."""
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
            self._forward.roots.at_step_end()
            self._windows.at_step_end(self._counted - self._before_marks)

    @fence.fenced("steps that a GradScaler skips")
    def _hook_scaler(self) -> None:
        """Record the steps that a GradScaler skips after gradients overflowed: no optimizer hook fires for them."""
        import torch.amp.grad_scaler

        scaler: Any = torch.amp.grad_scaler.GradScaler
        original = scaler.step

        @fence.stands_in
        @functools.wraps(original)
        def step(scaler_self: Any, *arguments: Any, **options: Any) -> Any:
            before = self._optimizer_steps
            try:
                result = original(scaler_self, *arguments, **options)
            except BaseException as error:
                fence.hide_frame(error)
                raise
            if self._optimizer_steps == before:
                self._record_consumption()
                self._spans.end(self._spans.begin(events.OPTIMIZER), flags=schema.FLAG["skipped"])
                self._end_by_optimizer()
            return result

        step._torchdynamo_disable = True  # type: ignore[attr-defined]
        scaler.step = step
