"""Record when the steps of a rank end, and nothing else: the clock of both arms of `dtprof overhead`.

Both arms have it, so that its cost (about 3 us a step) drops out of the comparison.
A step ends when the first optimizer that the process steps has stepped.
"""

import os
import time
from pathlib import Path
from typing import Any

from dtprof import fence
from dtprof.records import step_times_file


class StepClock:
    """Appends one entry a step to the file of each process."""

    def __init__(self, folder: Path, started_ns: int) -> None:
        """Write below this folder; the first step opens the file."""
        self._folder = folder
        self._started_ns = started_ns
        self._pid = 0
        self._file = -1
        self._schedstat = -1
        self._optimizer = 0

    @fence.fenced("the clock of steps")
    def install(self) -> None:
        """Hook the optimizers of torch."""
        import torch.optim.optimizer as optimizers

        optimizers.register_optimizer_step_post_hook(self._after_step)

    @fence.fenced("the clock of steps")
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._pid != os.getpid():
            self._open(optimizer)
        if id(optimizer) == self._optimizer:
            now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            os.write(self._file, step_times_file.STEP.pack(now_ns, *self._thread_times()))

    def _open(self, optimizer: object) -> None:
        import torch

        self._pid, self._optimizer = os.getpid(), id(optimizer)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._folder / f"{self._pid}{step_times_file.SUFFIX}", flags, 0o644)
        text = os.environ.get("RANK", "")
        device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        rank = int(text) if text.isdigit() else -1
        os.write(self._file, step_times_file.HEADER.pack(step_times_file.MARK, self._started_ns, rank, int(device)))
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._schedstat = -1

    def _thread_times(self) -> tuple[int, int]:
        if self._schedstat < 0:
            return time.thread_time_ns(), -1
        running, waiting, _ = os.pread(self._schedstat, 128, 0).split()
        return int(running), int(waiting)
