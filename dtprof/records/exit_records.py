"""What launchers saw of the processes of their nodes: how they ended, and where they stood when a job hung.

A pid names a process on its node only: containers number theirs from 1, each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtprof.records import paths
from dtprof.records.tables import ProcessExit


@dataclass(frozen=True, kw_only=True)
class Endings:
    """What was seen, by the name of the node's folder."""

    exits: Mapping[str, Mapping[int, tuple[ProcessExit, ...]]] = field(default_factory=dict)  # by pid, as they came
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # stacks.json of each node

    def exit_of(self, host: str, pid: int, *, since_ns: int = 0) -> ProcessExit | None:
        """Return how a process ended; of several of its number the first one since a time of its host, or the last.

        Where its host has no folder (renamed, gathered by hand), the only process of that number on any node.
        """
        own = self.exits.get(paths.node_folder_name(host))
        if own is None:
            found = [node[pid] for node in self.exits.values() if pid in node]
            rows = found[0] if len(found) == 1 else ()
        else:
            rows = own.get(pid, ())
        if since_ns and len(rows) > 1:
            return next((row for row in rows if row.t_ns >= since_ns), None)
        return rows[-1] if rows else None

    def stacks_of(self, host: str) -> Mapping[str, Any]:
        """Return the newest stacks taken on a host as they were written; of all nodes where it has no folder."""
        own = self.stacks.get(paths.node_folder_name(host))
        return own if own is not None else self.all_stacks()

    def all_stacks(self) -> dict[str, Any]:
        """Return the stacks of all nodes in one document; of pids that several nodes use, none."""
        seen: dict[str, Any] = {}
        several: set[str] = set()
        for document in self.stacks.values():
            processes = document.get("processes")
            processes = processes if isinstance(processes, dict) else {}
            several |= seen.keys() & processes.keys()
            seen |= processes
        times = [one["t_ns"] for one in self.stacks.values() if isinstance(one.get("t_ns"), int)]
        return {
            "t_ns": max(times, default=None),
            "processes": {pid: facts for pid, facts in seen.items() if pid not in several},
        }
