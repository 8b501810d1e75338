"""Callbacks that mark the steps and phases of a trainer which owns the loop: of Lightning, and of transformers.

dtprof needs neither of them. They say what it otherwise infers: that a step of the trainer, which may run several
optimizers, is one step, and which time is validation. Where dtprof does not record, they cost a call a step.
"""

from importlib import import_module
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
    """Return a callback for `transformers.Trainer(callbacks=[...])`, also of TRL's trainers: a step for each of theirs.

    Raises:
        ImportError: transformers is not installed.
    """
    base = import_module("transformers").TrainerCallback

    class MarkingCallback(base):  # type: ignore[misc,valid-type]
        """Marks steps for dtprof."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """End a step, once for all its accumulated batches."""
            marks.step()

    return MarkingCallback()
