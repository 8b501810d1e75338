"""Record the forward passes of the models of a job: of the outermost module, whatever wraps it.

The wrappers of torch (DDP, FSDP, compiled modules) are hooked in their classes. A model without a wrapper is identified
by the parameters that its optimizer steps; the `forward` of its class is then replaced. Hooks on a module would be
pickled with it, and hooks on all modules cost 2 us for each of them.
"""

import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dtprof import fence
from dtprof.capture.frameworks.imports import after_import
from dtprof.capture.live_objects import LiveObjects
from dtprof.capture.spans import Spans
from dtprof.capture.string_entries import entry
from dtprof.capture.token_counter import Consumption, flat_values
from dtprof.records import events

MOST_CANDIDATES = 4096
MOST_OUTPUTS = 16
"""Tensors of an output whose graphs are followed."""
STEPS_TO_SEARCH = 3
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_state"


class _OpenForward(threading.local):
    """The forward pass that a thread is inside."""

    owner: int = 0
    span: int | None = 0
    graph: "_Graph | None" = None


class _Graph:
    """The graph of a forward pass in eval mode, which trains if a backward pass runs through it."""

    def __init__(self, outcomes: dict[int, bool], owner: int, count: Callable[[], object]) -> None:
        """Follow one forward pass of `owner`; `count` counts its inputs once a backward pass follows."""
        self._outcomes = outcomes
        self._owner = owner
        self._count = count
        self._ran = False

    def __call__(self, *_: Any) -> None:
        """Note that a backward pass runs: autograd calls this before it computes a gradient of the output."""
        if not self._ran:
            self._ran = self._outcomes[self._owner] = True
            self._count()

    def __del__(self) -> None:
        """Note that the graph was freed without a backward pass."""
        if not self._ran:
            self._outcomes[self._owner] = False


class Forward:
    """Spans of forward passes: `forward` where gradients are recorded and a backward pass follows, else `evaluation`.

    In train mode a backward pass is taken to follow. Models in eval mode train, too, such as those that
    `from_pretrained` returns: whether a backward pass ran through the graph of the last one says what the next one is.
    """

    def __init__(self, spans: Spans) -> None:
        """Record through these spans."""
        self._spans = spans
        self._open = _OpenForward()
        self._before: list[Callable[[], object]] = []
        self._trained_in_eval_mode: dict[int, bool] = {}
        """By model: whether a backward pass ran through the graph of its last forward pass in eval mode."""
        self._graph_task: Callable[[], int]
        self._records_gradients: Callable[[], bool]
        self.consumption = Consumption(spans)
        self.roots = Roots(self)
        self.wrappers = LiveObjects()
        self._unwrapped = LiveObjects()

    def before_forward(self, call: Callable[[], object]) -> None:
        """Call this, which must not raise, before each forward pass."""
        self._before.append(call)

    @fence.fenced("the forward pass")
    def install(self) -> None:
        """Hook DDP now, FSDP and compiled modules once they are imported; watch for models without them."""
        import torch

        self._graph_task = torch._C._current_graph_task_id
        self._records_gradients = torch.is_grad_enabled
        self.consumption.install(
            torch.Tensor,
            (torch.int64, torch.int32),  # what an embedding takes
            intercepted=torch._C._len_torch_function_stack,
            aside=torch._C.DisableTorchFunction,
        )
        self.roots.watch()
        self._hook_ddp()
        after_import("torch.distributed.fsdp.fully_sharded_data_parallel", self._hook_fsdp1)
        after_import(_FSDP2, self._hook_fsdp2)
        after_import("torch._dynamo.eval_frame", self._hook_compiled)

    def begin(self, module: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], owner: int = 0) -> int:
        """Begin the forward pass of a module; return 0 inside another one, and in recomputation."""
        try:
            owner = owner or id(module)
            open_pass = self._open
            if open_pass.owner == owner:
                self.end(owner, True)  # the last one raised
            elif open_pass.owner:
                return 0
            if self._graph_task() != -1:
                return 0
            trains = self._records_gradients()
            if trains and owner not in self._trained_in_eval_mode:
                self._register_model(owner, module, options)
            if trains and (module.training or _wraps_training(module)):
                self.consumption.add_inputs(owner, arguments, options)
                self._trained_in_eval_mode.setdefault(owner, False)  # it has a mode for each
            elif trains:
                open_pass.graph = self._follow(owner, arguments, options)
                trains = self._trained_in_eval_mode.setdefault(owner, True)
            if trains:
                for call in self._before:
                    call()
            open_pass.owner = owner
            open_pass.span = self._spans.begin(events.FORWARD if trains else events.EVALUATION)
            return owner
        except Exception as error:  # noqa: BLE001  # the hot path cannot afford `fenced`
            fence.report("the begin of a forward pass", error)
            return 0

    def _register_model(self, owner: int, module: Any, options: Mapping[str, Any]) -> None:
        self.consumption.register_model(owner, _layers_of(module), options)
        for part in _layers_of(module):
            if _is_of(part, "DistributedDataParallel"):
                self._register_ddp(part)  # compiled with the module around it, it runs unhooked

    def end(self, started: int | None, failed: bool, output: Any = None) -> None:
        """End the forward pass that `begin` began."""
        open_pass = self._open
        if started and open_pass.owner == started:
            span, open_pass.owner, open_pass.span = open_pass.span, 0, 0
            self._spans.end(span, failed=failed)
            if open_pass.graph is not None:
                graph, open_pass.graph = open_pass.graph, None
                _attach(graph, output)

    def _follow(self, owner: int, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> _Graph:
        """Return what follows the graph of a forward pass in eval mode; it keeps no tensor alive."""
        counted = self.consumption.count_inputs(owner, arguments, options)
        return _Graph(self._trained_in_eval_mode, owner, lambda: self.consumption.add(owner, *counted))

    def close(self) -> None:
        """End the forward pass of this thread that raised, if any."""
        if self._open.owner:
            self.end(self._open.owner, True)

    @fence.fenced("the forward pass of DDP")
    def _hook_ddp(self) -> None:
        """Hook DDP's own steps around the forward pass of its module; compiled code runs unhooked."""
        import torch.compiler
        import torch.nn.parallel.distributed

        ddp: Any = torch.nn.parallel.distributed.DistributedDataParallel
        before, after, is_compiling = ddp._pre_forward, ddp._post_forward, torch.compiler.is_compiling

        @fence.stands_in
        @functools.wraps(before)
        def pre_forward(module: Any, *inputs: Any, **options: Any) -> Any:
            if is_compiling():
                return before(module, *inputs, **options)
            self._register_ddp(module)
            self.begin(module, inputs, options)
            try:
                return before(module, *inputs, **options)
            except BaseException as error:
                fence.hide_frame(error)
                raise

        @fence.stands_in
        @functools.wraps(after)
        def post_forward(module: Any, output: Any) -> Any:
            if is_compiling():
                return after(module, output)
            try:
                result = after(module, output)
            except BaseException as error:
                fence.hide_frame(error)
                raise
            self.end(id(module), False, output)
            self._hook_module_of(module)
            return result

        ddp._pre_forward = pre_forward
        ddp._post_forward = post_forward

    @fence.fenced("the begin of a forward pass")
    def _register_ddp(self, module: Any) -> None:
        if module not in self.wrappers:
            recorder = self._spans.recorder(True)
            if recorder is not None and not self.wrappers:
                recorder.write_entry(entry("feature", name="ddp"))
            self.wrappers.add(module)

    @fence.fenced("the forward pass of a model without a wrapper")
    def _hook_module_of(self, wrapper: Any) -> None:
        """Record the module without its wrapper, too, as programs evaluate it.

        After the first pass: code that is compiled in it is compiled as without dtprof, and its class is left alone.
        A class of torch, such as Sequential, is shared with models that are compiled later.
        """
        if wrapper not in self._unwrapped:
            self._unwrapped.add(wrapper)
            if not type(wrapper.module).__module__.startswith("torch."):
                self.roots.hook_class(wrapper.module)

    @fence.fenced("the forward pass of FSDP")
    def _hook_fsdp1(self, module: Any) -> None:
        self.replace(module.FullyShardedDataParallel)

    @fence.fenced("the forward pass of FSDP")
    def _hook_fsdp2(self, module: Any) -> None:
        state_class = module.FSDPState
        before, after = state_class._pre_forward, state_class._post_forward

        @fence.stands_in
        @functools.wraps(before)
        def pre_forward(state: Any, module: Any, *inputs: Any) -> Any:
            self._begin_fsdp2(state, module, *inputs)
            try:
                return before(state, module, *inputs)
            except BaseException as error:
                fence.hide_frame(error)
                raise

        @fence.stands_in
        @functools.wraps(after)
        def post_forward(state: Any, *inputs: Any) -> Any:
            try:
                result = after(state, *inputs)
            except BaseException as error:
                fence.hide_frame(error)
                raise
            self.end(id(state), False, result)
            return result

        pre_forward._torchdynamo_disable = post_forward._torchdynamo_disable = True  # type: ignore[attr-defined]
        state_class._pre_forward, state_class._post_forward = pre_forward, post_forward

    @fence.fenced("the begin of a forward pass")
    def _begin_fsdp2(
        self, state: Any, module: Any, arguments: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> None:
        if state._state_ctx.iter_forward_root is None and state._training_state.name != "PRE_BACKWARD":
            self.begin(module, arguments, options or {}, id(state))

    @fence.fenced("the forward pass of compiled modules")
    def _hook_compiled(self, module: Any) -> None:
        self.replace(module.OptimizedModule, "__call__")

    def replace(self, owner: Any, name: str = "forward", is_root: Callable[[Any], bool] | None = None) -> None:
        """Replace a method of a class by one that records spans around forward passes.

        The new function keeps the globals of the old one, in which torch.jit.script resolves names.
        """
        import torch.compiler

        original = getattr(owner, name)  # of a base class, where older torch defines it there
        made = _with_span(original, self.begin, self.end, torch.compiler.is_compiling, is_root or (lambda _: True))
        closed = types.FunctionType(made.__code__, original.__globals__, name, None, made.__closure__)
        setattr(owner, name, functools.wraps(original)(closed))


def _with_span(
    _dtprof_original: Any,
    _dtprof_begin: Any,
    _dtprof_end: Any,
    _dtprof_is_compiling: Any,
    _dtprof_is_root: Any,
    _dtprof_hide_frame: Any = fence.hide_frame,
) -> Any:
    """Return a function with a span around another; it uses no globals, see `Forward.replace`."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if _dtprof_is_compiling() or not _dtprof_is_root(self):
            return _dtprof_original(self, *arguments, **options)
        started = _dtprof_begin(self, arguments, options)
        failed, result = True, None
        try:
            result = _dtprof_original(self, *arguments, **options)
            failed = False
            return result
        except BaseException as error:
            _dtprof_hide_frame(error)
            raise
        finally:
            _dtprof_end(started, failed, result)

    return fence.stands_in(forward)


class Roots:
    """Models without a wrapper of torch: identified when an optimizer first steps their parameters."""

    def __init__(self, forward: Forward) -> None:
        """Start without models."""
        self._forward = forward
        self._candidates = LiveObjects()
        self._restore: Callable[[], None] | None = None
        self._searches = 0
        # By class the ids of the models: a set of modules would call __hash__ and __eq__ of the user's classes.
        self._classes: dict[type, set[int]] = {}
        self.models = LiveObjects()
        self.steps_copies = LiveObjects()
        """Optimizers that step copies of the parameters of the models."""

    def watch(self) -> None:
        """Collect the modules whose parameters the program lists, until the first steps have ended."""
        import torch.compiler
        import torch.nn

        owner: Any = torch.nn.Module
        candidates, is_compiling = self._candidates, torch.compiler.is_compiling
        original = owner.named_parameters

        @fence.stands_in
        @functools.wraps(original)
        def named_parameters(module: Any, *arguments: Any, **options: Any) -> Any:
            if not is_compiling() and len(candidates) < MOST_CANDIDATES:
                candidates.add(module)
            return original(module, *arguments, **options)

        def restore() -> None:
            if vars(owner).get("named_parameters") is named_parameters:
                owner.named_parameters = original

        owner.named_parameters = named_parameters
        self._restore = restore

    def search(self, optimizer: Any) -> None:
        """Find the models whose parameters this optimizer steps, or copies; called at its first step."""
        if self._restore is not None:
            self._find(optimizer)
        self._find_copies(optimizer)

    @fence.fenced("the model of an optimizer")
    def _find_copies(self, optimizer: Any) -> None:
        """Recognise an outer optimizer, as of DiLoCo: it steps tensors shaped like parameters, and no parameters."""
        import torch.nn

        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if stepped and not any(isinstance(tensor, torch.nn.Parameter) for tensor in stepped):
            models = (*self._forward.wrappers, *self.models)
            with torch._C.DisableTorchFunction():
                shapes = {part.shape for model in models for part in torch.nn.Module.parameters(model)}
                are_copies = all(tensor.shape in shapes for tensor in stepped)
            if are_copies:
                self.steps_copies.add(optimizer)

    @fence.fenced("the forward pass of a model without a wrapper")
    def _find(self, optimizer: Any) -> None:
        modules = [_model_in(module) for module in self._candidates]
        inner = {id(child) for wrapper in self._forward.wrappers for child in wrapper.modules()}
        for module in modules:
            if id(module) not in inner:
                inner.update(id(child) for child in module.modules() if child is not module)
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        outermost = [module for module in modules if id(module) not in inner]
        chosen = [module for module in outermost if any(id(part) in stepped for part in module.parameters())]
        if not chosen and not self._forward.wrappers:
            # Copies of the parameters are stepped, such as the shards of DeepSpeed and of Megatron's optimizers.
            chosen = [module for module in outermost if any(part.requires_grad for part in module.parameters())]
            if chosen:
                self.steps_copies.add(optimizer)
        for module in chosen:
            self._adopt(module)

    def _adopt(self, module: Any) -> None:
        self.models.add(module)
        for part in _called_parts(module):
            self.hook_class(part)

    def hook_class(self, module: Any) -> None:
        """Record the forward passes of a model by the `forward` of its class."""
        import torch

        owner = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), None)
        known = owner in self._classes
        if owner is None or not (known or isinstance(vars(owner)["forward"], types.FunctionType)):
            return
        is_torchs = owner.__module__.startswith("torch.") and owner is not torch.nn.Sequential
        if is_torchs or _is_wrapped(module) or _has_compiled():
            return
        roots = self._classes.setdefault(owner, set())
        roots.add(id(module))
        if not known:
            self._forward.replace(owner, is_root=lambda called: id(called) in roots)

    def at_step_end(self) -> None:
        """Stop watching after the first steps."""
        self._searches += 1
        if self._searches >= STEPS_TO_SEARCH and self._restore is not None:
            self._restore()
            self._restore = None
            self._candidates.clear()


def _layers_of(module: Any) -> Iterable[Any]:
    """Return a module and all in it, by torch's method: a module may have an attribute of that name."""
    import torch.nn

    return torch.nn.Module.modules(module)


def _wraps_training(module: Any) -> bool:
    """Say whether the only child of a module, or the only one of that, is in train mode.

    A wrapper such as DDP has a mode of its own, which nothing but its `train` changes: Lightning sets its module's.
    """
    while len(children := module._modules) == 1:
        module = next(iter(children.values()))
        if module is None or module.training:
            return module is not None
    return False


@fence.fenced("the forward pass")
def _attach(graph: _Graph, output: Any) -> None:
    """Let autograd tell the graph of a backward pass through any tensor of an output."""
    for tensor in itertools.islice(flat_values(output), MOST_OUTPUTS):
        if (node := getattr(tensor, "grad_fn", None)) is not None:
            node.register_prehook(graph)


def _is_wrapped(module: Any) -> bool:
    """Say whether the hook of FSDP2 records its forward pass."""
    return _is_of(module, "FSDPModule")


def _model_in(module: Any) -> Any:
    """Return the wrapped model that a module calls, as the loss of sentence-transformers does; else the module.

    One with several wrappers, such as layers that FSDP shards each for itself, or with most parameters outside of one,
    is the model that they are parts of.
    """
    inside: set[int] = set()
    wrappers = []
    for part in _layers_of(module):
        if id(part) not in inside and _is_of(part, *_WRAPPERS):
            wrappers.append(part)
            inside.update(map(id, _layers_of(part)))
    if len(wrappers) == 1 and 2 * _elements_of(wrappers[0]) > _elements_of(module):
        return wrappers[0]
    return module


def _called_parts(module: Any) -> Iterator[Any]:
    """Yield the module; of one that cannot be called, such as a ModuleList of stages, what trains in it."""
    import torch.nn

    if type(module).forward is not torch.nn.Module.forward:
        yield module
        return
    for child in torch.nn.Module.children(module):
        if any(parameter.requires_grad for parameter in torch.nn.Module.parameters(child)):
            yield from _called_parts(child)


def _elements_of(module: Any) -> int:
    import torch.nn

    return sum(parameter.numel() for parameter in torch.nn.Module.parameters(module))


def _is_of(module: Any, *names: str) -> bool:
    """Say whether a module is of a class of torch with one of these names."""
    return any(kind.__name__ in names and kind.__module__.startswith("torch.") for kind in type(module).__mro__)


def _has_compiled() -> bool:
    """Say whether this process has compiled any code, which a change of a class may invalidate."""
    convert = sys.modules.get("torch._dynamo.convert_frame")
    return convert is not None and bool(convert.FRAME_COUNTER)
