"""Launchers that were seen in a rendezvous, which starts no rank before it completes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtprof.diagnosis.job_state import RendezvousWait
from dtprof.records import paths
from dtprof.records.nodes.node_reader import newest_by_node

BEYOND_S = 10.0
"""Two looks at launchers, and what samples come late."""
MOST_EARLIER = 64
"""Runs beside one that are looked at."""


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
                found.append(_read(paths.node_of(folder), int(pid), wait))
    return tuple(sorted(found, key=lambda wait: (wait.host, wait.pid)))


def find_unwaiting(run: Path, waits: Sequence[RendezvousWait]) -> tuple[str, ...]:
    """Return the hosts of a run whose launcher was not seen in the rendezvous that those of others wait in.

    Each host says so itself, after it has waited for as long: one that takes part for a shorter time may be about to.
    """
    if not waits:
        return ()
    waiting = {paths.node_name(wait.host) for wait in waits}
    needed_ns = int((min(wait.waited_s for wait in waits) + BEYOND_S) * 1e9)
    here = (samples for samples in newest_by_node(run) if samples.node not in waiting and len(samples.host))
    return tuple(
        launcher.node for launcher in here if int(launcher.host["t_ns"][-1] - launcher.host["t_ns"][0]) >= needed_ns
    )


def find_earlier(run: Path, waits: Sequence[RendezvousWait]) -> tuple[tuple[str, ...], str]:
    """Return the hosts of the newest other run beside this one of as many, these among them, and its name; or nothing.

    A store, or a collector, has the runs of a cluster in one folder.
    """
    if not waits:
        return (), ""
    waiting = {paths.node_name(wait.host) for wait in waits}
    try:
        beside = [(path.stat().st_mtime, path.parent) for path in run.absolute().parent.glob(f"*/{paths.MANIFEST}")]
    except OSError:
        return (), ""
    here = run.resolve()
    others = (folder for _, folder in sorted(beside, reverse=True) if folder.resolve() != here)
    for other in itertools.islice(others, MOST_EARLIER):
        hosts = _hosts_of(other)
        if len(hosts) == waits[0].nodes and waiting < hosts:
            return tuple(sorted(hosts)), other.name
    return (), ""


def _hosts_of(run: Path) -> set[str]:
    return {paths.node_of(folder.name) for folder in paths.node_folders(run) if folder.is_dir()}


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
        hosts=tuple(map(str, hosts)) if isinstance(hosts := wait.get("hosts"), list) else (),
        hosts_from=str(wait.get("hosts_from") or ""),
    )


def _count(wait: Mapping[str, Any], name: str) -> int | None:
    value = wait.get(name)
    return value if type(value) is int and value >= 0 else None
