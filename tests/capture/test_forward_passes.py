"""A forward pass trains where gradients are recorded and a backward pass follows, whatever mode a wrapper is in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dtprof.capture.forward_passes import Forward, _called_parts, _model_in
from dtprof.capture.spans import Spans
from dtprof.records import events


class Recorder:
    """Keeps names of spans and the samples of a step."""

    def __init__(self) -> None:
        self.spans: list[str] = []
        self.samples: dict[str, int] = {}

    def name_id(self, name: str) -> Any:
        return name

    def begin_span(self, name: Any, *_: Any) -> int:
        self.spans.append(name)
        return 1

    def end_span(self, *_: Any) -> None:
        return

    def sample(self, name: Any, value: int) -> None:
        self.samples[name] = value

    def write_entry(self, _: Any) -> None:
        return


class Model(nn.Module):
    """A model without a wrapper; its output is a dict, as that of transformers models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"past": None, "loss": self.body(ids).sum()}


class Wrapper(nn.Module):
    """A wrapper with a mode of its own, as DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def forward(recorder: Recorder) -> Forward:
    spans: Any = Spans(lambda _: recorder)  # type: ignore[arg-type,return-value]
    hooks = Forward(spans)
    hooks._graph_task = torch._C._current_graph_task_id
    hooks._records_gradients = torch.is_grad_enabled
    hooks.consumption.install(torch.Tensor, (torch.int64,))
    return hooks


def runs(forward: Forward, module: nn.Module) -> Callable[[], torch.Tensor]:
    """Return what runs a model inside a recorded forward pass of `module`."""
    model: Any = module if isinstance(module, Model) else module.module

    def run() -> torch.Tensor:
        ids = torch.ones(2, 3, dtype=torch.int64)
        started = forward.begin(module, (ids,), {})
        output = model(ids)
        forward.end(started, False, output)
        loss: torch.Tensor = output["loss"]
        return loss

    return run


def tokens(forward: Forward, recorder: Recorder) -> int:
    """End the step; return the tokens that it consumed."""
    recorder.samples.clear()
    forward.consumption._recorded = (None, 0, 0)
    forward.consumption.end_step()
    return recorder.samples.get(events.TOKENS, 0)


def test_wrapper_in_eval_mode_around_a_model_in_train_mode_trains(forward: Forward, recorder: Recorder) -> None:
    wrapper = Wrapper(Model()).eval()
    wrapper.module.train()
    runs(forward, wrapper)().backward()
    assert recorder.spans == ["forward"]
    assert tokens(forward, recorder) == 6


def test_model_that_stays_in_eval_mode_trains(forward: Forward, recorder: Recorder) -> None:
    run = runs(forward, Model().eval())
    for _ in range(2):
        first, second = run(), run()  # two microbatches, whose backward passes come later
        second.backward()
        first.backward()
        assert tokens(forward, recorder) == 12
    assert recorder.spans == ["forward"] * 4


def test_evaluation_with_gradients_recorded_consumes_nothing(forward: Forward, recorder: Recorder) -> None:
    model = Model()
    run = runs(forward, model)
    run().backward()
    model.eval()
    run()
    with torch.no_grad():
        run()
    assert tokens(forward, recorder) == 6
    assert recorder.spans == ["forward", "evaluation", "evaluation"]


def test_training_that_moves_to_eval_mode_is_found_by_its_backward_pass(forward: Forward, recorder: Recorder) -> None:
    model = Model()
    run = runs(forward, model)
    run().backward()
    model.eval()
    tokens(forward, recorder)
    for _ in range(3):
        run().backward()
        assert tokens(forward, recorder) == 6
    # The first one was taken for an evaluation: its backward pass came after its span had begun.
    assert recorder.spans == ["forward", "evaluation", "forward", "forward"]


def test_module_evaluated_without_its_wrapper_is_an_evaluation(forward: Forward, recorder: Recorder) -> None:
    class Evaluated(Model):
        """A class of its own, whose `forward` stays replaced."""

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
            return super().forward(ids)

    wrapper, other = Wrapper(Evaluated()), Evaluated()
    forward._register_ddp(wrapper)
    ids = torch.ones(2, 3, dtype=torch.int64)
    started = forward.begin(wrapper, (ids,), {})
    output = wrapper.module(ids)
    forward.end(started, False, output)
    forward._hook_module_of(wrapper)
    output["loss"].backward()
    wrapper.module.eval()
    with torch.no_grad():
        wrapper.module(ids)
        other(ids)  # a teacher, say
    assert recorder.spans == ["forward", "evaluation"]
    assert tokens(forward, recorder) == 6


class DistributedDataParallel(Wrapper):
    """Stands in for the wrapper of torch, which needs a process group."""


DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"


def test_model_of_a_loss_that_holds_its_wrapper_is_the_wrapped_one() -> None:
    class Loss(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(parts)
            self.scale = nn.Parameter(torch.ones(()))

    wrapper = DistributedDataParallel(Model())
    assert _model_in(Loss(model=wrapper)) is wrapper
    # The wrapper holds 37 of 438 parameters: it is a layer of the model.
    whole = Loss(layer=wrapper, head=nn.Linear(4, 80))
    assert _model_in(whole) is whole
    two = Loss(first=wrapper, second=DistributedDataParallel(Model()))
    assert _model_in(two) is two


def test_wrapper_inside_a_compiled_module_is_known(forward: Forward) -> None:
    wrapper = DistributedDataParallel(Model())
    forward.begin(Wrapper(wrapper), (), {})
    assert wrapper in forward.wrappers


def test_outer_optimizer_steps_copies_of_parameters(forward: Forward) -> None:
    model, critic = Model(), Model()
    forward.roots.models.add(model)
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    for stepped, expected in (
        (copies, True),  # of DiLoCo
        (list(critic.parameters()), False),  # another model's own
        ([torch.zeros(3, 3, requires_grad=True)], False),  # an image, say
    ):
        optimizer = torch.optim.SGD(stepped, lr=1.0)
        forward.roots.search(optimizer)
        assert (optimizer in forward.roots.steps_copies) == expected


def test_stages_in_a_list_that_is_never_called_are_the_models() -> None:
    stages = nn.ModuleList([Model(), nn.ModuleDict({"head": Model()}), nn.ReLU()])
    assert list(_called_parts(stages)) == [stages[0], stages[1]["head"]]
    assert list(_called_parts(stages[0])) == [stages[0]]
