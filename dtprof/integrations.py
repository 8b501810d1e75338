"""Marks of steps and phases where a framework has the loop or its calls: Lightning, transformers, Accelerate.

dtprof needs neither of them. They say what it otherwise infers: that a step of the trainer, which may run several
optimizers, is one step, and which time is validation. Where dtprof does not record, they cost a call a step.
"""

import functools
from importlib import import_module
from types import MethodType
from typing import Any

from dtprof import marks


def lightning_callback() -> Any:
    """Return a callback for `lightning.Trainer(callbacks=[...])`: steps, and validation and tests as phases.

    A step ends with the batch in which the trainer's `global_step` grew, however many optimizers it stepped.

    Raises:
        ImportError: neither lightning nor pytorch_lightning is installed.
    """
    try:
        base = import_module("lightning.pytorch").Callback
    except ImportError:
        base = import_module("pytorch_lightning").Callback

    class MarkingCallback(base):  # type: ignore[misc,valid-type]
        """Marks steps and phases for dtprof."""

        def __init__(self) -> None:
            super().__init__()
            self._steps = 0
            self._open: list[marks.Phase] = []

        def _begin(self, name: str) -> None:
            self._open.append(marks.phase(name).__enter__())

        def _end(self) -> None:
            if self._open:
                self._open.pop().__exit__(None)

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            """Count from a checkpoint's steps on."""
            self._steps = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            """End a step where gradients were not only accumulated."""
            if trainer.global_step != self._steps:
                self._steps = trainer.global_step
                marks.step()

        def on_validation_start(self, *_: Any) -> None:
            """Begin a phase."""
            self._begin("validation")

        def on_validation_end(self, *_: Any) -> None:
            """End a phase."""
            self._end()

        def on_test_start(self, *_: Any) -> None:
            """Begin a phase."""
            self._begin("test")

        def on_test_end(self, *_: Any) -> None:
            """End a phase."""
            self._end()

        def on_exception(self, *_: Any) -> None:
            """End what the exception left open."""
            while self._open:
                self._end()

    return MarkingCallback()


def transformers_callback() -> Any:
    """Return a callback for `transformers.Trainer(callbacks=[...])`, also of TRL's trainers: steps, and validation.

    A step ends where one of the Trainer's does. Evaluation that the Trainer starts itself is the phase `validation`.

    Raises:
        ImportError: transformers is not installed.
    """
    base = import_module("transformers").TrainerCallback

    class MarkingCallback(base):  # type: ignore[misc,valid-type]
        """Marks steps and phases for dtprof."""

        def __init__(self) -> None:
            super().__init__()
            self._open: marks.Phase | None = None

        def _begin(self, control: Any) -> None:
            if control.should_evaluate and self._open is None:
                self._open = marks.phase("validation").__enter__()

        def _begin_unless_logging(self, control: Any) -> None:
            # The Trainer logs before it evaluates, and gathers the loss of all ranks for it.
            if not control.should_log:
                self._begin(control)

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            """End a step, once for all its accumulated batches."""
            marks.step()
            self._begin_unless_logging(control)

        def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            """Begin the evaluation of an epoch."""
            self._begin_unless_logging(control)

        def on_log(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            """Begin the evaluation that follows."""
            self._begin(control)

        def on_prediction_step(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            """Begin the evaluation that another callback asked for, after its first batch."""
            self._begin(control)

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            """End the evaluation."""
            if self._open is not None:
                self._open.__exit__(None)
                self._open = None

    return MarkingCallback()


def mark_accelerate(accelerator: Any, optimizer: Any) -> None:
    """Mark the steps of a loop by Accelerate, and calls of its Accelerator as phases.

    A step ends where the optimizer steps and gradients are not only accumulated, also where a scaler skips it. The
    phases have the names of the calls: `gather_for_metrics`, `save_state`, `load_state`.

    Parameters:
        accelerator: The `accelerate.Accelerator`.
        optimizer: As `accelerator.prepare` returned it; of several the one that steps last.
    """

    def step(_: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if accelerator.sync_gradients:
            marks.step()
        return result

    original = optimizer.step
    # Schedulers of torch ask a step for the function under it, and for their own mark on it.
    optimizer.step = MethodType(functools.wraps(original)(step), optimizer)
    for name in ("gather_for_metrics", "save_state", "load_state"):
        setattr(accelerator, name, marks.phase(name)(getattr(accelerator, name)))
