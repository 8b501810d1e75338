"""Launch ranks as torchrun does, forked from one process that has imported torch: each import spared is seconds of CPU.

    python tests/forking_launcher.py NPROC PROGRAM [ARGUMENT ...]
    python tests/forking_launcher.py NPROC -m MODULE [ARGUMENT ...]

For tests of what a rank records. Tests of how a job is launched use torchrun itself (`jobs.torchrun`).
"""

import importlib
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing import popen_fork
from pathlib import Path

import torch.distributed as dist

POLL_S = 0.02
GRACE_S = 30.0
"""As torchrun: so long have ranks to end after SIGTERM."""
_DYNAMO = ("torch._dynamo",)
IMPORTED_BEFORE = {
    "reference_trainer": ("torch.distributed.checkpoint", "torch.distributed.pipelining"),
    **{
        f"tests.accelerator.programs.{name}": ("tests.accelerator.simulated_device", "torch.distributed.pipelining")
        for name in ("collectives", "hanging", "known_steps", "layouts")
    },
    "tests.completeness.programs.every_call": _DYNAMO,
    "tests.completeness.programs.scenarios": (
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch._inductor.compile_fx",
    ),
    "data_parallel.py": ("torch.distributed.fsdp", *_DYNAMO),
    **{f"device_{name}.py": ("tests.accelerator.simulated_device",) for name in ("faults", "times")},
    "frameworks.py": ("torch.distributed.checkpoint", "torch.distributed.fsdp", *_DYNAMO),
    **{f"{name}.py": _DYNAMO for name in ("mismatched", "models", "monitored", "windowed", "windows_in_turn")},
    "pipelines.py": ("torch.distributed.pipelining",),
    "sharded_by_hand.py": ("torch.distributed.tensor", *_DYNAMO),
    "trained.py": ("torch.distributed.checkpoint", "torch.distributed.pipelining"),
}
"""What a program imports, by itself or by what it calls, that costs as much again as torch: torch._dynamo."""


class Rank(popen_fork.Popen):
    """A forked rank; dtprof records the exit status of a child that multiprocessing reaps."""

    def _launch(self, process_obj: object) -> None:
        del process_obj
        self.pid = os.fork()


def main(arguments: Sequence[str]) -> int:
    """Launch the ranks and return 0 if all of them did; in a rank, run the program."""
    world_size, program = int(arguments[0]), arguments[1:]
    for module in IMPORTED_BEFORE.get(program[1] if program[0] == "-m" else Path(program[0]).name, ()):
        importlib.import_module(module)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks: list[Rank] = []
    for rank in range(world_size):
        ranks.append(Rank(None))
        if ranks[-1].pid == 0:
            _run_program(program, rank, world_size, port)
            return 0
    # The store lives here as in torchrun's agent, and after the forks: it has threads.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _wait(ranks)
    finally:
        _end(ranks)
        del store


def _run_program(program: Sequence[str], rank: int, world_size: int, port: int) -> None:
    """Run the program as `python PROGRAM` or `python -m MODULE` would, with the variables of torchrun."""
    os.setsid()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "forked",
    }
    if program[0] == "-m":
        sys.argv = list(program[1:])
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def _wait(ranks: Sequence[Rank]) -> int:
    """Wait until every rank has ended in order, or one has failed."""
    running = list(ranks)
    while running:
        time.sleep(POLL_S)
        for rank in list(running):
            status = rank.poll()
            if status:
                print(f"rank {ranks.index(rank)} (pid {rank.pid}) failed with exit status {status}", file=sys.stderr)
                return 1
            if status == 0:
                running.remove(rank)
    return 0


def _end(ranks: Sequence[Rank]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for rank in ranks:
            if rank.poll() is None:
                os.kill(rank.pid, number)
        deadline_s = time.monotonic() + patience_s
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
