"""Ends of the interpreter with operations open, groups held, and handlers that issue more."""

import atexit
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.stress.rank import Rank, finish

ENDS = ("return", "exit", "_exit", "exception", "exit-in-thread", "exception-in-thread", "sigint", "sigterm", "sigabrt")
_kept: list[Any] = []


def plan(chance: random.Random) -> dict[str, Any]:
    """Return what one trial does."""
    return {
        "ranks": chance.choice([1, 1, 2]),
        "groups": chance.choice([1, 2]),
        "end": chance.choice(ENDS),
        "open": chance.choice(["none", "some", "kept"]),
        "at_exit": chance.choice(["nothing", "nothing", "operations", "destroy"]),
        "destroys": chance.random() < 0.4,
        "thread": chance.random() < 0.3,
    }


def work(rank: Rank) -> None:
    """Leave operations open as planned, and end."""
    if rank.plan["at_exit"] == "operations":
        atexit.register(lambda: finish(rank.issue_some(5, rank.groups[0], rank.chance)))
    if rank.plan["at_exit"] == "destroy":
        atexit.register(destroy)
    if rank.plan["thread"]:
        on_thread(lambda: finish(rank.issue_some(10, rank.groups[-1], rank.chance)))
    open_handles = rank.issue_some(30, rank.groups[0], rank.chance)
    rank.sum_up()
    if rank.plan["open"] == "none":
        finish(open_handles)
    if rank.plan["open"] == "kept":
        _kept.extend(open_handles)
    if rank.plan["destroys"]:
        finish(open_handles)
        destroy()
    end(rank.plan["end"])


def destroy() -> None:
    """Destroy all groups, once."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end(how: str) -> None:
    """End this process in this way."""
    if how == "exit":
        sys.exit(7)
    if how == "_exit":
        os._exit(8)
    if how == "exception":
        raise ValueError("planned")
    if how == "exit-in-thread":
        on_thread(lambda: sys.exit(9))
    if how == "exception-in-thread":
        on_thread(lambda: 1 / 0)
    if how in ("sigint", "sigterm", "sigabrt"):
        signal.raise_signal(signal.Signals[how.upper()])


def on_thread(function: Callable[[], object]) -> None:
    """Call a function on a thread of its own."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
