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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from dtprof.diagnosis.stack_groups import BUSY, MAIN_THREAD, PythonState
from dtprof.launch.work_counters import WorkCounters, read_work_counters
from dtprof.lint.endless_loops import find_endless_loop, find_names_bound_in_loop
from dtprof.records import paths, writer

WINDOW_S = 0.5
"""Time between the two samples of a process over which its work is counted."""
DUMP_TIMEOUT_S = 10
START_ERROR_S = 2.0
"""The kernel gives the time of boot, from which starts are counted, in whole seconds."""
TRIES, PAUSE_S = 3, (0.05, 0.2)
"""Attempts for a refused stack, two after another failure; pauses are random, or all would collide again."""
FROZEN = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP)
"""States in which a process does not answer a tracer."""
REFUSED = "EPERM"
"""py-spy's error where it may not trace the process, or another tracer, such as a second launcher, does."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>$")
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
    is_current: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Return state, stacks and work of processes, with `native` C and C++ frames too; write them to the node folder.

    They are not written where `is_current`, asked once they are taken, says that the processes have gone on. `starting`
    are further processes without records, with their ranks, which the document keeps. For each pid: `state` (of
    psutil), `threads` (py-spy's JSON: name and frames, innermost first) or `reason` why there is no stack, and what the
    process did over half a second: `cpu_share` and `children_cpu_share` (of one core), `io_bytes`, `page_faults` and,
    of one that was busy, `python_state` (of stack_groups.PythonState).
    """
    ranks = starting or {}
    chosen = [*pids, *ranks]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        processes = dict(zip(chosen, pool.map(functools.partial(describe_process, native=native), chosen), strict=True))
        t_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        first = {pid: read_work_counters(pid) for pid in processes}
        time.sleep(WINDOW_S)
        for pid, facts in processes.items():
            facts |= _work_between(first[pid], read_work_counters(pid))
            if pid in ranks:
                facts["rank"] = ranks[pid]
        busy = [pid for pid, facts in processes.items() if "threads" in facts and _is_busy(facts)]
        for pid, later in zip(busy, pool.map(functools.partial(describe_process, native=False), busy), strict=True):
            processes[pid]["python_state"] = _python_state(
                processes[pid]["threads"], later.get("threads"), started_s=_started_s(pid)
            )
    for facts in processes.values():
        _drop_locals(facts.get("threads"))  # what a program computes with is its own affair
    document: dict[str, Any] = {
        "t_ns": t_ns,
        "processes": {str(pid): facts for pid, facts in processes.items()},
    }
    if node_folder is not None and is_current():
        with contextlib.suppress(OSError):  # a full disk must not stop the diagnosis
            writer.write_json(node_folder / paths.STACKS, document)
    return document


def _is_busy(facts: Mapping[str, Any]) -> bool:
    """Say whether a process works; a runnable one may get little of a host with much to do."""
    return facts["state"] == psutil.STATUS_RUNNING or (facts["cpu_share"] or 0) > BUSY


def _work_between(before: WorkCounters, after: WorkCounters) -> dict[str, float | int | None]:
    """Return the work of a process over the window."""

    def difference(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else b - a

    def share(a: float | None, b: float | None) -> float | None:
        used_s = difference(a, b)
        return None if used_s is None else round(max(used_s, 0.0) / WINDOW_S, 3)

    return {
        "cpu_share": share(before.cpu_s, after.cpu_s),
        "children_cpu_share": share(before.children_cpu_s, after.children_cpu_s),
        "io_bytes": difference(before.io_bytes, after.io_bytes),
        "page_faults": difference(before.page_faults, after.page_faults),
    }


def _python_state(before: Any, after: Any, *, started_s: float) -> PythonState | None:
    """Return the change of the main thread between two dumps with local variables."""
    old, new = _main_thread(before), _main_thread(after)
    if old is None:
        return None
    if new is None:  # the second dump failed: nothing tells whether anything changes
        is_endless = old.get("owns_gil") and _is_in_endless_loop(old, started_s)
        return PythonState.ENDLESS if is_endless else PythonState.UNSEEN
    if not (old.get("owns_gil") or new.get("owns_gil")):
        return PythonState.NATIVE
    first, second = (
        [(frame.get("name"), frame.get("locals")) for frame in thread.get("frames") or ()] for thread in (old, new)
    )
    if first == second and any(variables for _, variables in first):
        return PythonState.UNSEEN if _binds_hidden_values(new, started_s) else PythonState.UNCHANGED
    if all(_is_in_endless_loop(thread, started_s) for thread in (old, new)):
        return PythonState.ENDLESS
    return PythonState.CHANGED if any(variables for _, variables in first) else PythonState.UNSEEN


def _binds_hidden_values(thread: Mapping[str, Any], started_s: float) -> bool:
    """Say whether the innermost loop binds a variable of which py-spy shows the address alone.

    The next value, such as a digest, often takes the address that the last one has left.
    """
    for frame in thread.get("frames") or ():
        names = find_names_bound_in_loop(str(frame.get("filename")), int(frame.get("line") or 0), started_s=started_s)
        if names is not None:
            shown = {each["name"]: str(each["repr"]) for each in frame.get("locals") or ()}
            return any(_ADDRESS.search(shown.get(name, "")) for name in names)
    return False


def _is_in_endless_loop(thread: Mapping[str, Any], started_s: float) -> bool:
    """Say whether the source shows that the innermost frame is in a loop without an exit."""
    innermost: Mapping[str, Any] = next(iter(thread.get("frames") or ()), {})
    file, line = innermost.get("filename"), innermost.get("line")
    return (
        isinstance(file, str)
        and isinstance(line, int)
        and find_endless_loop(file, line, started_s=started_s) is not None
    )


def _started_s(pid: int) -> float:
    """Return when a process had started, seconds since 1970; 0 where it is gone."""
    try:
        return psutil.Process(pid).create_time() + START_ERROR_S
    except psutil.Error:
        return 0.0


def _main_thread(threads: Any) -> Mapping[str, Any] | None:
    found = [thread for thread in threads or () if isinstance(thread, dict)]
    named = (thread for thread in found if thread.get("thread_name") == MAIN_THREAD)
    return next(named, found[0] if found else None)


def _drop_locals(threads: Any) -> None:
    for thread in threads or ():
        for frame in thread.get("frames") or () if isinstance(thread, dict) else ():
            frame.pop("locals", None)


def describe_process(pid: int, *, native: bool = False) -> dict[str, Any]:
    """Return the state of a process, and its `threads` or the `reason` why there are none."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return {"state": "gone", "reason": "the process has ended"}
    if state == psutil.STATUS_ZOMBIE:
        return {"state": state, "reason": f"the process is {state}"}
    spy = find_py_spy()
    if spy is None:
        return {"state": state, "reason": "py-spy is not installed"}
    command = [spy, "dump", "--json", "--locals", "--pid", str(pid)]
    if state in FROZEN:
        # It does not answer to being stopped, and does not move while it is read.
        threads, reason = _dump([*command, "--nonblocking"])
        return (
            {"state": state, "threads": threads} if threads else {"state": state, "reason": f"the process is {state}"}
        )
    threads, reason = _dump([*command, "--native"] if native else command)
    if threads is None and native:
        threads, _ = _dump(command)  # Python frames are better than none
    if threads is None:
        return {"state": state, "reason": f"py-spy could not read it: {reason}"}
    return {"state": state, "threads": threads}


def _dump(command: list[str]) -> tuple[Any, str]:
    """Return the threads from py-spy, or None and the reason.

    Try again where another tracer may hold the process, and once where py-spy lost its way in a process that ran on.
    """
    threads, reason = _dump_once(command)
    for attempt in range(1, TRIES):
        if threads is not None or (attempt > 1 and REFUSED not in reason):
            break
        time.sleep(random.uniform(*PAUSE_S))
        threads, reason = _dump_once(command)
    return threads, reason


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
