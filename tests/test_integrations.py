"""Callbacks that mark steps and phases of trainers, on base classes by hand; `make clients` runs the real ones."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dtprof import integrations, marks


class Marks:
    """Keeps marks in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def mark_step(self, tokens: int | None) -> None:
        assert tokens is None
        self.seen.append("step")

    def begin_phase(self, name: str) -> str:
        self.seen.append(f"begin {name}")
        return name

    def end_phase(self, started: str, failed: bool) -> None:
        self.seen.append(f"end {started}" + " by an exception" * failed)


@pytest.fixture
def seen() -> Iterator[list[str]]:
    sink = Marks()
    before = marks._sink, marks._is_compiling
    marks.send_to(sink, lambda: False)
    yield sink.seen
    marks.send_to(*before)


def package(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_step_of_lightning_ends_where_its_optimizers_stepped(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    package(monkeypatch, "lightning", pytorch=None)
    package(monkeypatch, "lightning.pytorch", Callback=object)
    callback = integrations.lightning_callback()
    callback.on_train_start(SimpleNamespace(global_step=40), None)
    # Two optimizers a step, gradients of two batches each; the checkpoint's 40 steps are no step of this run.
    for step in (40, 42, 42, 44):
        callback.on_train_batch_end(SimpleNamespace(global_step=step), None, {}, None, 0)
    assert seen == ["step", "step"]


def test_validation_of_lightning_is_a_phase_and_ends_with_an_exception(
    monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    package(monkeypatch, "lightning.pytorch", Callback=object)
    callback = integrations.lightning_callback()
    callback.on_validation_start(None, None)
    callback.on_validation_end(None, None)
    callback.on_test_start(None, None)
    callback.on_exception(None, None, RuntimeError("boom"))
    callback.on_test_end(None, None)  # nothing is open
    assert seen == ["begin validation", "end validation", "begin test", "end test"]


def test_old_name_of_lightning_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Callback:
        """The base class."""

    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    package(monkeypatch, "pytorch_lightning", Callback=Callback)
    assert isinstance(integrations.lightning_callback(), Callback)


def control(*, logs: bool = False, evaluates: bool = False) -> Any:
    return SimpleNamespace(should_log=logs, should_evaluate=evaluates)


def test_step_of_transformers_ends_once_for_accumulated_batches(
    monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    package(monkeypatch, "transformers", TrainerCallback=object)
    callback = integrations.transformers_callback()
    for _ in range(3):
        callback.on_step_end(None, None, control(), model=None)
    assert seen == ["step"] * 3


@pytest.mark.parametrize("logs", [False, True])
def test_validation_of_transformers_begins_behind_what_it_logs(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], *, logs: bool
) -> None:
    package(monkeypatch, "transformers", TrainerCallback=object)
    callback = integrations.transformers_callback()
    callback.on_step_end(None, None, control(logs=logs, evaluates=True))
    assert seen == (["step"] if logs else ["step", "begin validation"])
    if logs:
        callback.on_log(None, None, control(evaluates=True), logs={})
    callback.on_prediction_step(None, None, control(evaluates=True))
    callback.on_log(None, None, control(evaluates=True), logs={})  # of the evaluation
    callback.on_evaluate(None, None, control())
    assert seen == ["step", "begin validation", "end validation"]


def test_evaluation_that_the_program_starts_is_no_phase_of_transformers(
    monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    package(monkeypatch, "transformers", TrainerCallback=object)
    callback = integrations.transformers_callback()
    callback.on_prediction_step(None, None, control())
    callback.on_log(None, None, control(), logs={})
    callback.on_evaluate(None, None, control())
    assert not seen


class Prepared:
    """An optimizer as Accelerate prepares it."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return closure


class Accelerator:
    """Gradients are synchronised in every second batch."""

    def __init__(self) -> None:
        self.sync_gradients = False

    def gather_for_metrics(self, values: list[int], *, use_gather_object: bool = False) -> list[int]:
        return values * (2 if use_gather_object else 1)

    def save_state(self, folder: str) -> str:
        raise OSError(folder)

    def load_state(self, folder: str) -> str:
        return folder


def test_step_of_accelerate_ends_where_gradients_are_synchronised(seen: list[str]) -> None:
    accelerator, optimizer = Accelerator(), Prepared()
    integrations.mark_accelerate(accelerator, optimizer)
    for batch in range(4):
        accelerator.sync_gradients = batch % 2 == 1
        assert optimizer.step(batch) == batch
    assert seen == ["step", "step"]
    assert optimizer.steps == 4


def test_calls_of_accelerate_are_phases_and_do_what_they_did(seen: list[str]) -> None:
    accelerator = Accelerator()
    integrations.mark_accelerate(accelerator, Prepared())
    assert accelerator.gather_for_metrics([1], use_gather_object=True) == [1, 1]
    assert seen == ["begin gather_for_metrics", "end gather_for_metrics"]
    with pytest.raises(OSError, match="folder"):
        accelerator.save_state("folder")
    assert seen[2:] == ["begin save_state", "end save_state by an exception"]


def test_schedulers_of_torch_take_a_marked_optimizer(seen: list[str]) -> None:
    accelerator = Accelerator()
    accelerator.sync_gradients = True
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    integrations.mark_accelerate(accelerator, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert (seen, scheduler.get_last_lr()) == (["step"], [0.5])
