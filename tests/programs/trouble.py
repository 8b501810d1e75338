"""Give a recorder trouble in one process, one kind after the other; print what a program without it would print, too.

trouble.py SCENARIO ...    many_groups:100 for a hundred
"""

import collections
import inspect
import multiprocessing.shared_memory
import os
import pathlib
import pickle
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
import typing

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dtprof

SITES = 10_000
SIGNALS = 150


def many_groups(count):
    """Use as many groups, each once."""
    groups = [dist.new_group() for _ in range(int(count))]
    took = []
    for group in groups:
        started = time.perf_counter()
        dist.all_reduce(torch.ones(1), group=group)
        took.append(time.perf_counter() - started)
    first, last = (1e6 * statistics.median(part) for part in (took[:100], took[-100:]))
    print(f"first use of a group: {first:.0f} us for the first hundred, {last:.0f} us for the last", file=sys.stderr)
    for group in groups:
        dist.destroy_process_group(group)


def many_sites():
    """Call from as many lines, each in a function of its own."""
    value = torch.ones(1)
    for number in range(SITES):
        names = {"dist": dist, "value": value}
        source = f"def generated_{number}():\n    dist.barrier() if {number} % 2 else dist.all_reduce(value)\n"
        exec(compile(source, f"/generated/part_{number % 7}.py", "exec"), names)
        names[f"generated_{number}"]()


def fake_tensors():
    """Communicate tensors that take no memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with FakeTensorMode():
        huge = torch.empty(2**40)
        dist.all_reduce(huge)
        dist.all_gather([torch.empty(2**40)], huge)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"fake tensors: {huge.numel()} elements, grown by less than 100 MB: {grown < 100_000}")


def fake_training():
    """Train a model that takes no memory."""
    with FakeTensorMode():
        for _ in range(3):
            train()
        print("fake training: a mode of the program's own", type(torch.ones(1)).__name__)


class Plain(torch.Tensor):
    """Adds nothing to a tensor."""


class Wrapper(torch.Tensor):
    """Holds a tensor and unwraps it for every operator."""

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        def unwrap(value):
            if isinstance(value, list | tuple):
                return type(value)(unwrap(item) for item in value)
            return value.inner if isinstance(value, Wrapper) else value

        return function(*unwrap(arguments), **{k: unwrap(v) for k, v in (options or {}).items()})


def subclasses():
    """Communicate tensors of classes of our own."""
    dist.all_reduce(torch.ones(3).as_subclass(Plain))
    dist.all_reduce(Wrapper(torch.ones(5)))
    dist.broadcast(Wrapper(torch.ones(7)), src=0)


class Timeout(Exception):
    """Raised by a handler of a signal, wherever the program is."""


def train():
    """Take a step with communication."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    dist.all_reduce(model.weight.grad)
    dist.all_reduce(model.bias.grad, async_op=True).wait()
    optimizer.step()


def signals():
    """Have a handler raise at any moment: every exception must come out."""
    train()  # whatever torch imports at first use may swallow exceptions
    raised = caught = 0
    chance = random.Random(1)

    def raise_timeout(*_):
        nonlocal raised
        raised += 1
        raise Timeout

    before = signal.signal(signal.SIGALRM, raise_timeout)
    for expected in range(1, SIGNALS + 1):
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0002, 0.004))
            torch.set_grad_enabled(True)  # torch may have been interrupted where it was off
            while raised < expected:
                train()
                dist.all_reduce(torch.ones(1), group=dist.new_group())
        except Timeout:
            caught += 1
    signal.signal(signal.SIGALRM, before)
    torch.set_grad_enabled(True)
    print(f"signals: {raised} raised, {raised - caught} swallowed")


def surroundings():
    """Change folder, mask, environment and limits, share memory with other processes."""
    for name in ("HOME", "USER", "LOGNAME"):
        os.environ.pop(name, None)
    os.umask(0o077)
    os.chdir(tempfile.mkdtemp())
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 16)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("pool:", pool.map(abs, [-1, 2]))
    shared.close()
    shared.unlink()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, limits[1]))
    train()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


OFFERED = (
    torch.save,
    torch.load,
    torch.serialization.save,
    torch.autograd.backward,
    torch.autograd.grad,
    torch.amp.GradScaler.step,
    torch.nn.Module.named_parameters,
    torch.nn.parallel.DistributedDataParallel.forward,
    torch.distributed.checkpoint.save,
    dist.init_process_group,
    dist.new_group,
)


def looked_at():
    """Ask what torch offers for its name and signature, and send it to another process."""
    for offered in OFFERED:
        same = pickle.loads(pickle.dumps(offered)) is offered
        print(f"{offered.__module__}.{offered.__qualname__}", same, inspect.signature(offered))
    print("one function under two names:", torch.save is torch.serialization.save)


class Logged(torch.Tensor):
    """Notes what is done with it."""

    seen: typing.ClassVar = collections.Counter()

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        cls.seen[str(getattr(function, "__qualname__", function))] += 1
        return super().__torch_function__(function, types, arguments, options or {})


class Functions(TorchFunctionMode):
    """Counts calls of functions of torch."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.seen[str(getattr(function, "__qualname__", function))] += 1
        return function(*arguments, **(options or {}))


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.seen[str(function)] += 1
        return function(*arguments, **(options or {}))


def intercepted():
    """Intercept all that is done with tensors in a step: there may be nothing else."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for mode in (Functions(), Operators()):
        mode.seen = collections.Counter()
        with mode:
            for given in (torch.ones(3, 2), torch.ones(3, 2).as_subclass(Logged)):
                optimizer.zero_grad()
                model(given).sum().backward()
                optimizer.step()
        print(type(mode).__name__, sorted(mode.seen.items()))
    print("Logged", sorted(Logged.seen.items()))


class Failing(torch.optim.SGD):
    """Cannot step when asked not to."""

    def step(self, closure=None):
        if closure is not None:
            raise ArithmeticError("planned")
        return super().step()


class Refusing(torch.nn.Module):
    """Refuses negative input, in the middle of its forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, value):
        if value.min() < 0:
            raise ValueError("planned")
        return self.inner(value)


def failing():
    """Have steps and forward passes end in exceptions, and go on."""
    model = torch.nn.parallel.DistributedDataParallel(Refusing())
    optimizer = Failing(model.parameters(), lr=0.1)
    failures = 0
    for _ in range(20):
        with model.no_sync():
            held = checkpoint(model, torch.ones(2, 2, requires_grad=True), use_reentrant=False)
            for call in (lambda: model(-torch.ones(2, 2)), lambda: optimizer.step(lambda: None)):
                try:
                    call()
                except (ArithmeticError, ValueError):
                    failures += 1
            try:
                model(-torch.ones(2, 2))
            except ValueError:
                failures += 1
            held.sum().backward()  # computes the forward pass again
            model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    print("failures:", failures)


def taken_descriptors():
    """Close files that are not ours, as daemons do with all, and open files of our own in their place."""
    for open_file in list(pathlib.Path("/proc/self/fd").iterdir()):
        try:
            target = open_file.readlink()
        except OSError:
            continue
        if target.name in ("strings.jsonl", "statm"):
            os.close(int(open_file.name))
    folder = pathlib.Path(tempfile.mkdtemp())
    own = [(folder / f"own-{number}").open("w") for number in range(8)]
    train()
    with dtprof.phase("behind taken descriptors"):
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    for file in own:
        file.close()
    print("bytes in files of our own:", [file.stat().st_size for file in folder.iterdir()])


def break_a_hook(owner, name):
    """Have an inner function of the recorder raise, if there is one in this process."""

    def broken(*_, **__):
        raise LookupError("planned inside a hook")

    if owner in sys.modules:
        path, _, last = name.rpartition(".")
        at = getattr(sys.modules[owner], path) if path else sys.modules[owner]
        setattr(at, last, broken)


def broken_hooks():
    """Train while hooks raise."""
    break_a_hook("dtprof.capture.spans", "Spans.id_of")
    break_a_hook("dtprof.capture.group_descriptions", "_members_entry")
    for _ in range(3):
        train()
        dist.all_reduce(torch.ones(1), group=dist.new_group())


class Broken:
    """Takes the place of stderr and can do nothing."""


def broken_stderr():
    """Replace stderr, close what was behind it, and have another hook raise."""
    sys.stderr.flush()
    sys.stderr = Broken()
    break_a_hook("dtprof.capture.user_marks", "UserMarks._declare")
    with dtprof.phase("behind a broken stderr"):
        dist.all_reduce(torch.ones(1), group=dist.new_group())
    os.close(2)
    sys.stderr = sys.__stderr__  # a file whose descriptor is closed
    break_a_hook("dtprof.capture.process_exits", "timed_entry")  # at the exit


def main(names):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, *arguments in (word.split(":") for word in names):
        globals()[name](*arguments)
        print(f"{name} done", flush=True)
    if not {"broken_stderr", "surroundings"} & set(names):
        dist.destroy_process_group()
    sys.exit(7)


if __name__ == "__main__":
    main(sys.argv[1:])
