"""Starts the ranks of trials from a process that has imported torch already: a trial then costs no import.

python -m tests.stress.host    requests as lines of JSON on stdin; for each, how its ranks ended, on stdout

The ranks are forked and end like any interpreter: by falling off the end of this module.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.optim  # imported once, for all
import torch.utils.data  # noqa: F401

from tests.stress import disk, exits, fork, kill, threads  # noqa: F401
from tests.stress.journal import read_journal
from tests.stress.program import run_rank
from tests.stress.rank import journal_path

PERIOD_S = 0.005


def main() -> None:
    """Serve requests; return in the forked ranks."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        Path(request["folder"]).mkdir(parents=True, exist_ok=True)
        pids: list[int] = []
        for rank in range(request["plan"]["ranks"]):
            pid = os.fork()
            if pid == 0:
                redirect(Path(request["folder"]), rank)
                run_rank(request, rank)
                return
            pids.append(pid)
        print(json.dumps(see_to_the_end(request, pids)), flush=True)


def redirect(folder: Path, rank: int) -> None:
    """Give a rank standard streams of its own, as a process that was started has them."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)


def see_to_the_end(request: dict[str, Any], pids: list[int]) -> dict[str, Any]:
    """Wait for the ranks, kill them where that is planned or they hang; return how they ended."""
    begun = time.monotonic()
    statuses: dict[int, int] = {}
    kill_after = request["plan"].get("kill_after_s")
    kill_at = hung = None
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (found := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = os.waitstatus_to_exitcode(found[1])
        now = time.monotonic()
        if kill_after is not None and kill_at is None and have_begun(request):
            kill_at = now + kill_after
        if kill_at is not None and now >= kill_at:
            end_all([pid for pid in pids if pid not in statuses])
            kill_at = float("inf")
        if now - begun > request["timeout_s"] and not hung:
            hung = True
            end_all([pid for pid in pids if pid not in statuses])
        time.sleep(PERIOD_S)
    return {"statuses": [statuses[pid] for pid in pids], "hung": bool(hung), "seconds": time.monotonic() - begun}


def have_begun(request: dict[str, Any]) -> bool:
    """Say whether every rank has issued something."""
    folder, ranks = Path(request["folder"]), range(request["plan"]["ranks"])
    return all(any(issued for issued, _ in read_journal(journal_path(folder, rank)).values()) for rank in ranks)


def end_all(pids: list[int]) -> None:
    """Kill these ranks."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
