"""Write down every signal that comes; end with status 5 at SIGTERM.

signals.py FILE
"""

import os
import signal
import sys


def main(path):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    came, comes = os.pipe()
    os.set_blocking(comes, False)
    signal.set_wakeup_fd(comes)  # kept in the pipe: one that comes before it is waited for is not lost, as by pause()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    os.write(file, b"ready\n")
    while True:
        number = signal.Signals(os.read(came, 1)[0])
        os.write(file, number.name.encode() + b"\n")
        if number == signal.SIGTERM:
            sys.exit(5)


if __name__ == "__main__":
    main(sys.argv[1])
