"""Where this process stands among the ranks of the job, as the launcher tells it; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Name one rank of a job; `launched` is false for a plain `python -m`, which needs no process group.

    `attempt` counts the restarts of torchrun.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False
    attempt: int = 0


def read_placement(environment: Mapping[str, str]) -> Placement:
    """Read the variables that torchrun sets for every rank."""
    if "RANK" not in environment:
        return Placement()
    world_size = int(environment["WORLD_SIZE"])
    return Placement(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        launched=True,
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )
