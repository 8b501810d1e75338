"""Tell replicas of a job from its restarts: groups of ranks with the same numbers that ran at the same time.

Fault-tolerant training runs several groups of ranks, each with ranks from 0 on, and so does a script that starts
several programs. Each process took the next free attempt number of its rank. A restart begins after the process before
it was last active; processes that were active at the same time are replicas. Where a process names its replica group,
the name decides, whenever it ran. Ranks of replicas are numbered on: with two ranks each, ranks 2 and 3 are ranks 0 and
1 of the second replica.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Folders = Mapping[int, Sequence[tuple[int, Path]]]
REPLICA_GROUP = "replica group "
"""How the name of a rendezvous begins that is the replica group of a fault-tolerant job."""


@dataclass(frozen=True, kw_only=True)
class ReplicaProcess:
    """One process of a rank: its rendezvous, and when it was active, by the wall clock."""

    rank: int
    attempt: int
    folder: Path
    pid: int
    parent: int
    rendezvous: str  # address or replica group of its group of ranks, or who started it
    begin_ns: int
    end_ns: int


@dataclass(kw_only=True)
class _Team:
    """Processes that started together, of different ranks."""

    members: dict[int, ReplicaProcess] = field(default_factory=dict)
    generation: int = 0  # teams of the same ranks in this replica before it

    @property
    def group(self) -> str:
        """The name of its replica group; empty where it names none."""
        name = next(iter(self.members.values())).rendezvous
        return name if name.startswith(REPLICA_GROUP) else ""

    def fits(self, others: Sequence["_Team"]) -> bool:
        """Say whether it is of the replica of other teams: of the same group by name, else never active with them."""
        if self.group or any(other.group for other in others):
            return all(other.group == self.group for other in others)
        return not any(self.overlaps(other) for other in others)

    def overlaps(self, other: "_Team") -> bool:
        """Say whether a rank was active in both teams at the same time; a process that starts ranks is none of them."""
        return any(
            own.begin_ns < theirs.end_ns and theirs.begin_ns < own.end_ns and theirs.pid != own.parent
            for rank, own in self.members.items()
            if (theirs := other.members.get(rank)) is not None
        )


def separate_replicas(
    folders: Folders, read: Callable[[int, int, Path], ReplicaProcess | None]
) -> tuple[dict[int, list[tuple[int, Path]]], int]:
    """Return the folders by rank, ranks of replicas numbered on, and the number of replicas.

    Parameters:
        folders: (attempt, folder) of every rank, ascending.
        read: describes the process of a rank, an attempt and a folder; None where its log cannot be read.
    """
    plain = {rank: list(attempts) for rank, attempts in folders.items()}
    if all(len(attempts) < 2 for attempts in folders.values()):
        return plain, 1
    processes = [read(rank, attempt, path) for rank, attempts in folders.items() for attempt, path in attempts]
    known = [process for process in processes if process is not None]
    if len(known) < len(processes):
        return plain, 1  # what cannot be read may be either
    replicas = _assign_replicas(_find_teams(known))
    if len(replicas) < 2:
        return plain, 1
    ranks_each = max(folders) + 1
    newest = max(team.generation for teams in replicas for team in teams)
    separated: dict[int, list[tuple[int, Path]]] = {}
    for replica, teams in enumerate(replicas):
        behind = newest - max(team.generation for team in teams)  # its last processes are as new as those of others
        for team in sorted(teams, key=lambda team: team.generation):
            for rank, process in team.members.items():
                attempts = separated.setdefault(replica * ranks_each + rank, [])
                attempts.append((team.generation + behind, process.folder))
    return dict(sorted(separated.items())), len(replicas)


def _find_teams(processes: Iterable[ReplicaProcess]) -> list[_Team]:
    """Return the processes that met, in the order of their begins; of one rank each is of another team."""
    teams: dict[str, list[_Team]] = {}
    for process in sorted(processes, key=lambda process: process.begin_ns):
        met = teams.setdefault(process.rendezvous, [])
        team = next((team for team in met if process.rank not in team.members), None)
        if team is None:
            met.append(team := _Team())
        team.members[process.rank] = process
    every = [team for met in teams.values() for team in met]
    return sorted(every, key=lambda team: min(process.begin_ns for process in team.members.values()))


def _assign_replicas(teams: Sequence[_Team]) -> list[list[_Team]]:
    """Return the teams of each replica: one after the other, or of different ranks; replicas by name, else by begin."""
    replicas: list[list[_Team]] = []
    for team in teams:
        chosen = next((own for own in replicas if team.fits(own)), None)
        if chosen is None:
            replicas.append(chosen := [])
        before = [other.generation for other in chosen if team.members.keys() & other.members.keys()]
        team.generation = max(before, default=-1) + 1
        chosen.append(team)
    return sorted(replicas, key=lambda own: (len(own[0].group), own[0].group))


def describe_replicas(number: int, folders: Folders) -> str:
    """Return the caveat about the replicas of a run."""
    ranks_each = -(-(max(folders) + 1) // number)
    return (
        f"replicas: {number} groups of ranks ran under the same numbers, as replicas of a "
        "fault-tolerant job or several programs do: they are numbered on, so that "
        f"rank {ranks_each} is rank 0 of the second"
    )
