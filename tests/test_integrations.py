"""Callbacks that mark steps and phases of trainers, on base classes by hand; `make clients` runs the real ones."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
        assert not failed
        self.seen.append(f"end {started}")


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


def test_step_of_transformers_ends_once_for_accumulated_batches(
    monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    package(monkeypatch, "transformers", TrainerCallback=object)
    callback = integrations.transformers_callback()
    for _ in range(3):
        callback.on_step_end(None, None, None, model=None)
    assert seen == ["step"] * 3
