"""Ranks whose part of the model does something else than that of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference_trainer.faults.base import Fault


@dataclass(kw_only=True)
class UnusedParameters(Fault):
    """Pass the last layer by on this rank from one step on: its weights get no gradient here."""

    name = "unused-parameters"
    finding = "rank-skipped-collective"
    min_ranks = 2
    needs_later_step = True
    step: int = 5

    def before_step(self, step: int) -> None:
        from reference_trainer.models import layer_lists

        if step != self.step or not self.is_here:
            return
        assert self.scene is not None
        model: Any = self.scene.parts[-1].module
        layers = [layer for layers in layer_lists(getattr(model, "module", model)) for layer in layers.values()]
        layers[-1].forward = lambda x, *_: x


@dataclass(kw_only=True)
class MissingMicrobatch(Fault):
    """Run one microbatch fewer than the other stages, from one step on."""

    name = "missing-microbatch"
    finding = "pipeline-schedule-mismatch"
    needs_pipeline = True
    step: int = 5

    def before_step(self, step: int) -> None:
        if step == self.step and self.is_here:
            assert self.scene is not None
            assert self.scene.pipeline is not None
            _drop_microbatch(self.scene.pipeline.schedule)


def _drop_microbatch(schedule: Any) -> None:
    """Let a schedule of torch pass its last microbatch by; the batch is still cut into as many as before."""
    orders = getattr(schedule, "pipeline_order_with_comms", None)
    if orders is not None:
        last = schedule._n_microbatches - 1
        orders[schedule.rank] = [action for action in orders[schedule.rank] if action.microbatch_index != last]
        return
    run = schedule._step_microbatches

    def run_fewer(*microbatches: Any, **settings: Any) -> None:
        schedule._n_microbatches -= 1
        try:
            run(*(given[:-1] if given else given for given in microbatches), **settings)
        finally:
            schedule._n_microbatches += 1

    schedule._step_microbatches = run_fewer
