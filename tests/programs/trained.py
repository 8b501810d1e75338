"""Train as the arguments say, then tell which threads of process groups are left in this rank."""

import sys
from pathlib import Path

from reference_trainer.__main__ import main

status = main(sys.argv[1:])
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("left:", *(name for name in names if "gloo" in name), flush=True)
sys.exit(status)
