"""Several threads that issue operations at once, some of them to the end of the process."""

import random
import threading
from typing import Any

from tests.stress.rank import Rank, finish


def plan(chance: random.Random) -> dict[str, Any]:
    """Return what one trial does."""
    threads = chance.choice([2, 3, 5])
    return {
        "ranks": chance.choice([1, 1, 2]),
        "groups": threads + 1,
        "each": chance.choice([30, 100, 300]),
        "rounds": chance.choice([1, 3]),
        "daemons_at_exit": chance.random() < 0.4,
    }


def work(rank: Rank) -> None:
    """Let every thread have a group of its own; new threads take them over in each round."""
    for number in range(rank.plan["rounds"]):
        threads = [
            threading.Thread(target=issue, args=(rank, group, rank.plan["seed"] + i + number * 100))
            for i, group in enumerate(rank.groups[1:])
        ]
        for thread in threads:
            thread.start()
        finish(rank.issue_some(rank.plan["each"], rank.groups[0], rank.chance))
        for thread in threads:
            thread.join()
    rank.sum_up()
    if rank.plan["daemons_at_exit"]:
        for group in rank.groups[1:]:
            threading.Thread(target=issue_without_end, args=(rank, group), daemon=True).start()
        finish(rank.issue_some(20, rank.groups[0], rank.chance))


def issue(rank: Rank, group: Any, seed: int) -> None:
    """Issue this thread's share."""
    finish(rank.issue_some(rank.plan["each"], group, random.Random(seed)))


def issue_without_end(rank: Rank, group: Any) -> None:
    """Issue until the end of the process."""
    chance = random.Random(rank.plan["seed"])
    while True:
        finish(rank.issue_some(10, group, chance))
