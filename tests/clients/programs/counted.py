"""Run a program, and write what gloo counted in each group when it ended: `counted.py FOLDER PROGRAM ARGUMENTS...`."""

import atexit
import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

counts: dict[str, int] = {}
destroy = dist.destroy_process_group


def count(groups: list[Any]) -> None:
    """Keep gloo's number of the last operation of these groups, those of which this process is no member left out."""
    for group in groups:
        if not isinstance(group, int):
            with contextlib.suppress(RuntimeError):  # a fake group has no numbers, and communicates nothing
                counts[group.group_name] = group._get_sequence_number_for_group()


def count_and_destroy(group: Any = None) -> None:
    """Count before the groups go."""
    count(list(distributed_c10d._world.pg_map) if group in (None, dist.group.WORLD) else [group])
    destroy(group)


def main() -> None:
    """Run the program as if it had been started itself."""
    folder, program = Path(sys.argv[1]), sys.argv[2]
    dist.destroy_process_group = distributed_c10d.destroy_process_group = count_and_destroy

    def write() -> None:
        if dist.is_initialized():  # or gloo's threads end with the interpreter, which aborts now and then
            count_and_destroy()
        (folder / f"gloo-{os.environ['RANK']}.json").write_text(json.dumps(counts))

    atexit.register(write)
    del sys.argv[:2]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
