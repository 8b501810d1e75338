"""Ranks, stages and links that are slow, while the job goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from reference_trainer.faults.base import Fault, Scene


@dataclass(kw_only=True)
class SlowRank(Fault):
    """Sleep `ms` milliseconds before every step."""

    name = "slow-rank"
    finding = "slow-rank"
    ms: int = 100

    def before_step(self, step: int) -> None:
        if self.is_here:
            _sleep(self.delay_ms(step))

    def delay_ms(self, step: int) -> float:
        """Return how long to sleep before this step."""
        del step
        return self.ms


@dataclass(kw_only=True)
class GrowingSlowRank(SlowRank):
    """Sleep `ms` milliseconds more before each step than before the last."""

    name = "slow-rank-growing"
    ms: int = 10

    def delay_ms(self, step: int) -> float:
        return self.ms * step


@dataclass(kw_only=True)
class RandomSlowRank(SlowRank):
    """Sleep before every step, a time drawn from 0 to twice `ms` milliseconds."""

    name = "slow-rank-random"

    def delay_ms(self, step: int) -> float:
        return random.Random(step).uniform(0, 2 * self.ms)


@dataclass(kw_only=True)
class SlowBackward(Fault):
    """Sleep `ms` milliseconds inside every backward pass, before the first gradients are ready."""

    name = "slow-rank-backward"
    finding = "slow-rank"
    ms: int = 100

    def attach(self, scene: Scene) -> None:
        super().attach(scene)
        if not self.is_here:
            return
        for part in scene.parts:
            part.module.register_forward_hook(self._delay_backward)

    def _delay_backward(self, _module: object, _inputs: object, output: Any) -> None:
        from torch import Tensor

        first = output if isinstance(output, Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(lambda _: _sleep(self.ms))


@dataclass(kw_only=True)
class SlowStage(Fault):
    """Sleep `ms` milliseconds in every forward pass of this rank's stages."""

    name = "slow-stage"
    finding = "slow-rank"
    needs_pipeline = True
    ms: int = 50

    def attach(self, scene: Scene) -> None:
        super().attach(scene)
        if self.is_here:
            for part in scene.parts:
                part.module.register_forward_pre_hook(lambda *_: _sleep(self.ms))


@dataclass(kw_only=True)
class SlowLink(Fault):
    """Hold every send of this rank back for `ms` milliseconds."""

    name = "slow-link"
    finding = "slow-rank"
    needs_pipeline = True
    default_rank = 0
    ms: int = 20

    def attach(self, scene: Scene) -> None:
        super().attach(scene)
        if not self.is_here or scene.pipeline is None:
            return
        schedule: Any = scene.pipeline.schedule
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
                setattr(stage, name, partial(self._hold_back, getattr(stage, name)))

    def _hold_back(self, find_sends: Callable[[int], list[Any]], index: int) -> list[Any]:
        sends = find_sends(index)
        _sleep(self.ms * len(sends))
        return sends


def _sleep(ms: float) -> None:
    time.sleep(ms / 1000)
