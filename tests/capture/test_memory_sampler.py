"""When what is dear may be measured: rarely, and by all ranks in the same step; and how a device is named."""

import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtprof.capture.memory_sampler import BUDGET_FRACTION, Budget, Memory, describe_device
from dtprof.records.rank_log.strings import Strings, names_in_tables

SECOND_NS = 1_000_000_000
MIDNIGHT_NS = 86_400 * SECOND_NS * 20_000


def times_measured(
    cost_ns: int, *, step_ns: int, steps: int, least_ns: int = SECOND_NS, late_ns: Callable[[int], int] = lambda _: 0
) -> list[int]:
    """Return the steps in which a rank measures that ends its steps so long after the others."""
    now_ns = MIDNIGHT_NS
    budget = Budget(least_ns, lambda: now_ns)
    measured = []
    for step in range(steps):
        now_ns = MIDNIGHT_NS + step * step_ns + late_ns(step)
        if budget.allows():
            measured.append(step)
            now_ns += cost_ns
            budget.charge(cost_ns)
    return measured


def test_the_first_memory_sample_may_be_taken_at_once() -> None:
    assert times_measured(1, step_ns=1, steps=3) == [0]


@pytest.mark.parametrize("cost_ns", [1_000, 900_000, 9_000_000, 40_000_000])
def test_the_sampler_takes_a_thousandth_of_the_time_and_one_sample_a_period_at_most(cost_ns: int) -> None:
    steps, step_ns = 20_000, 70_000_000
    measured = times_measured(cost_ns, step_ns=step_ns, steps=steps)
    allowed = min(steps * step_ns // SECOND_NS, steps * step_ns // (BUDGET_FRACTION * cost_ns))
    assert allowed // 2 - 1 <= len(measured) <= allowed + 2  # a period is doubled, not fitted


def test_ranks_that_step_together_measure_in_the_same_steps() -> None:
    """However dear it is for each: the steps of a dearer one are among those of a cheaper one."""
    measured = functools.partial(times_measured, step_ns=230_000_000, steps=5_000)
    cheap, dear = set(measured(3_000_000)), set(measured(9_000_000))
    late = set(measured(3_100_000, late_ns=lambda step: step * 7_919 % 2_000_000))
    assert len(dear) > 50
    assert dear <= cheap
    assert len(late ^ cheap) <= 0.1 * len(cheap)  # a period that begins between the ends of one step


def test_a_clock_that_is_set_back_costs_one_measurement() -> None:
    now_ns = MIDNIGHT_NS
    budget = Budget(SECOND_NS, lambda: now_ns)
    budget.charge(1)
    now_ns -= 3_600 * SECOND_NS
    assert budget.allows()
    budget.charge(1)
    assert not budget.allows()


@pytest.mark.parametrize(
    ("device", "described"),
    [
        ("cuda:1", {"device": "cuda:1", "name": "NVIDIA H200", "uuid": "GPU-1234-1"}),
        ("xpu:0", {"device": "xpu:0", "name": "", "uuid": ""}),
    ],
    ids=["a GPU, as NVML names it", "one that torch cannot describe"],
)
def test_device_that_a_rank_computes_on_is_named_and_read_back(
    device: str, described: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")

    def describe(index: int) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H200", uuid=f"1234-{index}")

    def refuse(_: int) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "get_device_properties", describe)
    monkeypatch.setattr(torch.xpu, "get_device_properties", refuse)
    row = json.loads(describe_device(device))
    assert {name: row[name] for name in described} == described
    strings = Strings()
    strings.take(row)
    assert names_in_tables(strings)["device_uuid"] == described["uuid"]


def test_the_step_after_the_first_of_an_outer_optimizer_is_measured() -> None:
    spans: Any = SimpleNamespace(id_of=lambda _, name: name)
    forward: Any = SimpleNamespace(roots=SimpleNamespace(steps_copies=[], models=[]), wrappers=[])
    recorder: Any = SimpleNamespace(sample=lambda *_: None)
    memory = Memory(spans, forward)
    memory._categories_budget = SimpleNamespace(allows=lambda: False, charge=lambda _: None)  # type: ignore[assignment]
    inner, outer = (torch.optim.SGD([torch.zeros(1)]) for _ in range(2))
    measured = []
    for step in range(8):
        memory.categories.optimizers.add(inner if step < 5 else outer)
        memory.at_step_end(recorder)
        measured.append(memory.categories.watching)  # the step after this one
    assert measured == [True, True, False, False, False, True, False, False]
