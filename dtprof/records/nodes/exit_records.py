"""Exits and stack samples of the processes of each node, as launchers recorded them.

A pid identifies a process on its node only: every container numbers its processes from 1.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtprof.records import paths
from dtprof.records.tables import ProcessExit

STOPPING_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""With which people, terminals, schedulers and launchers stop a job."""
BY_SHELL = 128
"""A shell or srun gives a process that a signal ended this status and the number of the signal."""


def is_stop(status: int | None) -> bool:
    """Say whether an exit status is that of a process which was stopped from outside."""
    return status is not None and (-status in STOPPING_SIGNALS or status - BY_SHELL in STOPPING_SIGNALS)


@dataclass(frozen=True, kw_only=True)
class ExitRecords:
    """Exits and stacks by the name of the node's folder."""

    exits: Mapping[str, Mapping[int, tuple[ProcessExit, ...]]] = field(default_factory=dict)  # by pid, in order
    stacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # stacks.json of each node

    def exit_of(self, host: str, pid: int, *, since_ns: int = 0) -> ProcessExit | None:
        """Return how a process ended; of several with its pid the first since a time of its host, or the last.

        Where its host has no folder (renamed, gathered by hand), return the only process with that pid on any node.
        """
        on_host = self.exits.get(paths.node_folder_name(host))
        if on_host is None:
            on_nodes = [node[pid] for node in self.exits.values() if pid in node]
            rows = on_nodes[0] if len(on_nodes) == 1 else ()
        else:
            rows = on_host.get(pid, ())
        if since_ns and len(rows) > 1:
            return next((row for row in rows if row.t_ns >= since_ns), None)
        return rows[-1] if rows else None

    def stacks_of(self, host: str) -> Mapping[str, Any]:
        """Return the newest stack samples of a host as written; those of all nodes where it has no folder."""
        on_host = self.stacks.get(paths.node_folder_name(host))
        return on_host if on_host is not None else self.all_stacks()

    def all_stacks(self) -> dict[str, Any]:
        """Return the stack samples of all nodes in one document, without pids that several nodes use."""
        processes_by_pid: dict[str, Any] = {}
        several: set[str] = set()
        for document in self.stacks.values():
            processes = document.get("processes")
            processes = processes if isinstance(processes, dict) else {}
            several |= processes_by_pid.keys() & processes.keys()
            processes_by_pid |= processes
        times = [document["t_ns"] for document in self.stacks.values() if isinstance(document.get("t_ns"), int)]
        return {
            "t_ns": max(times, default=None),
            "processes": {pid: facts for pid, facts in processes_by_pid.items() if pid not in several},
        }
