"""Record what a rank spends its step on: data, forward, backward, optimizer, checkpoint, and memory at each step."""

import os
import resource
from collections.abc import Callable
from typing import Any

from dtprof import events, fence
from dtprof.capture.recorder import Recorder
from dtprof.run_format import schema

TRAINING = (events.FORWARD, events.BACKWARD, events.OPTIMIZER)
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Phases:
    """Hooks into torch that open and close spans; the recorder is asked for at the first event."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Keep the way to the recorder, which opens the log of this rank when told that the process trains."""
        self._recorder = recorder
        self._backward_since_step = False
        self._optimizer_spans: list[int] = []
        self._forward_span = 0
        self._steps_seen = 0
        self._statm: int | None = None

    @fence.fenced("the phases of a step")
    def install(self) -> None:
        """Hook torch's autograd, optimizers, data loader, gradient scaler, DDP and torch.save."""
        import torch.amp.grad_scaler
        import torch.autograd
        import torch.nn.parallel.distributed as ddp
        import torch.optim.optimizer as optimizers
        import torch.utils.data.dataloader as dataloader

        self._span_around(torch.autograd, "backward", events.BACKWARD)
        self._span_around(torch.autograd, "grad", events.BACKWARD)
        self._span_around(dataloader._BaseDataLoaderIter, "__next__", events.DATA)
        self._span_around(torch, "save", events.CHECKPOINT)
        optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._hook_scaler(torch.amp.grad_scaler.GradScaler)
        self._hook_ddp(ddp.DistributedDataParallel)

    def _span_around(self, owner: Any, name: str, phase: str) -> None:
        """Replace a function by one that records a span around it."""
        original = getattr(owner, name)
        begin, end = self._begin, self._end
        is_backward = phase == events.BACKWARD
        is_data = phase == events.DATA

        def with_span(*arguments: Any, **options: Any) -> Any:
            span = begin(phase)
            failed = True
            try:
                result = original(*arguments, **options)
                failed = False
                return result
            except StopIteration:
                failed = not is_data
                raise
            finally:
                end(span, failed=failed, is_backward=is_backward)

        with_span.__name__ = original.__name__
        with_span.__qualname__ = original.__qualname__
        with_span.__doc__ = original.__doc__
        with_span.__module__ = original.__module__
        with_span.__wrapped__ = original  # type: ignore[attr-defined]
        with_span._torchdynamo_disable = True  # type: ignore[attr-defined]
        setattr(owner, name, with_span)

    @fence.fenced("the begin of a phase")
    def _begin(self, phase: str) -> int:
        recorder = self._recorder(phase in TRAINING)
        if recorder is None:
            return 0
        if phase == events.BACKWARD:
            self._backward_since_step = True
        return recorder.begin_span(recorder.name_id(phase), phase == events.BACKWARD)

    @fence.fenced("the end of a phase")
    def _end(self, span: int | None, *, failed: bool = False, flags: int = 0, is_backward: bool = False) -> None:
        recorder = self._recorder(False)
        if span and recorder is not None:
            recorder.end_span(span, failed, flags, is_backward)

    def _before_optimizer(self, *_: Any) -> None:
        self._optimizer_spans.append(self._begin(events.OPTIMIZER) or 0)

    def _after_optimizer(self, *_: Any) -> None:
        self._end(self._optimizer_spans.pop() if self._optimizer_spans else 0)
        self._end_step()

    @fence.fenced("the end of a step")
    def _end_step(self) -> None:
        """Count a step, unless this optimizer belongs to the same burst as the one before it."""
        self._steps_seen += 1
        if not self._backward_since_step:
            return
        self._backward_since_step = False
        recorder = self._recorder(True)
        if recorder is not None:
            recorder.advance_step()
            for name, value in self._memory():
                recorder.sample(recorder.name_id(name), value)

    def _memory(self) -> list[tuple[str, int]]:
        """Return what this process holds, in bytes."""
        import torch

        if self._statm is None:
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        resident = int(os.pread(self._statm, 128, 0).split()[1]) * PAGE_BYTES
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        values = [(events.RSS_BYTES, resident), (events.PEAK_RSS_BYTES, peak)]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            values += [
                (events.CUDA_ALLOCATED_BYTES, torch.cuda.memory_allocated()),
                (events.CUDA_RESERVED_BYTES, torch.cuda.memory_reserved()),
                (events.CUDA_PEAK_ALLOCATED_BYTES, torch.cuda.max_memory_allocated()),
            ]
        return values

    def _hook_scaler(self, scaler: Any) -> None:
        """See the steps that a GradScaler skips because gradients overflowed: no optimizer hook fires for them."""
        original = scaler.step

        def step(scaler_self: Any, *arguments: Any, **options: Any) -> Any:
            seen = self._steps_seen
            result = original(scaler_self, *arguments, **options)
            if self._steps_seen == seen:
                self._end(self._begin(events.OPTIMIZER), flags=schema.FLAG["skipped"])
                self._end_step()
            return result

        step.__doc__ = original.__doc__
        step._torchdynamo_disable = True  # type: ignore[attr-defined]
        scaler.step = step

    def _hook_ddp(self, ddp: Any) -> None:
        """Record DDP's forward pass; compiled code is left as it is."""
        import torch.compiler

        before, after, is_compiling = ddp._pre_forward, ddp._post_forward, torch.compiler.is_compiling

        def pre_forward(module: Any, *inputs: Any, **options: Any) -> Any:
            if not is_compiling():
                self._end(self._forward_span, failed=True)  # the last one ended in an exception
                self._forward_span = self._begin(events.FORWARD) or 0
            return before(module, *inputs, **options)

        def post_forward(module: Any, output: Any) -> Any:
            result = after(module, output)
            if not is_compiling():
                span, self._forward_span = self._forward_span, 0
                self._end(span)
            return result

        ddp._pre_forward = pre_forward
        ddp._post_forward = post_forward
