"""Forks in the middle of operations: what the children do, and how they end, is no part of their parent's log."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from typing import Any

import torch

from tests.stress.rank import Rank, finish

ENDS_OF_INTERPRETERS = ("exit", "exception", "train-and-raise")
"""Ways in which torch alone may hang where gloo has connections: it waits for threads that were not forked."""
PLAIN_WAYS = ("_exit", "kill", "process", "subprocess", "train")
WAYS = PLAIN_WAYS + ENDS_OF_INTERPRETERS


def plan(chance: random.Random) -> dict[str, Any]:
    """Return what one trial does."""
    ranks = chance.choice([1, 1, 2])
    return {
        "ranks": ranks,
        "groups": chance.choice([1, 2]),
        "trained_before": chance.random() < 0.5,
        "ways": chance.sample(WAYS, 3) if ranks == 1 and chance.random() < 0.3 else chance.sample(PLAIN_WAYS, 3),
    }


def work(rank: Rank) -> None:
    """Fork while operations are open, go on meanwhile, and tell how the children ended."""
    if rank.plan["trained_before"]:
        train()
    for way in rank.plan["ways"]:
        open_handles = rank.issue_some(20, rank.groups[-1], rank.chance)
        status = start_child(way, rank)
        finish(open_handles)
        finish(rank.issue_some(20, rank.groups[0], rank.chance))
        print(f"{way}: {status()}", flush=True)
    rank.sum_up()


def start_child(way: str, rank: Rank) -> Any:
    """Start a child that ends in this way; return the function that waits for it."""
    if way == "process":
        process = multiprocessing.get_context("fork").Process(target=train)
        process.start()
        return lambda: (process.join(), process.exitcode)[1]
    if way == "subprocess":
        child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
        return child.wait
    pid = os.fork()
    if pid:
        return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    del rank
    end(way)
    os._exit(0)  # "exit" and "exception" do not come here


def end(way: str) -> None:
    """End this forked process, after a step of training where the way has one."""
    if way == "_exit":
        os._exit(4)
    if way == "exit":
        sys.exit(5)
    if way == "exception":
        raise ValueError("planned in the child")
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    train()
    if way == "train-and-raise":
        raise ValueError("planned in the child, after training")


def train() -> None:
    """Take a step of an optimizer: a process that does has a log of its own."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
