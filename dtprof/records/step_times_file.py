"""The file of the ends of steps of a process, for `dtprof overhead`.

Standard library only: written inside the user's job.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

MARK = b"DTPSTEPS"
HEADER = struct.Struct("<8sqqq")
"""Mark, host time at the start of the interpreter, RANK (-1 unknown), 1 where an accelerator is in use."""
STEP = struct.Struct("<qqq")
"""Host time, processor time of the thread, time that the thread waited for a processor; ns; the last -1 unknown."""
SUFFIX = ".steps"


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The ends of steps of a process on the host clock, and the processor time of its stepping thread by then."""

    rank: int  # -1 unknown
    started_ns: int  # the interpreter
    uses_accelerator: bool
    ends_ns: tuple[int, ...]
    running_ns: tuple[int, ...]  # processor time of the thread
    queued_ns: tuple[int, ...]  # time it waited for a processor; all -1 where the kernel does not count

    @property
    def knows_queue(self) -> bool:
        """Say whether the kernel counted the time that the thread waited for a processor."""
        return min(self.queued_ns, default=-1) >= 0


def read_folder(folder: Path) -> list[StepTimes]:
    """Read the files of all processes, by rank; an entry cut short by a kill is omitted."""
    step_times = [times for file in folder.glob(f"*{SUFFIX}") if (times := _read(file)) is not None]
    return sorted(step_times, key=lambda times: (times.rank, times.started_ns))


def _read(file: Path) -> StepTimes | None:
    data = file.read_bytes()
    if len(data) < HEADER.size:
        return None
    mark, started_ns, rank, device = HEADER.unpack_from(data)
    if mark != MARK:
        return None
    body = data[HEADER.size :]
    steps = list(STEP.iter_unpack(body[: len(body) // STEP.size * STEP.size]))
    return StepTimes(
        rank=rank,
        started_ns=started_ns,
        uses_accelerator=bool(device),
        ends_ns=tuple(step[0] for step in steps),
        running_ns=tuple(step[1] for step in steps),
        queued_ns=tuple(step[2] for step in steps),
    )
