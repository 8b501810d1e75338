"""Faults to inject on purpose, one class each, and the finding that dtprof must report for it; free of torch."""

import atexit
import os
import signal
import sys
import time
from dataclasses import dataclass, fields
from typing import ClassVar

from reference_trainer.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Leave the rank healthy; every fault overrides one of the moments below."""

    name: ClassVar[str]
    finding: ClassVar[str]
    rank: int

    def before_step(self, step: int) -> None:
        """Act before the step begins."""

    def skips_loss_average(self, step: int) -> bool:
        """Tell whether the rank leaves out the all_reduce of the loss in this step."""
        del step
        return False


@dataclass(frozen=True, kw_only=True)
class SlowRank(Fault):
    """Sleep `ms` milliseconds before every step."""

    name = "slow-rank"
    finding = "slow-rank"
    ms: int = 100

    def before_step(self, step: int) -> None:
        del step
        time.sleep(self.ms / 1000)


@dataclass(frozen=True, kw_only=True)
class SkipCollective(Fault):
    """Leave out the all_reduce of the loss at one step and go on training.

    The others wait in `average_loss`; this rank waits in the first gradient bucket of the next step. The job hangs
    until the timeout of the backend, because the loss has a process group of its own (see `parallelism.py`).
    """

    name = "skip-collective"
    finding = "rank-skipped-collective"
    step: int = 5

    def skips_loss_average(self, step: int) -> bool:
        return step == self.step


@dataclass(frozen=True, kw_only=True)
class RaiseException(Fault):
    """Raise a RuntimeError at one step."""

    name = "exception"
    finding = "rank-crashed"
    step: int = 5

    def before_step(self, step: int) -> None:
        if step == self.step:
            raise RuntimeError(f"injected by --fault exception on rank {self.rank} at step {step}")


@dataclass(frozen=True, kw_only=True)
class KillRank(Fault):
    """End the process with SIGKILL at one step, as the out-of-memory killer would."""

    name = "kill"
    finding = "rank-killed"
    step: int = 5

    def before_step(self, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class ExitRank(Fault):
    """Leave with exit status 0 at one step while the others train on.

    This is `sys.exit(0)`, handlers of `atexit` included, but for the half second in which Python unloads torch: the
    connections close early in it, so that the others fail, and torchrun ends this rank by SIGTERM before its status
    is 0.
    """

    name = "exit"
    finding = "rank-exited"
    step: int = 5

    def before_step(self, step: int) -> None:
        if step == self.step:
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
            os._exit(0)


FAULTS: dict[str, type[Fault]] = {
    fault.name: fault for fault in (SlowRank, SkipCollective, RaiseException, KillRank, ExitRank)
}


def describe_faults() -> str:
    """List every fault, its keys, what it does, and the finding that must name it, one a line."""
    return "\n".join(
        f"  {name:<16} {','.join(_keys(fault)):<10} {(fault.__doc__ or '').splitlines()[0]} (dtprof: {fault.finding})"
        for name, fault in FAULTS.items()
    )


def parse_fault(text: str, *, world_size: int, steps: int) -> Fault:
    """Read NAME[:key=value,...]; the rank is the last one unless it is given."""
    name, _, settings = text.partition(":")
    if name not in FAULTS:
        raise UsageError(f"--fault {text}: unknown fault {name!r}; the faults are {', '.join(FAULTS)}")
    values = {"rank": world_size - 1}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in _keys(FAULTS[name]):
            keys = ", ".join(_keys(FAULTS[name]))
            raise UsageError(f"--fault {text}: unknown key {key!r}; the keys of {name} are {keys}")
        if not value.isdecimal():
            raise UsageError(f"--fault {text}: {key} is {value!r}; give a whole number, such as {key}=1")
        values[key] = int(value)
    fault = FAULTS[name](**values)
    _refuse_unreachable(fault, text=text, world_size=world_size, steps=steps)
    return fault


def _keys(fault: type[Fault]) -> list[str]:
    return [field.name for field in fields(fault)]


def _refuse_unreachable(fault: Fault, *, text: str, world_size: int, steps: int) -> None:
    """Refuse a fault that could not happen in this run, which would then look like a healthy one."""
    if fault.rank >= world_size:
        raise UsageError(f"--fault {text}: rank is {fault.rank}; this job has ranks 0 to {world_size - 1}")
    if isinstance(fault, SkipCollective) and world_size == 1:
        raise UsageError(f"--fault {text}: one rank has no collective to skip; start two or more with torchrun")
    # A rank that skips in the last step ends normally: there is no later collective that it could wait in.
    last_step = steps - 1 if isinstance(fault, SkipCollective) else steps
    step = getattr(fault, "step", 1)
    if not 1 <= step <= last_step:
        raise UsageError(f"--fault {text}: step is {step}; with --steps {steps} give step=1 to step={last_step}")
