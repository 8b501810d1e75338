"""Three ranks on gloo, rank 2 skips an all_reduce; each writes torch's dumps: flight_recorded.py FOLDER."""

import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

folder = Path(sys.argv[1])
store = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    is_master=False,
    timeout=timedelta(seconds=150),
)
dist.init_process_group("gloo")
rank = dist.get_rank()
values = torch.ones(4)


def train() -> None:
    for _ in range(3):
        dist.all_reduce(values)
        dist.broadcast(values, src=0)


def entries() -> list[dict[str, object]]:
    return pickle.loads(c10d._dump_fr_trace())["entries"]


train()
while not all(entry["retired"] for entry in entries()):
    time.sleep(0.01)  # gloo retires what has ended in threads of its own
(folder / f"sound_{rank}").write_bytes(c10d._dump_fr_trace())
if rank != 2:
    handle = dist.all_reduce(values, async_op=True)
(folder / f"hung_{rank}").write_bytes(c10d._dump_fr_trace())
text = c10d._dump_fr_trace_json()
(folder / f"hung_as_json_{rank}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
store.set(f"written {rank}", "yes")
store.wait([f"written {peer}" for peer in range(3)])
os._exit(0)
