"""Kill -9 of all ranks at a random moment: what was issued is in the run."""

import random
import threading
from typing import Any

from tests.stress.rank import Rank, finish


def plan(chance: random.Random) -> dict[str, Any]:
    """Return what one trial does."""
    return {
        "ranks": chance.choice([1, 2, 2]),
        "groups": chance.choice([1, 2, 3]),
        "threads": chance.choice([0, 0, 1, 2]),
        "kill_after_s": chance.uniform(0.0, 0.3),
    }


def work(rank: Rank) -> None:
    """Issue operations without end, on further threads too where there are groups for them."""
    for number in range(min(rank.plan["threads"], len(rank.groups) - 1)):
        chance = random.Random(rank.plan["seed"] + number)
        threading.Thread(target=issue_without_end, args=(rank, rank.groups[-1 - number], chance), daemon=True).start()
    issue_without_end(rank, rank.groups[0], rank.chance)


def issue_without_end(rank: Rank, group: Any, chance: random.Random) -> None:
    """Issue until the end of the process."""
    while True:
        finish(rank.issue_some(10, group, chance))
