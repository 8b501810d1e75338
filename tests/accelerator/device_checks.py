"""What the simulated device promises, in one process: test_simulated_device.py runs this in an interpreter of its own,
because an imported device changes torch for all that comes after.
"""

import copy
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtprof.capture.memory_categories import Categories
from reference_trainer.models import build_model, initialise_weights
from reference_trainer.options import parse_options
from reference_trainer.parallelism.offload import OffloadedAdamW, offload_activations
from reference_trainer.placement import Placement
from tests.accelerator import simulated_device as sim

MS = 1_000_000


def timed() -> torch.Event:
    return torch.Event("sim", enable_timing=True)


@contextmanager
def held_stream() -> Iterator[None]:
    """A kernel that ends when the block does: what the block launches is queued behind it, however slow the host is."""
    stream = sim.current_stream()
    sim.spin_forever()
    yield
    assert not stream.query()
    sim.release_all()


class SmallNet(nn.Module):
    """Layers of the common kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(256, 10)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.conv, self.batch_norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.relu(self.embed(x)))
        h = h + self.attention(h[None], h[None], h[None], need_weights=False)[0][0]
        return self.out(nn.functional.gelu(self.batch_norm(self.conv(h[:, None]))).flatten(1))


def train(model: nn.Module, device: str, *, fused: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    torch.manual_seed(7)
    inputs, targets, losses = torch.randn(3, 16, 32), torch.randint(0, 10, (3, 16)), []
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def test_looking_at_the_device_does_not_initialise_it() -> None:
    # First of all: nothing has used the device yet.
    assert torch.accelerator.device_count() == sim.device_count() > 0
    assert torch.accelerator.is_available()
    assert not sim.is_initialized()
    torch.ones(1, device="sim")
    assert sim.is_initialized()


def test_results_are_those_of_the_cpu() -> None:
    x = torch.randn(8, 16)
    on_sim = x.to("sim")
    assert torch.equal(on_sim.cpu(), x)
    assert torch.allclose((on_sim @ on_sim.t()).cpu(), x @ x.t(), atol=1e-5)
    assert torch.equal(on_sim[on_sim > 0].cpu(), x[x > 0])
    assert torch.equal(on_sim[:, 2:5].t().contiguous().cpu(), x[:, 2:5].t())
    assert torch.equal(torch.cat([on_sim, on_sim]).cpu(), torch.cat([x, x]))
    assert torch.arange(10, device="sim").sum().item() == 45
    across = on_sim.to("sim:1")
    assert across.device.index == 1
    assert torch.equal((across * 2).to("sim:0").cpu(), x * 2)


@pytest.mark.parametrize("fused", [False, True])
def test_training_on_it_gives_the_losses_of_the_cpu(fused: bool) -> None:
    model = SmallNet()
    expected = train(copy.deepcopy(model), "cpu", fused=fused)
    assert train(model.to("sim"), "sim", fused=fused) == pytest.approx(expected, abs=1e-5)


def test_offloaded_training_gives_the_losses_of_the_cpu_and_keeps_its_state_there() -> None:
    options = parse_options(["--preset", "deep", "--offload", "both"], Placement())
    tokens = torch.randint(0, 256, (3, 4, 16))
    losses: dict[str, list[float]] = {}
    for device, kind in (("cpu", torch.optim.AdamW), ("sim", OffloadedAdamW)):
        model = build_model(options.shape)
        model.to_empty(device=device)
        initialise_weights(model, seed=1, num_layers=options.shape.num_layers)
        offload_activations(model, enabled=device == "sim")
        optimizer = kind(model.parameters(), lr=1e-2, fused=True)
        for rows in tokens.to(device):
            loss = nn.functional.cross_entropy(model(inputs=rows).flatten(0, 1), rows.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(device, []).append(loss.item())
    assert losses["sim"] == pytest.approx(losses["cpu"], rel=1e-5)
    state = [tensor for each in optimizer.state.values() for tensor in each.values()]
    assert len(state) == 3 * len(list(model.parameters()))
    assert {tensor.device.type for tensor in state} == {"cpu"}
    assert {parameter.device.type for parameter in model.parameters()} == {"sim"}


def test_memory_by_category_is_what_lies_on_the_device() -> None:
    model = nn.Linear(4, 4, device="sim")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device="sim")).sum().backward()
    optimizer.step()
    roots = SimpleNamespace(models=[model], steps_copies=[])
    categories = Categories(cast("Any", SimpleNamespace(wrappers=[], roots=roots)), lambda: None)
    categories.optimizers.add(optimizer)
    # 20 numbers of 4 bytes, and two averages of each; the numbers of steps lie on the host.
    held = {"parameters": 80, "gradients": 80, "optimizer_state": 160, "communication": 0}
    assert categories.held() == held
    for state in optimizer.state.values():  # as an offloading optimizer keeps it
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].cpu(), state["exp_avg_sq"].cpu()
    assert categories.held() == held | {"optimizer_state": 0}
    assert sorted({what for what, _ in categories.names().values()}) == ["gradients", "optimizer_state", "parameters"]


def test_random_numbers_follow_the_seed_and_not_the_threads() -> None:
    torch.manual_seed(3)
    dropped = nn.functional.dropout(torch.ones(1000, device="sim"), 0.3).cpu()
    torch.manual_seed(3)
    assert torch.equal(nn.functional.dropout(torch.ones(1000, device="sim"), 0.3).cpu(), dropped)
    assert 600 < (dropped > 0).sum() < 800
    state = sim.get_rng_state()
    drawn = torch.randn(3, device="sim").tolist()
    sim.set_rng_state(state)
    assert torch.randn(3, device="sim").tolist() == drawn


def test_what_programs_do_besides_works() -> None:
    linear, saved = nn.Linear(4, 4).to("sim"), io.BytesIO()
    torch.save(linear.state_dict(), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["weight"].cpu(), linear.weight.cpu())
    pinned = torch.randn(64, 64).pin_memory()
    assert pinned.is_pinned()
    assert torch.equal(pinned.to("sim", non_blocking=True).cpu(), pinned)
    x = torch.randn(2, 4, device="sim", requires_grad=True)
    checkpoint(linear, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16


def test_host_runs_ahead_and_item_waits() -> None:
    # 20 kernels of 2 ms, all launched before the first begins: .item() waits for the 40 ms
    x = torch.ones(4, 4, device="sim")
    sim.synchronize()
    sim.set_cost("aten::mm", 2 * MS)
    y = x
    with held_stream():
        for _ in range(20):
            y = y @ x
        released_ns = time.monotonic_ns()
    y.sum().item()
    waited_ns = time.monotonic_ns()
    sim.set_cost("aten::mm", -1)
    assert waited_ns - released_ns >= 40 * MS


@pytest.mark.parametrize("cost_ns", [50_000, 500_000, 5 * MS])
def test_events_read_what_kernels_cost_to_the_ns(cost_ns: int) -> None:
    x, begin, end = torch.ones(4, 4, device="sim"), timed(), timed()
    x @ x
    sim.synchronize()
    sim.set_cost("aten::mm", cost_ns)
    with held_stream():
        begin.record()
        for _ in range(10):
            x @ x
        end.record()
        assert not end.query()
    end.synchronize()
    sim.set_cost("aten::mm", -1)
    assert begin.elapsed_time(end) == pytest.approx(10 * cost_ns / MS, rel=1e-9)


def test_wait_for_an_event_stalls_the_stream_and_not_the_host() -> None:
    # 10 ms on the side stream under 4 ms on the main one: 6 ms of the wait are exposed
    side, main = sim.Stream(), sim.current_stream()
    gate, done, points = timed(), timed(), [timed() for _ in range(3)]
    with held_stream():
        gate.record()
        side.wait_event(gate)
        with sim.stream(side):
            assert sim.current_stream() == side
            sim.spin(10 * MS)
            done.record()
        points[0].record()
        sim.spin(4 * MS)
        points[1].record()
        main.wait_event(done)
        points[2].record()
    points[2].synchronize()
    assert points[0].elapsed_time(points[1]) == pytest.approx(4, rel=1e-9)
    assert points[1].elapsed_time(points[2]) == pytest.approx(6, rel=1e-9)


def test_event_recorded_again_means_its_latest_recording() -> None:
    reference, event = timed(), timed()
    with held_stream():
        reference.record()
        event.record()
    event.synchronize()
    assert reference.elapsed_time(event) == 0
    with held_stream():
        sim.spin(30 * MS)
        event.record()
        assert not event.query()
    event.synchronize()
    assert reference.elapsed_time(event) >= 30


def test_trace_is_what_ran() -> None:
    sim.configure(trace=1)
    sim.take_trace()
    with held_stream():
        until_ns = sim.now() + 200 * MS
        sim.spin_until(until_ns)
        sim.spin(3 * MS)
    sim.set_cost("sim::d2h", MS)
    torch.ones(2, device="sim").cpu()
    sim.set_cost("sim::d2h", -1)
    sim.configure(trace=0)
    by_name = {task.name: task for task in sim.take_trace()}
    spin, copied = by_name["sim::spin"], by_name["sim::d2h"]
    assert spin.start_ns == max(until_ns, by_name["sim::spin_forever"].end_ns)
    assert spin.end_ns == spin.start_ns + 3 * MS
    assert copied.start_ns >= spin.end_ns
    assert copied.end_ns - copied.start_ns == MS


def test_clock_of_the_device_may_run_apart() -> None:
    begin, end = timed(), timed()
    sim.configure(drift_ppm=1000)
    with held_stream():
        begin.record()
        sim.spin(100 * MS)
        end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(100.1, rel=1e-6)
    sim.configure(drift_ppm=0)


def test_event_on_a_capturing_stream_is_an_error() -> None:
    side = sim.Stream()
    with sim.capturing():
        assert torch.Event("sim").query()
        with pytest.raises(RuntimeError, match="captures a graph"):
            timed().record()
        timed().record(side)
    timed().record()


def test_error_of_the_device_comes_out_where_the_host_waits() -> None:
    x = torch.ones(4, device="sim").index_select(0, torch.tensor([9], device="sim"))
    with pytest.raises(RuntimeError, match=r"error on the device.*index out of range"):
        x.cpu()
    sim.report_error("the device fell off the bus")
    with pytest.raises(RuntimeError, match="fell off the bus"):
        sim.synchronize()


def test_kernel_that_never_ends_holds_up_its_stream_alone() -> None:
    side, event = sim.Stream(), timed()
    with sim.stream(side):
        sim.spin_forever()
        event.record()
    assert (torch.ones(2, device="sim") + 1).tolist() == [2, 2]
    assert not event.query()
    assert not side.query()
    sim.release_all()
    event.synchronize()
    assert event.query()


def test_forked_child_cannot_use_the_device() -> None:
    torch.ones(1, device="sim")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(2, device="sim")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_interpreter_ends_while_the_device_is_busy() -> None:
    sim.spin(3600 * 1000 * MS)
    assert not sim.current_stream().query()
