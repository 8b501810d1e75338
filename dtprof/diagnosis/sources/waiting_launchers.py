"""Launchers that were seen in a rendezvous, which starts no rank before it completes."""

from collections.abc import Mapping
from typing import Any

from dtprof.diagnosis.job_state import RendezvousWait


def find_rendezvous(documents: Mapping[str, Mapping[str, Any]]) -> tuple[RendezvousWait, ...]:
    """Return the launchers that wait, by host and pid.

    Parameters:
        documents: by the folder of each node the stacks taken there, as `launch.rendezvous_waits` writes them; what is
            damaged is skipped.
    """
    found = []
    for folder, document in documents.items():
        processes = document.get("processes")
        for pid, facts in processes.items() if isinstance(processes, dict) else ():
            wait = facts.get("rendezvous") if isinstance(facts, dict) else None
            if isinstance(wait, dict) and str(pid).isdecimal():
                found.append(_read(folder.removeprefix("node-"), int(pid), wait))
    return tuple(sorted(found, key=lambda wait: (wait.host, wait.pid)))


def _read(host: str, pid: int, wait: Mapping[str, Any]) -> RendezvousWait:
    waited_s = wait.get("waited_s")
    return RendezvousWait(
        host=host,
        pid=pid,
        waited_s=float(waited_s) if isinstance(waited_s, int | float) else 0.0,
        for_store=wait.get("for_store") is True,
        is_static=wait.get("static") is True,
        nodes=_count(wait, "nodes") or 1,
        endpoint=str(wait.get("endpoint") or ""),
        rdzv_id=str(wait.get("id") or ""),
        node_rank=_count(wait, "node_rank"),
        ranks_per_node=_count(wait, "ranks_per_node"),
    )


def _count(wait: Mapping[str, Any], name: str) -> int | None:
    value = wait.get(name)
    return value if type(value) is int and value >= 0 else None
