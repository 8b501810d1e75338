"""sys.exit and os._exit are watched, and stay what they are to everybody else."""

import pickle
import subprocess
import sys

PROGRAM = """
import os, pickle, sys
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
os._exit(23)
"""


def test_they_are_pickled_by_name_and_marked_once() -> None:
    assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (23, "")
