"""Ranks that wait for something that is no collective, or work alone for long."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reference_trainer.faults.base import Fault, Scene, StepFault

if TYPE_CHECKING:
    from reference_trainer.batches import RowsOfRank
    from reference_trainer.interfaces import Batch


@dataclass(kw_only=True)
class LoaderHang(Fault):
    """Never get the rows of one step from the data set."""

    name = "loader-hang"
    finding = "rank-stuck"
    step: int = 5

    def attach(self, scene: Scene) -> None:
        super().attach(scene)
        if self.is_here:
            scene.batches.rows = _HangingRows(scene.batches.rows, num_steps=self.step - 1)  # type: ignore[assignment]


class _HangingRows:
    """Give the rows of some steps, then wait for what never comes."""

    def __init__(self, rows: RowsOfRank, *, num_steps: int) -> None:
        self.rows = rows
        self.num_left = num_steps

    def __getitem__(self, first_sample: int) -> Batch:
        if self.num_left == 0:
            threading.Event().wait()
        self.num_left -= 1
        return self.rows[first_sample]


@dataclass(kw_only=True)
class TakenLock(StepFault):
    """Wait at one step for a lock that a thread of the same process holds for ever."""

    name = "lock"
    finding = "rank-stuck"

    def strike(self) -> None:
        lock, taken = threading.Lock(), threading.Event()

        def hold() -> None:
            with lock:
                taken.set()
                threading.Event().wait()

        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        lock.acquire()


@dataclass(kw_only=True)
class EmptyFifo(StepFault):
    """Open a named pipe at one step that no other process writes to."""

    name = "fifo"
    finding = "rank-stuck"

    def strike(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipe = Path(folder) / "pipe"
            os.mkfifo(pipe)
            pipe.read_bytes()


@dataclass(kw_only=True)
class LongCheckpoint(StepFault):
    """Write a file again and again for `seconds` at one step, on this rank alone."""

    name = "long-checkpoint"
    finding = "long-operation"
    default_rank = 0
    min_ranks = 2
    seconds: int = 30

    def strike(self) -> None:
        import torch

        assert self.scene is not None
        state = [part.module.state_dict() for part in self.scene.parts]
        end_s = time.monotonic() + self.seconds
        with tempfile.TemporaryDirectory() as folder:
            while time.monotonic() < end_s:
                torch.save(state, Path(folder) / "model.pt")


@dataclass(kw_only=True)
class MemoryLeak(Fault):
    """Keep `mb` MiB more after every step."""

    name = "memory-leak"
    figure = "memory.growth"
    mb: int = 20

    def attach(self, scene: Scene) -> None:
        super().attach(scene)
        self.kept: list[bytearray] = []

    def after_step(self, step: int) -> None:
        del step
        if self.is_here:
            piece = bytearray(self.mb * 2**20)
            piece[::4096] = b"\1" * len(piece[::4096])  # touched: only then is it the process's
            self.kept.append(piece)
