"""Sample the stacks and process states of the ranks on this host, from outside, without stopping them for long."""

import contextlib
import functools
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from dtprof.records import paths, writer

CPU_WINDOW_S = 0.5
DUMP_TIMEOUT_S = 10
TRIES, PAUSE_S = 3, (0.05, 0.2)
"""Attempts for a refused stack, and the pause between them; pauses are random, or all would collide again."""
REFUSED = "EPERM"
"""py-spy's error where it may not trace the process, or another tracer, such as a second launcher, does."""
AT_ONCE = 8
"""Stacks sampled at the same time: a process that does not answer must not delay the others."""


def find_py_spy() -> str | None:
    """Return the py-spy that was installed with dtprof, or one on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def sample(
    pids: Iterable[int],
    node_folder: Path | None,
    *,
    native: bool = False,
    starting: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Return state and stacks of every process, with `native` C and C++ frames too; write them to the node's folder.

    `starting` are further processes without records, with their ranks, which the document keeps. For each pid: `state`
    (of psutil), `cpu_share` (of one core, over half a second), `threads` (py-spy's JSON: name and frames, innermost
    first) or `reason` why there is no stack.
    """
    ranks = starting or {}
    chosen = [*pids, *ranks]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        processes = dict(zip(chosen, pool.map(functools.partial(_describe, native=native), chosen), strict=True))
    document: dict[str, Any] = {
        "t_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        "processes": {str(pid): facts for pid, facts in processes.items()},
    }
    first = {pid: _cpu_s(pid) for pid in processes}
    time.sleep(CPU_WINDOW_S)
    for pid, facts in processes.items():
        before, after = first[pid], _cpu_s(pid)
        facts["cpu_share"] = None if before is None or after is None else round((after - before) / CPU_WINDOW_S, 3)
        if pid in ranks:
            facts["rank"] = ranks[pid]
    if node_folder is not None:
        with contextlib.suppress(OSError):  # a full disk must not stop the diagnosis
            writer.write_json(node_folder / paths.STACKS, document)
    return document


def _describe(pid: int, *, native: bool) -> dict[str, Any]:
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return {"state": "gone", "reason": "the process has ended"}
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        return {"state": state, "reason": f"the process is {state}"}
    spy = find_py_spy()
    if spy is None:
        return {"state": state, "reason": "py-spy is not installed"}
    threads, reason = _dump([spy, "dump", "--json", "--pid", str(pid), *(["--native"] if native else [])])
    if threads is None and native:
        threads, _ = _dump([spy, "dump", "--json", "--pid", str(pid)])  # Python frames are better than none
    if threads is None:
        return {"state": state, "reason": f"py-spy could not read it: {reason}"}
    return {"state": state, "threads": threads}


def _dump(command: list[str]) -> tuple[Any, str]:
    """Return the threads from py-spy, or None and the reason; try again where another tracer may hold the process."""
    for _ in range(TRIES - 1):
        threads, reason = _dump_once(command)
        if threads is not None or REFUSED not in reason:
            return threads, reason
        time.sleep(random.uniform(*PAUSE_S))
    return _dump_once(command)


def _dump_once(command: list[str]) -> tuple[Any, str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False)
        return (json.loads(result.stdout), "") if result.returncode == 0 else (None, reason_in(result.stderr))
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        return None, str(error)


def reason_in(complaint: str) -> str:
    """Return py-spy's error and its last cause, without the backtrace of its code."""
    message = complaint.partition("Stack backtrace:")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip() and line.strip() != "Caused by:"]
    if not lines:
        return "no answer"
    first, last = lines[0].removeprefix("Error: "), re.sub(r"^\d+: ", "", lines[-1])
    return first if len(lines) == 1 else f"{first}: {last}"


def _cpu_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
