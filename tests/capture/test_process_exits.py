"""Calls that end the process are watched, and stay what they are to everybody else."""

import json
import pickle
import signal
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from dtprof.capture import process_exits

PROGRAM = """
import os, pickle, signal, sys
from dtprof.capture import process_exits
marks = []
plain = sys.exit, os._exit
process_exits.watch_leaving(lambda: marks.append(len(marks)))
process_exits.watch_leaving(lambda: marks.append("again"))
for function in (sys.exit, os._exit):
    assert pickle.loads(pickle.dumps(function)) is function
assert (sys.exit.__name__, sys.exit.__doc__) == (plain[0].__name__, plain[0].__doc__)
try:
    sys.exit(7)
except SystemExit as left:
    assert left.code == 7
assert marks == [0], marks
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.raise_signal(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
for function in (signal.raise_signal, os.killpg, os.kill):
    try:
        function()
    except TypeError:
        pass
assert marks == [0], marks
os._exit(23)
"""
THREADS = """
import json, sys, threading
from dtprof.capture import process_exits
if "recorded" in sys.argv:
    class Recorder:
        entries = []
        write_entry, close_log = entries.append, staticmethod(lambda: None)
    class Owners:
        is_tool = is_library = staticmethod(lambda file: False)
    writer = process_exits.ExitWriter(Recorder, Owners, lambda error: None)
    writer.install()
def work(number):
    sys.exit(3) if number == 1 else {}["shard %d" % number]
for number in range(20):
    thread = threading.Thread(target=work, args=(number,), name="loader-%d" % number)
    thread.start()
    thread.join()
if "recorded" in sys.argv:
    print("\\n".join(Recorder.entries))
"""
KILLS = """
import os, signal, sys
from dtprof.capture import process_exits
os.setsid()
process_exits.watch_leaving(lambda: print("marked", flush=True))
{}
"""


def test_hooked_exit_functions_are_pickled_by_name_and_marked_once() -> None:
    assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (23, "")


@pytest.mark.parametrize(
    "call",
    [
        "signal.raise_signal(signal.SIGKILL)",
        "os.kill(os.getpid(), 9)",
        "os.killpg(os.getpgrp(), signal.SIGKILL)",
        "os.killpg(0, signal.SIGKILL)",
    ],
)
def test_sigkill_to_itself_is_marked_before_it_strikes(call: str) -> None:
    command = [sys.executable, "-c", KILLS.format(call)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "marked\n", "")


def test_exceptions_that_end_threads_are_recorded_and_printed_as_ever() -> None:
    bare, recorded = (
        subprocess.run([sys.executable, "-c", THREADS, *more], capture_output=True, text=True, check=False, timeout=120)
        for more in ([], ["recorded"])
    )
    assert (recorded.returncode, recorded.stderr) == (bare.returncode, bare.stderr)
    assert bare.stderr.count("KeyError: 'shard ") == 19
    rows = [json.loads(line) for line in recorded.stdout.splitlines()]
    assert len(rows) == process_exits.MAX_THREAD_EXCEPTIONS
    assert [(row["k"], row["thread"], row["type"]) for row in rows[:2]] == [
        ("thread_exception", "loader-0", "KeyError"),
        ("thread_exception", "loader-2", "KeyError"),  # sys.exit ends a thread in order
    ]
    assert (rows[1]["message"], rows[1]["frame"]["function"]) == ("'shard 2'", "work")


class ThreadRunner:
    """Runs the function of a worker as Ray Train does, which keeps what it raises."""

    def run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001
            self.error = error


def test_what_ends_the_function_of_a_worker_of_ray_train_is_recorded_and_kept_by_ray() -> None:
    module = types.SimpleNamespace(ThreadRunner=type("ThreadRunner", (ThreadRunner,), {}))
    recorded: list[BaseException] = []
    process_exits._record_in_workers(recorded.append, module)

    def train() -> None:
        raise ValueError("bad batch")

    runner = module.ThreadRunner()
    runner.run(train)
    assert recorded == [runner.error]
    runner.run(lambda: None)
    assert len(recorded) == 1
