"""The simulated accelerator as a device of torch: importing this module makes `torch.device("sim")` and the process
group back end `simccl`. README.md says how it works and what to mind.

The upper half is what torch asks of the module of a device; the lower half is what only a simulation has.
"""

import atexit
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtprof.capture.native import build
from tests.accelerator.compiled_device import MODULE, ensure_library


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(MODULE, ensure_library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_native = _load()
_native.set_device_count(int(os.environ.get("SIM_DEVICE_COUNT", "4")))
torch.utils.rename_privateuse1_backend("sim")

Device = torch.device | str | int | None


def _index(device: Device) -> int:
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return int(_native.current_device()) if index is None else index


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> "Stream":
        """Make one; torch itself gives the keywords of a stream that exists."""
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":  # noqa: ARG004
        """Take what torch.cuda.Event takes."""
        return super().__new__(cls, torch.device("sim", _native.current_device()), enable_timing=enable_timing)


@contextlib.contextmanager
def stream(used: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one."""
    if used is None:
        yield
        return
    before_device, before = current_device(), current_stream(used.device)
    torch.accelerator.set_stream(used)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        set_device(before_device)


@contextlib.contextmanager
def device(used: Device) -> Iterator[None]:
    """Make a device the current one."""
    before = current_device()
    set_device(used)
    try:
        yield
    finally:
        set_device(before)


def current_stream(of: Device = None) -> torch.Stream:
    """Return the stream that the calling thread enqueues on."""
    return torch.accelerator.current_stream(torch.device("sim", _index(of)))


set_stream = torch.accelerator.set_stream


def synchronize(device: Device = None) -> None:
    """Wait for all streams of a device."""
    _native.synchronize(_index(device))


def set_device(device: Device) -> None:
    """Make a device the current one of the calling thread."""
    _native.set_device(_index(device))


current_device = _native.current_device
device_count = _native.device_count
is_initialized = _native.initialized
init = _lazy_init = _native.init
_is_in_bad_fork = _native.in_forked_child


def is_available() -> bool:
    """Say whether there is a device."""
    return bool(device_count() > 0)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _native.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device."""
    for index in range(device_count()):
        _native.default_generator(index).manual_seed(seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the state of a device's generator."""
    return _native.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator."""
    _native.default_generator(_index(device)).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return what autocast may use."""
    return [torch.float16, torch.bfloat16, torch.float32]


def memory_allocated(device: Device = None) -> int:  # noqa: ARG001
    """Return the bytes of all tensors of the process."""
    return int(_native.counters()["allocated_bytes"])


def empty_cache() -> None:
    """Do nothing: no memory is cached."""


class Task(NamedTuple):
    """What one task of a stream really did, in ns of CLOCK_MONOTONIC.

    A collective waits from `start_ns` to `met_ns`, when its last member starts, and transfers until `end_ns`. `seq`
    numbers the collectives of a group; it is -1 for kernels and copies.
    """

    name: str
    stream: int
    seq: int
    enqueued_ns: int
    start_ns: int
    met_ns: int
    end_ns: int


def configure(**settings: float) -> None:
    """Set costs and switches by name: those of `Settings` in native/settings.h."""
    for name, value in settings.items():
        _native.configure(name, float(value))


set_cost = _native.set_cost
"""Set what one kind of task costs: `set_cost("aten::mm", ns)`, "sim::h2d", "simccl::ALLREDUCE"; below 0 as others."""
now = _native.now
"""Return CLOCK_MONOTONIC in ns."""
counters = _native.counters
"""Return what was counted since the start; `max_lag_ns` since the last call."""
spin = _native.spin
"""Enqueue a kernel that takes this many ns."""
spin_until = _native.spin_until
"""Enqueue a kernel that ends at this time of `now()`."""
spin_forever = _native.spin_forever
"""Enqueue a kernel that never ends."""
stall_network = _native.stall_network
"""Let so many collectives of this process pass; all later ones start and never end."""
release_all = _native.release_all
"""End all that never ends and was enqueued by now."""
report_error = _native.report_error
"""Let the device fail: the sentence is raised where the host next waits for it."""

lose_device = _native.lose_device
"""Let the device be gone: the sentence is raised by whatever is asked of it, events included."""


def give_kernel_events() -> None:
    """Let dtprof read the begin and the end of kernels in the handles of simccl, as it does in NCCL's.

    Without this it asks the handles for completion, as it does those of back ends that it does not know.
    """
    hook = sys.modules.get(build.MODULE)
    if hook is not None:  # the job is recorded
        hook.use_kernel_events(_native.__file__)


def take_trace() -> list[Task]:
    """Return the tasks that ended since the last call, in that order; `configure(trace=1)` first."""
    return [Task(*task) for task in _native.take_trace()]


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Let the current stream capture a graph: recording an event on it fails."""
    _native.set_capturing(True)
    try:
        yield
    finally:
        _native.set_capturing(False)


def _create_backend(store: dist.Store, rank: int, size: int, _timeout: timedelta) -> Any:
    # A device has no timeouts: what nobody joins hangs for ever.
    carrier = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout=timedelta(days=7))
    return _native.make_backend(rank, size, carrier)


# The first meta kernel with a Python number imports torch._dynamo and sympy (seconds): not in the middle of a job.
torch.ops.aten.mul.Tensor(torch.empty(1, device="meta"), 1.0)
torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("simccl", _create_backend, devices=["sim"])
atexit.register(_native.park_streams)
