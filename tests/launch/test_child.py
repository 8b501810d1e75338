"""The command is waited for, and signals are forwarded, whatever the watch over it is doing."""

import subprocess
import sys

WATCHED = """
import os, signal, sys, threading, time
from dtprof.launch import child

with child.signals_held():  # a thread from before the command, as that of the clock
    idle = threading.Event()
    threading.Thread(target=idle.wait, daemon=True).start()
command = child.Child(["sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.02; done"], dict(os.environ))

def tick():
    sys.stdin.readline()  # "go": the command has said that it is ready
    os.kill(os.getpid(), signal.SIGTERM)
    while command.status is None:  # a tick that takes longer than the command
        time.sleep(0.01)

status = command.wait(tick, period_s=0.01)
os.write(1, b"status %d\\n" % status)
"""


def test_a_signal_reaches_the_command_while_the_watch_is_busy_and_threads_from_before_do_not_take_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "status 5\n"
    assert process.returncode == 0
