"""Memory by category at the end of a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtprof.capture import reduction_buffers
from dtprof.capture.forward_passes import Forward
from dtprof.capture.memory_categories import Categories
from dtprof.capture.spans import Spans
from dtprof.records import events


class Hooks:
    """Calls what is to precede a phase."""

    def __init__(self) -> None:
        self.calls: dict[str, Any] = {}

    def before(self, phase: str, call: Any) -> None:
        self.calls[phase] = call


@pytest.mark.parametrize("freed", [False, True])
def test_gradients_are_those_that_the_optimizer_stepped_wherever_the_step_ends(*, freed: bool) -> None:
    hooks: Any = Hooks()
    spans: Spans = hooks
    roots = SimpleNamespace(steps_copies=[], models=[])
    forward: Any = SimpleNamespace(roots=roots, wrappers=[], before_forward=lambda _: None)
    of_forward: Forward = forward
    categories = Categories(of_forward, lambda: 0)
    categories.install(spans)
    weights = torch.zeros(100, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    categories.optimizers.add(optimizer)
    categories.watch(True)
    weights.sum().backward()
    hooks.calls[events.OPTIMIZER]()
    optimizer.step()
    if freed:
        optimizer.zero_grad()
    assert categories.at_step_end()["gradients"] == 400
    categories.watch(True)
    if not freed:
        optimizer.zero_grad()
    assert categories.at_step_end()["gradients"] == 0  # of a step without an optimizer's


def test_parameters_that_fsdp_has_unsharded_are_communication_within_backward_too() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(10, 10, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        roots = SimpleNamespace(steps_copies=[], models=[model])
        forward: Any = SimpleNamespace(roots=roots, wrappers=[])
        of_forward: Forward = forward
        categories = Categories(of_forward, lambda: 0)
        categories.optimizers.add(optimizer)
        model.unshard()
        held = categories.held()
        assert (held["parameters"], held["communication"]) == (400, 400)
    finally:
        dist.destroy_process_group()


class MegatronDdp(torch.nn.Module):
    """A wrapper whose `buffers` are no method, and which accumulates gradients in `main_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(10, 10, bias=False)
        self.buffers: Any = [torch.zeros(100)]
        self.module.weight.main_grad = self.buffers[0].view(10, 10)  # type: ignore[assignment]


def test_megatron_accumulates_gradients_in_buffers_and_steps_views_of_parameters() -> None:
    model = MegatronDdp()
    shard = model.module.weight.detach().view(-1)[:50].requires_grad_()
    optimizer = torch.optim.SGD([shard], lr=0.1, momentum=0.9)
    shard.grad = torch.zeros(50)
    optimizer.step()  # keeps 50 values of momentum
    optimizer.param_groups[0]["params"].append(model.module.weight.view(-1))  # no leaf: its gradient warns
    roots = SimpleNamespace(steps_copies=[optimizer], models=[model])
    forward: Any = SimpleNamespace(roots=roots, wrappers=[])
    of_forward: Forward = forward
    categories = Categories(of_forward, lambda: 0)
    categories.optimizers.add(optimizer)
    held = categories.held()
    assert (held["parameters"], held["gradients"], held["optimizer_state"]) == (400, 600, 200)


class Zero:
    """An optimizer that takes a buffer for reductions before the backward pass, and gives it back at its step."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []


def test_buffers_of_reductions_are_communication_and_no_activations() -> None:
    # 10,000 bytes live before the forward pass; after it 500 of activations, and 4,000 of a buffer of 1,000 values.
    hooks: Any = Hooks()
    spans: Spans = hooks
    zero, live = Zero(), [10_000]
    passes: list[Any] = []
    forward: Any = SimpleNamespace(
        roots=SimpleNamespace(steps_copies=[], models=[]), wrappers=[], before_forward=passes.append
    )
    of_forward: Forward = forward
    categories = Categories(of_forward, lambda: live[0])
    categories.install(spans)
    weights = torch.zeros(100, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    categories.optimizers.add(optimizer)
    reduction_buffers.declare(zero, lambda owner: owner.buffers)
    categories.watch(True)
    passes[0]()
    zero.buffers.append(torch.zeros(1000))
    live[0] += 500 + 4_000
    hooks.calls[events.BACKWARD]()
    zero.buffers.clear()
    held = categories.at_step_end()
    assert (held["activations"], held.get("communication")) == (500, 4_000)


class Quantised(torch.Tensor):
    """A tensor of codes and scales without a storage of its own, as torchao's optimizers keep their state."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Quantised":
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # the protocol of torch
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("the state is not computed with here")


def test_quantised_state_counts_with_its_codes_and_scales() -> None:
    roots = SimpleNamespace(steps_copies=[], models=[])
    forward: Any = SimpleNamespace(roots=roots, wrappers=[], before_forward=lambda _: None)
    categories = Categories(forward, lambda: 0)
    weights = torch.zeros(256, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    categories.optimizers.add(optimizer)
    scale = torch.zeros(2)  # shared by both moments: it counts once
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weights][name] = Quantised(torch.zeros(256, dtype=torch.uint8), scale)
    held = categories.held()
    assert (held["parameters"], held["optimizer_state"]) == (1024, 2 * 256 + 8)
    named = categories.names()
    assert sorted({category for category, _ in named.values()}) == ["optimizer_state", "parameters"]
    assert len(named) == 4


def test_a_table_of_torchrec_counts_with_the_shards_of_this_rank() -> None:
    table: Any = Quantised(torch.zeros(8), torch.zeros(1))
    table._local_shards = [SimpleNamespace(tensor=torch.zeros(4)), torch.zeros(2)]  # of ShardedTensor, of DTensor
    module = torch.nn.Module()
    module.register_buffer("table", table)
    roots = SimpleNamespace(steps_copies=[], models=[module])
    forward: Any = SimpleNamespace(roots=roots, wrappers=[])
    assert Categories(forward, lambda: 0).held()["parameters"] == 4 * (4 + 2)
