"""Write down every signal that comes; end with status 5 at SIGTERM.

signals.py FILE
"""

import os
import signal
import sys
from pathlib import Path


def main(path):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(number, _):
        os.write(file, signal.Signals(number).name.encode() + b"\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, note)
    os.write(file, b"ready\n")
    while "SIGTERM" not in Path(path).read_text():
        signal.pause()
    sys.exit(5)


if __name__ == "__main__":
    main(sys.argv[1])
