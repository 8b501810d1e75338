"""Handles that end in another thread than began them, in threads that end, in a forked child and after their group."""

import os
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

HANDLES, THREADS = 600, 5


def launch(count: int) -> list[dist.Work]:
    """Begin so many operations."""
    return [dist.all_reduce(tensor, async_op=True) for _ in range(count)]


def in_thread(work: Callable[[], object]) -> None:
    """Do it in a thread that ends then."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def end(handles: list[dist.Work]) -> None:
    """Wait for all and drop them."""
    while handles:
        handles.pop().wait()


def here() -> None:
    """Launch from two lines in turn, and from a third through the same functions of torch."""
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(10)
for _ in range(THREADS):
    handles = launch(HANDLES)
    in_thread(lambda kept=handles: end(kept))
for _ in range(THREADS):
    in_thread(lambda: end(launch(HANDLES)))
handles = launch(HANDLES)
for handle in handles:
    handle.wait()
if (child := os.fork()) == 0:
    handles.clear()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
end(handles)
for _ in range(3):
    here()
    dist.all_reduce(tensor)
handles = launch(HANDLES)
for handle in handles:
    handle.wait()
dist.destroy_process_group()
end(handles)
