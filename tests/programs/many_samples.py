"""Write more events than a log may keep: many_samples.py FOLDER COUNT."""

import sys
from pathlib import Path

import torch

from dtprof.capture.recorder import open_recorder


def main(folder, count):
    recorder = open_recorder(
        folder=Path(folder),
        rank=0,
        local_rank=0,
        world_size=1,
        attempt=0,
        torch_folder=str(Path(torch.__file__).parent),
        torch_version=torch.__version__,
    )
    name = recorder.name_id("value")
    for value in range(count):
        recorder.sample(name, value)
    recorder.close_log()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
