"""The log of a process that is no part of a run, for programs that record by themselves."""

from pathlib import Path

import torch

from dtprof.capture.recorder import Recorder
from dtprof.capture.recorder import open_recorder as open_any


def open_recorder(folder: str) -> Recorder:
    """Open the log of rank 0 of 1 in a folder."""
    return open_any(
        folder=Path(folder),
        rank=0,
        local_rank=0,
        world_size=1,
        attempt=0,
        torch_folder=str(Path(torch.__file__).parent),
        torch_version=torch.__version__,
    )
