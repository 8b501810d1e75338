"""Start all ranks anew for each trial and kill them all at once at a random moment.

killed.py FOLDER TRIALS SEED    -> FOLDER/calls-TRIAL-RANK: one byte before each operation, another after its call
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def work(rank, folder, trial):
    """Issue operations without end, most of them asynchronous."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{trial}", rank=rank, world_size=RANKS)
    file = os.open(f"{folder}/calls-{trial}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    tensors = [torch.ones(64) for _ in range(4)]
    while True:
        handles = []
        for tensor in tensors:
            os.write(file, b"<")
            handles.append(dist.all_reduce(tensor, async_op=True))
            os.write(file, b">")
        for handle in handles:
            handle.wait()
        os.write(file, b"<")
        dist.barrier()
        os.write(file, b">")


def main(folder, trials, seed):
    chance = random.Random(seed)
    for trial in range(trials):
        ranks = mp.start_processes(work, (folder, trial), nprocs=RANKS, join=False, start_method="fork").processes
        files = [Path(folder, f"calls-{trial}-{rank}") for rank in range(RANKS)]
        while not all(file.exists() and file.stat().st_size for file in files):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.3))
        for deed in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: who loses its peer before it is killed raises
            for rank in ranks:
                os.kill(rank.pid, deed)
        for rank in ranks:
            rank.join()
            assert rank.exitcode == -signal.SIGKILL, rank.exitcode


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
