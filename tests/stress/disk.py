"""A disk that is full from the start or becomes so, and a log that may take little room."""

import os
import random
import resource
import subprocess
from pathlib import Path
from typing import Any

import dtprof
from tests.stress.rank import Rank, finish

PHASE = "flood"
SMALLEST_LOG_MB = 16
MIB = 1024 * 1024


def plan(chance: random.Random) -> dict[str, Any]:
    """Return what one trial does.

    `file_size` of a process below that of a segment stands for a disk that is full, from the start (at 0 of the events)
    or from some event on. `room_mb` is what a small disk of the run has left at the start of the trial.
    """
    way = chance.choice(["full", "fills", "small-disk", "small-log", "small-log"])
    return {
        "ranks": 1,
        "way": way,
        "events": {"full": 2_000, "fills": 100_000, "small-disk": 100_000, "small-log": 300_000}[way],
        "full_from": chance.uniform(0.0, 1.0) if way == "fills" else 0.0 if way == "full" else 2.0,
        "room_mb": chance.uniform(0.5, 12.0) if way == "small-disk" else 256,
        "environment": {"DTPROF_MAX_LOG_MB": str(SMALLEST_LOG_MB)} if way == "small-log" else {},
    }


def before(the_plan: dict[str, Any]) -> None:
    """Forbid this process large files where it starts like that."""
    if the_plan["full_from"] == 0.0:
        forbid_large_files()


def forbid_large_files() -> None:
    """Let every segment be too large; the journal is mapped and its file is there."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def work(rank: Rank) -> None:
    """Record many phases, and operations between them."""
    counter = rank.journal.counter("", PHASE)
    full_from = int(rank.plan["full_from"] * rank.plan["events"])
    for number in range(rank.plan["events"]):
        if number == full_from and full_from:
            forbid_large_files()
        counter.issue()
        with dtprof.phase(PHASE):
            counter.see_return()
        if number % 200 == 0:
            finish(rank.issue_some(5, rank.groups[0], rank.chance))
    rank.sum_up()


def resize(disk: Path, room_mb: float) -> None:
    """Leave this much room on a small disk of ours."""
    status = os.statvfs(disk)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    size = int(used + room_mb * MIB)
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
