"""Write more events than a log may keep: many_samples.py FOLDER COUNT [HOLD_AT].

At event HOLD_AT it says so on stdout and goes on once there is a file `go` beside the folder.
"""

import sys
import time
from pathlib import Path

from recording import open_recorder


def main(folder, count, hold_at=-1):
    recorder = open_recorder(folder)
    name = recorder.name_id("value")
    for value in range(count):
        if value == hold_at:
            print("holding", flush=True)
            while not Path(folder).with_name("go").exists():
                time.sleep(0.01)
        recorder.sample(name, value)
    recorder.close_log()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
