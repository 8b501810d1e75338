"""What a fault is, and the moments of a job at which it may act; free of torch until it does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, distributed

    from reference_trainer.batches import Batches
    from reference_trainer.interfaces import Part
    from reference_trainer.parallelism.axes import Axes
    from reference_trainer.parallelism.build import Training
    from reference_trainer.parallelism.pipeline import PipelinePass


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Hold what a fault may tamper with on this rank."""

    rank: int
    parts: Sequence[Part]
    pipeline: PipelinePass | None
    batches: Batches
    loss_group: distributed.ProcessGroup | None

    @classmethod
    def find(cls, training: Training, batches: Batches, axes: Axes, *, rank: int) -> Scene:
        """Put together what the training loop has."""
        return cls(
            rank=rank,
            parts=training.parts,
            pipeline=training.pipeline,
            batches=batches,
            loss_group=axes.loss_group,
        )


@dataclass(kw_only=True)
class Fault:
    """Leave the job healthy; every fault overrides some of the moments below, which the training loop names.

    They are called on every rank, so that a fault can also be one of several ranks together; `is_here` tells the rank
    that is guilty.
    """

    name: ClassVar[str] = ""
    # The kind of finding that dtprof must report, or the figure of its summary that must show it.
    finding: ClassVar[str | None] = None
    figure: ClassVar[str | None] = None
    default_rank: ClassVar[int | None] = None  # None: the last one
    min_ranks: ClassVar[int] = 1
    needs_pipeline: ClassVar[bool] = False
    needs_collectives: ClassVar[bool] = False
    # Whether something has to come after the step, for others to wait in.
    needs_later_step: ClassVar[bool] = False

    rank: int
    scene: Scene | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def is_here(self) -> bool:
        """Tell whether this rank is the guilty one."""
        return self.scene is not None and self.scene.rank == self.rank

    def attach(self, scene: Scene) -> None:
        """Learn where it is, before the first step."""
        self.scene = scene

    def before_step(self, step: int) -> None:
        """Act before the forward pass."""

    def before_loss_average(self, step: int, loss_sum: Tensor) -> Tensor:
        """Act before the all_reduce of the loss, or bring something else to it."""
        del step
        return loss_sum

    def after_step(self, step: int) -> None:
        """Act behind the all_reduce of the loss."""

    @classmethod
    def find_keys(cls) -> list[str]:
        """Return the names of its settings."""
        return [field.name for field in fields(cls) if field.init]


@dataclass(kw_only=True)
class StepFault(Fault):
    """Act once, before one step, on the guilty rank."""

    step: int = 5

    def before_step(self, step: int) -> None:
        if step == self.step and self.is_here:
            self.strike()

    def strike(self) -> None:
        """Do what is wrong."""
        raise NotImplementedError
