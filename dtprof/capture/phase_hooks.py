"""Record the phases of a step by hooks into torch and Python: data, backward, checkpoints, garbage collection.

forward_passes.py has the forward pass, step_counter.py steps, memory_sampler.py memory.
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
from dtprof.capture.forward_passes import Forward
from dtprof.capture.frameworks.imports import after_import, replace_copies
from dtprof.capture.memory_sampler import Memory
from dtprof.capture.recorder import Recorder
from dtprof.capture.spans import Spans
from dtprof.capture.step_counter import CountedSteps
from dtprof.capture.user_marks import UserMarks
from dtprof.capture.window_control import Windows
from dtprof.records import events
from dtprof.records.member_checksums import checksum_of

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
"""Functions that write, read, gather or distribute a checkpoint."""
SHORTEST_PAUSE_NS = 1_000_000
MOST_PAUSES = 1_024
"""Collections, short ones too, whose times wait for the next phase."""
TIMES_A_PAUSE = 4
"""Two callbacks a collection, each with two arguments."""


class Phases:
    """All hooks that record phases, steps and memory of this process."""

    def __init__(self, recorder: Callable[[bool], Recorder | None]) -> None:
        """Create the hooks; `recorder` opens the log of this rank when a phase needs it."""
        self._spans = Spans(recorder)
        self._forward = Forward(self._spans)
        self.memory = Memory(self._spans, self._forward)
        self.windows = Windows(self.memory)
        self._steps = CountedSteps(self._spans, self._forward, self.memory, self.windows)

    def install(self) -> None:
        """Hook torch's autograd, optimizers, data loader, gradient scaler, models, checkpoints and compiler.

        Each fails for itself: a torch that lacks one hooked function still has the other hooks.
        """
        self._hook_autograd()
        self._hook_loader()
        self._hook_files()
        for module, names in CHECKPOINTS.items():
            after_import(module, functools.partial(self._hook_checkpoints, names))
        after_import("torch.distributed.distributed_c10d", self._hook_groups)
        self._hook_recomputation()
        after_import("torch._dynamo.callback", self._hook_compiler)
        after_import("torch.cuda.graphs", self._hook_graphs)
        self._steps.install()
        self._forward.install()
        self.memory.install()
        self.windows.install()
        CollectorPauses(self._spans).install()
        self._take_marks()

    @fence.fenced("the marks of the program")
    def _take_marks(self) -> None:
        import torch.compiler

        marks.send_to(UserMarks(self._spans, self._steps), torch.compiler.is_compiling)

    @fence.fenced("the backward pass")
    def _hook_autograd(self) -> None:
        import torch

        self._spans.around(torch.autograd, "backward", events.BACKWARD)
        self._spans.around(torch.autograd, "grad", events.BACKWARD)

    @fence.fenced("replays of CUDA graphs")
    def _hook_graphs(self, module: Any) -> None:
        self._spans.around(module.CUDAGraph, "replay", events.GRAPH_REPLAY)

    @fence.fenced("the wait for data")
    def _hook_loader(self) -> None:
        import torch.utils.data.dataloader as dataloader

        self._spans.around(dataloader._BaseDataLoaderIter, "__next__", events.DATA, normal_exits=(StopIteration,))

    @fence.fenced("checkpoints")
    def _hook_files(self) -> None:
        """Hook torch.save and torch.load under both of their names; pickle resolves the functions by one of them."""
        import torch

        pickling = _code_that_pickles(torch.storage)
        for name in ("save", "load"):
            original = vars(torch)[name]
            watched = self._spans.around(torch, name, events.CHECKPOINT, outermost=True, excluded_callers=pickling)
            # Another library may have replaced one of the two names: its function stays.
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
        """Record when a rank creates a group: creation is a collective, which hangs without all ranks.

        And when it makes a call on a group that it is no member of, which torch leaves out with a warning.
        """
        self._spans.around(module, "_warn_not_in_group", events.OUTSIDE_GROUP)
        for name in ("new_group", "split_group"):
            original = getattr(module, name, None)
            watched = self._spans.around(module, name, events.NEW_GROUP, number_of=_members_checksum)
            if watched is not None:
                replace_copies(original, name, watched)

    @fence.fenced("recomputation in the backward pass")
    def _hook_recomputation(self) -> None:
        """Hook the recomputation of activation checkpointing, reentrant and not."""
        import torch
        import torch.utils.checkpoint

        checkpoint: Any = torch.utils.checkpoint
        spans, stop = self._spans, checkpoint._StopRecomputationError
        frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
        make_frame, forward = frame.__init__, function.forward

        # torch ends a recomputation by raising, once all tensors that backward needs exist: no failure of the span.
        @functools.wraps(make_frame)
        def make(self: Any, recompute_fn: Any, *arguments: Any, **options: Any) -> None:
            make_frame(self, spans.wrapped(recompute_fn, events.RECOMPUTE, normal_exits=(stop,)), *arguments, **options)

        @fence.stands_in
        @functools.wraps(forward)
        def run(context: Any, run_function: Any, *arguments: Any) -> Any:
            # The reentrant variant calls one function for the forward pass and the recomputation: only autograd's
            # task id shows which of the two runs.
            recompute = spans.wrapped(run_function, events.RECOMPUTE)
            in_backward = torch._C._current_graph_task_id

            @fence.stands_in
            def run_or_recompute(*inputs: Any) -> Any:
                try:
                    return run_function(*inputs) if in_backward() == -1 else recompute(*inputs)
                except BaseException as error:
                    fence.hide_frame(error)
                    raise

            try:
                return forward(context, run_or_recompute, *arguments)
            except BaseException as error:
                fence.hide_frame(error)
                raise

        frame.__init__ = make
        function.forward = staticmethod(run)

    @fence.fenced("compilation")
    def _hook_compiler(self, module: Any) -> None:
        """Record compilations: torch calls back at the begin and end of the outermost one in the process."""
        started: list[int] = []
        module.callback_handler.register_start_callback(
            lambda *_: started.append(self._spans.begin(events.COMPILE) or 0)
        )
        module.callback_handler.register_end_callback(lambda *_: self._spans.end(started.pop() if started else 0))


def _members_checksum(ranks: Any = None, *_: Any, **options: Any) -> int:
    """Return a checksum of the members passed to new_group or split_group; 0 for all ranks.

    A group that is being made has no record yet: this tells whether ranks make the same one.
    """
    if "split_ranks" in options:
        ranks = options["split_ranks"]
    try:
        return checksum_of(ranks or ())
    except (TypeError, ValueError):  # the call is about to refuse them
        return 0


def _code_that_pickles(storage: Any) -> frozenset[types.CodeType]:
    """Return the code of torch that saves and loads single tensors for pickle, which is no checkpoint."""
    kinds = [vars(storage).get(name) for name in ("UntypedStorage", "_StorageBase", "TypedStorage")]
    functions = [
        vars(storage).get("_load_from_bytes"),
        *(vars(kind).get("__reduce__") for kind in kinds if kind is not None),
    ]
    return frozenset(function.__code__ for function in functions if isinstance(function, types.FunctionType))


class CollectorPauses:
    """Pauses of Python's garbage collector that are long enough to matter.

    A collection may begin anywhere, inside the recorder too, so its callback only appends times; the next phase records
    them. The callback executes no Python bytecode: Python runs a pending signal handler at the next bytecode, and would
    swallow what the handler raises inside a callback of the collector.
    """

    def __init__(self, spans: Spans) -> None:
        """Record on these spans."""
        self._times: deque[int] = deque(maxlen=TIMES_A_PAUSE * MOST_PAUSES)
        spans.pauses, spans.finished_pauses = self._times, self._take

    def install(self) -> None:
        """Register the callback of the collector."""
        gc.callbacks.append(_noting_times(self._times))

    def _take(self) -> Iterator[tuple[int, int]]:
        """Yield begin and end of the pauses since the last call."""
        next_time = self._times.popleft
        while len(self._times) >= TIMES_A_PAUSE:
            begin, _, _, end = next_time(), next_time(), next_time(), next_time()
            if end - begin >= SHORTEST_PAUSE_NS:
                yield begin, end


def _noting_times(times: deque[int]) -> Callable[[str, dict[str, int]], object]:
    """Return a callback of the collector that appends the time, once for each of its two arguments."""
    append_now = map(times.append, iter(monotonic_ns, None))
    for_each = functools.partial(next, map(operator.is_, append_now, itertools.repeat(None)))
    # max calls its key once for each of the two arguments, all in C, and then compares True with True.
    return functools.partial(max, key=for_each)
