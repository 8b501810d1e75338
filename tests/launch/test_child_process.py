"""The command is waited for, and signals are forwarded, whatever the watch over it is doing."""

import subprocess
import sys
from pathlib import Path

WATCHED = """
import os, signal, sys, threading, time
from dtprof.launch import child_process

with child_process.signals_held():  # a thread from before the command, as that of the clock
    threading.Thread(target=threading.Event().wait, daemon=True).start()
script = "trap 'exit 5' TERM; echo > ready; for i in $(seq 5000); do sleep 0.02; done"
command = child_process.Child(["sh", "-c", script], dict(os.environ))

def tick():
    while not os.path.exists("ready"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while command.status is None:  # a tick that takes longer than the command
        time.sleep(0.01)

print("status", command.wait(tick, period_s=0.01))
"""


def test_a_signal_reaches_the_command_while_the_watch_is_busy_and_threads_from_before_do_not_take_it(
    tmp_path: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.stderr, done.returncode) == ("status 5\n", "", 0)
