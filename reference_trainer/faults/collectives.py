"""Ranks whose collectives do not match those of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from reference_trainer.faults.base import Fault, Scene

if TYPE_CHECKING:
    from torch import Tensor, distributed


@dataclass(kw_only=True)
class CollectiveFault(Fault):
    """Act at one step, in a job of two ranks or more."""

    min_ranks = 2
    needs_collectives = True
    step: int = 5

    def is_now(self, step: int) -> bool:
        """Tell whether this is the guilty rank's moment."""
        return step == self.step and self.is_here

    @property
    def group(self) -> distributed.ProcessGroup:
        """Return the group in which the loss is averaged: that of all ranks, which gradients do not use."""
        assert self.scene is not None
        assert self.scene.loss_group is not None
        return self.scene.loss_group


@dataclass(kw_only=True)
class AllReduceFault(CollectiveFault):
    """Let the training loop call something else by the name of all_reduce when it averages the loss at one step."""

    original: Any = field(default=None, init=False, repr=False, compare=False)

    def before_loss_average(self, step: int, loss_sum: Tensor) -> Tensor:
        from torch import distributed

        if self.is_now(step):
            self.original = distributed.all_reduce
            distributed.all_reduce = self.find_replacement()
        return loss_sum

    def after_step(self, step: int) -> None:
        from torch import distributed

        if self.is_now(step):
            distributed.all_reduce = self.original

    def find_replacement(self) -> Any:
        """Return what is called instead."""
        raise NotImplementedError


@dataclass(kw_only=True)
class SkipCollective(AllReduceFault):
    """Leave out the all_reduce of the loss at one step and go on training.

    The others wait in `average_loss`; this rank waits for them in the next step. The job hangs until the timeout of the
    backend, because the loss has a process group of its own (see `axes.py`).
    """

    name = "skip-collective"
    finding = "rank-skipped-collective"
    needs_later_step = True

    def find_replacement(self) -> Any:
        return lambda *_, **__: None


@dataclass(kw_only=True)
class SwapCollectives(CollectiveFault):
    """Make a broadcast before an all_gather at one step, where the others make it after."""

    name = "swap-collectives"
    finding = "collective-order-mismatch"

    def after_step(self, step: int) -> None:
        if step == self.step:
            calls = [self._gather, self._broadcast]
            for call in reversed(calls) if self.is_here else calls:
                call()

    def _gather(self) -> None:
        import torch
        from torch import distributed

        mine = torch.zeros(64, device=_device(self))
        distributed.all_gather([torch.empty_like(mine) for _ in range(self.group.size())], mine, group=self.group)

    def _broadcast(self) -> None:
        import torch
        from torch import distributed

        distributed.broadcast(torch.zeros(64, device=_device(self)), group_src=0, group=self.group)


@dataclass(kw_only=True)
class ResizeCollective(CollectiveFault):
    """Bring twice as many numbers to the all_reduce of the loss at one step."""

    name = "resize-collective"
    finding = "size-mismatch"

    def before_loss_average(self, step: int, loss_sum: Tensor) -> Tensor:
        return loss_sum.repeat(2) if self.is_now(step) else loss_sum


@dataclass(kw_only=True)
class WrongDtype(CollectiveFault):
    """Bring another number format to the all_reduce of the loss at one step."""

    name = "wrong-dtype"
    finding = "dtype-mismatch"

    def before_loss_average(self, step: int, loss_sum: Tensor) -> Tensor:
        return loss_sum.float() if self.is_now(step) else loss_sum


@dataclass(kw_only=True)
class WrongReduceOp(AllReduceFault):
    """Take the maximum in the all_reduce of the loss at one step, where the others take the sum."""

    name = "wrong-reduce-op"
    finding = "reduce-op-mismatch"

    def find_replacement(self) -> Any:
        from torch import distributed

        # A partial has no frame of its own: the line that calls stays that of the training loop.
        return partial(self.original, op=distributed.ReduceOp.MAX)


@dataclass(kw_only=True)
class WrongRoot(CollectiveFault):
    """Broadcast from this rank at one step, where the others take rank 0 for the source."""

    name = "wrong-root"
    finding = "root-mismatch"

    def after_step(self, step: int) -> None:
        import torch
        from torch import distributed

        if step == self.step:
            source = self.rank if self.is_here else 0
            distributed.broadcast(torch.zeros(64, device=_device(self)), group_src=source, group=self.group)


@dataclass(kw_only=True)
class Rank0Barrier(CollectiveFault):
    """Enter a barrier on this rank alone, after one step."""

    name = "rank0-barrier"
    finding = "collective-order-mismatch"
    default_rank = 0
    needs_later_step = True

    def after_step(self, step: int) -> None:
        from torch import distributed

        if self.is_now(step):
            distributed.barrier()


@dataclass(kw_only=True)
class CrossGroupInversion(CollectiveFault):
    """Enter two groups of all ranks in the order opposite to that of the others, after one step."""

    name = "cross-group-inversion"
    finding = "group-order-inversion"

    def attach(self, scene: Scene) -> None:
        from torch import distributed

        super().attach(scene)
        self.other_group = cast("distributed.ProcessGroup", distributed.new_group(group_desc="other"))

    def after_step(self, step: int) -> None:
        import torch
        from torch import distributed

        if step == self.step:
            groups = [self.group, self.other_group]
            for group in reversed(groups) if self.is_here else groups:
                distributed.all_reduce(torch.zeros(64, device=_device(self)), group=group)


@dataclass(kw_only=True)
class UnwaitedAsync(CollectiveFault):
    """Start an all_reduce after every step from one on, drop its handle, and use what it was to fill."""

    name = "unwaited-async"
    finding = "unwaited-async"

    def after_step(self, step: int) -> None:
        import torch
        from torch import distributed

        if step < self.step:
            return
        total = torch.zeros(64, device=_device(self))
        work = distributed.all_reduce(total, group=self.group, async_op=True)
        if not self.is_here and work is not None:
            work.wait()
        total.mean()


@dataclass(kw_only=True)
class SmallCollectives(Fault):
    """Average `count` single numbers after every step, on all ranks, each in an all_reduce of its own."""

    name = "small-collectives"
    figure = "small_messages"
    min_ranks = 2
    needs_collectives = True
    count: int = 100

    def after_step(self, step: int) -> None:
        import torch
        from torch import distributed

        del step
        assert self.scene is not None
        for _ in range(self.count):
            distributed.all_reduce(torch.zeros((), device=_device(self)), group=self.scene.loss_group)


def _device(fault: Fault) -> Any:
    assert fault.scene is not None
    return next(fault.scene.parts[0].module.parameters()).device
