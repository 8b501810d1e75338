"""Find the launchers of a run that wait in a rendezvous: no rank starts before it completes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dtprof import launchers
from dtprof.launch import stack_sampler
from dtprof.launch.run_processes import ProcessSearch, is_of_run
from dtprof.records import paths, writer

MAX_LAUNCHERS = 8
_ELASTIC = "torch/distributed/elastic/"
_WAITS = ("next_rendezvous", "_rendezvous", "get_rendezvous_handler")
_STORE_WAIT = "_create_tcp_store"
STATIC = "static_tcp_rendezvous.py"
"""File of a rendezvous that is nothing but a store, which node 0 keeps until all nodes have come to it."""


class RendezvousWatch:
    """Follows for how long the launchers of a run on this host have been in a rendezvous."""

    def __init__(self, run: Path, node_folder: Path) -> None:
        """Know of no launcher yet."""
        self._search, self._node_folder = ProcessSearch(run), node_folder
        self._since_s: dict[int, float] = {}
        self._waits: dict[int, dict[str, Any]] = {}
        self._is_written = False

    def poll(self, now_s: float) -> float:
        """Return for how many seconds the launcher that has been longest in a rendezvous was seen there; 0 for none."""
        self._waits = find_waits(self._search)
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in self._waits}
        for pid, wait in self._waits.items():
            wait["waited_s"] = now_s - self._since_s[pid]
        if self._is_written and not self._waits and has_ranks(self._search.run):
            self._is_written = False
            (self._node_folder / paths.STACKS).unlink(missing_ok=True)  # else it would tell of a wait that is over
        return max((now_s - since_s for since_s in self._since_s.values()), default=0.0)

    def write(self) -> None:
        """Write what was seen to the node folder, with the stacks."""
        document = stack_sampler.sample(self._waits, None)
        for pid, wait in self._waits.items():
            document["processes"][str(pid)]["rendezvous"] = wait
        self._is_written = True
        with contextlib.suppress(OSError):  # a full disk must not stop the diagnosis
            writer.write_json(self._node_folder / paths.STACKS, document)


def find_waits(search: ProcessSearch) -> dict[int, dict[str, Any]]:
    """Return by pid what each launcher of a run that is in a rendezvous on this host waits for.

    `for_store` says whether it is still to reach the store at the endpoint, `static` whether nodes are numbered, of
    which node 0 keeps the store. The others are as given to the launcher: `nodes` (smallest number, 1 where it is not
    given), `ranks_per_node` and `node_rank` (None where not a number), `endpoint` and `id` (empty where not given).
    `hosts` are those of the scheduler's allocation, by its variable `hosts_from`, where there is one.
    """
    waits: dict[int, dict[str, Any]] = {}
    for pid, command, environment in _launchers(search):
        where = find_place(stack_sampler.describe_process(pid).get("threads"))
        if where is not None:
            given = launchers.read_rendezvous(command, environment)
            is_static = where == STATIC
            for_store = bool(given["node_rank"]) if is_static else where == _STORE_WAIT
            hosts, hosts_from = launchers.read_allocation(environment)
            waits[pid] = {**given, "for_store": for_store, "static": is_static}
            if hosts:
                waits[pid] |= {"hosts": list(hosts), "hosts_from": hosts_from}
    return waits


def has_ranks(run: Path) -> bool:
    """Say whether a launcher has started a rank of a run on this host."""
    return any(_is_rank(process, run) for process in psutil.process_iter())


def find_place(threads: Any) -> str | None:
    """Return the function of torch's elastic launcher that waits for other nodes; None where none does.

    A store comes first, to which others lead; `STATIC` for a static one.
    """
    frames = [
        frame
        for thread in threads or ()
        for frame in thread.get("frames") or ()
        if _ELASTIC in str(frame.get("filename")).replace(os.sep, "/")
    ]
    for frame in frames:
        name = str(frame.get("name"))
        if str(frame.get("filename")).endswith(STATIC):
            return STATIC
        if name.endswith(_STORE_WAIT):
            return _STORE_WAIT
    names = (str(frame.get("name")).rpartition(".")[2] for frame in frames)
    return next((name for name in names if name in _WAITS), None)


def _launchers(search: ProcessSearch) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Give pid, command line and environment of the launchers of a run that have no rank as a child."""
    found = 0
    for process, environment in search.find():
        try:
            if process.pid == os.getpid() or "LOCAL_RANK" in environment:
                continue
            command = process.cmdline()
            if not launchers.has_rendezvous(command) or any(
                _is_rank(child, search.run) for child in process.children()
            ):
                continue
        except (psutil.Error, OSError):
            continue  # it has ended
        yield process.pid, command, environment
        found += 1
        if found == MAX_LAUNCHERS:
            return


def _is_rank(process: psutil.Process, run: Path) -> bool:
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return False  # it has ended, or is of another user
    return "LOCAL_RANK" in environment and is_of_run(run, environment)
