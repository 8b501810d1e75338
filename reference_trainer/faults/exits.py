"""Ranks that end, or leave the training loop, while the others go on."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from dataclasses import dataclass

from reference_trainer.faults.base import Fault, Scene, StepFault

MEGABYTE = 2**20


@dataclass(kw_only=True)
class RaiseException(StepFault):
    """Raise a RuntimeError at one step."""

    name = "exception"
    finding = "rank-crashed"

    def strike(self) -> None:
        raise RuntimeError(f"injected by --fault exception on rank {self.rank} at step {self.step}")


@dataclass(kw_only=True)
class KillRank(StepFault):
    """End the process with SIGKILL at one step, as the out-of-memory killer would."""

    name = "kill"
    finding = "rank-killed"

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(kw_only=True)
class StopRank(StepFault):
    """Stop the process with SIGSTOP at one step; SIGCONT lets it go on."""

    name = "stop"
    finding = "rank-frozen"

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(kw_only=True)
class ExitRank(StepFault):
    """Leave with exit status 0 at one step while the others train on.

    This is `sys.exit(0)`, handlers of `atexit` included, but for the half second in which Python unloads torch: the
    connections close early in it, so that the others fail, and torchrun ends this rank by SIGTERM before its status
    is 0.
    """

    name = "exit"
    finding = "rank-exited"

    def strike(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(0)


@dataclass(kw_only=True)
class OutOfMemory(StepFault):
    """Take memory in pieces of `mb` MiB at one step until the device, or a limit of 64 pieces on a CPU, has no more."""

    name = "oom"
    finding = "rank-crashed"
    mb: int = 64

    def strike(self) -> None:
        import resource

        import torch

        assert self.scene is not None
        device = next(self.scene.parts[0].module.parameters()).device
        if device.type == "cpu":
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: PTH123, SIM115
            limit = used + 64 * self.mb * MEGABYTE
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        taken = []
        while True:
            taken.append(torch.empty(self.mb * MEGABYTE, dtype=torch.uint8, device=device))


@dataclass(kw_only=True)
class UnevenData(Fault):
    """Run out of batches before one step."""

    name = "uneven-data"
    finding = "uneven-inputs"
    min_ranks = 2
    step: int = 5

    def attach(self, scene: Scene) -> None:
        super().attach(scene)
        if self.is_here:
            scene.batches.end_behind(self.step - 1)


@dataclass(kw_only=True)
class EarlyBreak(Fault):
    """Leave the training loop behind one step, and the program in order."""

    name = "early-break"
    finding = "rank-exited"
    min_ranks = 2
    needs_later_step = True
    step: int = 5

    def after_step(self, step: int) -> None:
        if step == self.step and self.is_here:
            assert self.scene is not None
            self.scene.batches.stop()
