"""Record what a rank spends its step on, by hooks into torch and Python: data, backward, checkpoints, pauses.

The forward pass, steps and memory have files of their own.
"""

import functools
import gc
import itertools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

from dtprof import fence, marks
from dtprof.capture.exhaustion import Exhaustion
from dtprof.capture.forward_passes import Forward
from dtprof.capture.frameworks.imports import after_import, replace_copies
from dtprof.capture.memory_sampler import Memory
from dtprof.capture.recorder import Recorder
from dtprof.capture.spans import Spans
from dtprof.capture.step_counter import Steps
from dtprof.capture.user_marks import UserMarks
from dtprof.capture.window_control import Windows
from dtprof.records import events

CHECKPOINTS = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_loader": ("load",),
    "torch.distributed.checkpoint.state_dict": (
        "get_state_dict",
        "get_model_state_dict",
        "get_optimizer_state_dict",
        "set_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
    ),
}
"""Functions that write, read, gather or spread a checkpoint."""
SHORTEST_PAUSE_NS = 1_000_000
MOST_PAUSES = 1_024
"""Collections, short ones too, of which the times are kept until the next phase."""
TIMES_A_PAUSE = 4
"""Two calls back, each for two arguments."""


class Phases:
    """All hooks that record phases, steps and memory of this process."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Keep the way to the recorder."""
        self._spans = Spans(recorder)
        self._forward = Forward(self._spans)
        self._memory = Memory(self._spans, self._forward)
        self.windows = Windows(self._memory)
        self._steps = Steps(self._spans, self._forward, self._memory, self.windows)
        self.exhaustion = Exhaustion(self._memory)

    def install(self) -> None:
        """Hook torch's autograd, optimizers, data loader, gradient scaler, models, checkpoints and compiler.

        Each for itself: a torch that lacks what one of them needs has the others.
        """
        self._hook_autograd()
        self._hook_loader()
        self._hook_files()
        for module, names in CHECKPOINTS.items():
            after_import(module, functools.partial(self._hook_checkpoints, names))
        after_import("torch.distributed.distributed_c10d", self._hook_groups)
        self._hook_recomputation()
        after_import("torch._dynamo.callback", self._hook_compiler)
        self._steps.install()
        self._forward.install()
        self._memory.install()
        self.windows.install()
        Pauses(self._spans).install()
        self._take_marks()

    @fence.fenced("the program's own marks")
    def _take_marks(self) -> None:
        import torch.compiler

        marks.send_to(UserMarks(self._spans, self._steps), torch.compiler.is_compiling)

    @fence.fenced("the backward pass")
    def _hook_autograd(self) -> None:
        import torch

        self._spans.around(torch.autograd, "backward", events.BACKWARD)
        self._spans.around(torch.autograd, "grad", events.BACKWARD)

    @fence.fenced("the wait for data")
    def _hook_loader(self) -> None:
        import torch.utils.data.dataloader as dataloader

        self._spans.around(dataloader._BaseDataLoaderIter, "__next__", events.DATA, no_failures=(StopIteration,))

    @fence.fenced("checkpoints")
    def _hook_files(self) -> None:
        """See files of torch written and read; by either name of the function, under one of which it is pickled."""
        import torch

        pickling = _code_that_pickles(torch.storage)
        for name in ("save", "load"):
            original = vars(torch)[name]
            watched = self._spans.around(torch, name, events.CHECKPOINT, outermost=True, not_from=pickling)
            if vars(torch.serialization).get(name) is original:
                setattr(torch.serialization, name, watched)

    @fence.fenced("checkpoints")
    def _hook_checkpoints(self, names: tuple[str, ...], module: Any) -> None:
        package = sys.modules.get("torch.distributed.checkpoint")
        for name in names:
            original = getattr(module, name, None)
            watched = self._spans.around(module, name, events.CHECKPOINT, outermost=True)
            if watched is not None and getattr(package, name, None) is original:
                setattr(package, name, watched)

    @fence.fenced("the creation of groups")
    def _hook_groups(self, module: Any) -> None:
        """Record when a rank makes a group: a rank that does not, where others do, holds them up."""
        for name in ("new_group", "split_group"):
            original = getattr(module, name, None)
            watched = self._spans.around(module, name, events.NEW_GROUP)
            if watched is not None:
                replace_copies(original, name, watched)

    @fence.fenced("what is computed again in a backward pass")
    def _hook_recomputation(self) -> None:
        """See what activation checkpointing computes again, with and without re-entering autograd."""
        import torch
        import torch.utils.checkpoint

        checkpoint: Any = torch.utils.checkpoint
        spans, stop = self._spans, checkpoint._StopRecomputationError
        frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
        make_frame, forward = frame.__init__, function.forward

        @functools.wraps(make_frame)
        def make(self: Any, recompute_fn: Any, *arguments: Any, **options: Any) -> None:
            make_frame(self, spans.watched(recompute_fn, events.RECOMPUTE, no_failures=(stop,)), *arguments, **options)

        @functools.wraps(forward)
        def run(context: Any, run_function: Any, *arguments: Any) -> Any:
            recompute = spans.watched(run_function, events.RECOMPUTE)
            in_backward = torch._C._current_graph_task_id

            def run_or_recompute(*inputs: Any) -> Any:
                return run_function(*inputs) if in_backward() == -1 else recompute(*inputs)

            return forward(context, run_or_recompute, *arguments)

        frame.__init__ = make
        function.forward = staticmethod(run)

    @fence.fenced("compilation")
    def _hook_compiler(self, module: Any) -> None:
        """Torch calls these at the begin and end of the outermost compilation, one at a time in the process."""
        begun: list[int] = []
        module.callback_handler.register_start_callback(lambda *_: begun.append(self._spans.begin(events.COMPILE) or 0))
        module.callback_handler.register_end_callback(lambda *_: self._spans.end(begun.pop() if begun else 0))


def _code_that_pickles(storage: Any) -> frozenset[types.CodeType]:
    """Return the code of torch that saves and loads single tensors for pickle, which is no checkpoint."""
    kinds = [vars(storage).get(name) for name in ("UntypedStorage", "_StorageBase", "TypedStorage")]
    functions = [
        vars(storage).get("_load_from_bytes"),
        *(vars(kind).get("__reduce__") for kind in kinds if kind is not None),
    ]
    return frozenset(function.__code__ for function in functions if isinstance(function, types.FunctionType))


class Pauses:
    """The pauses of Python's garbage collector that cost something.

    A collection may begin anywhere, inside the recorder too: only its times are noted, and recorded at the next phase.
    They are noted without a line of Python: a signal that comes during a collection is handled at the first one after
    it, and in a callback of the collector what its handler raises would be lost.
    """

    def __init__(self, spans: Spans) -> None:
        """Record on these spans."""
        self._times: deque[int] = deque(maxlen=TIMES_A_PAUSE * MOST_PAUSES)
        spans.pauses, spans.past = self._times, self._take

    def install(self) -> None:
        """Be told of collections."""
        gc.callbacks.append(_noting_times(self._times))

    def _take(self) -> Iterator[tuple[int, int]]:
        """Give begin and end of the pauses since the last call."""
        next_time = self._times.popleft
        while len(self._times) >= TIMES_A_PAUSE:
            begin, _, _, end = next_time(), next_time(), next_time(), next_time()
            if end - begin >= SHORTEST_PAUSE_NS:
                yield begin, end


def _noting_times(times: deque[int]) -> Callable[[str, dict[str, int]], object]:
    """Return a callback of the collector that appends the time, once for each of its two arguments."""
    append_now = map(times.append, iter(monotonic_ns, None))
    for_each = functools.partial(next, map(operator.is_, append_now, itertools.repeat(None)))
    return functools.partial(max, key=for_each)  # max calls its key for each, and compares True with True
