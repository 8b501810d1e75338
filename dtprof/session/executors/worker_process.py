"""A worker process: does the tasks that come through a pipe, one after the other, and sends back their results.

Errors of dtprof are sent back like results. Any other is printed and ends the worker; so does the end of its input.
"""

import os
import pickle
import signal
from collections.abc import Iterable

from dtprof.errors import DtprofError
from dtprof.session.executors.memory_pools import give_back_large_blocks


def main() -> None:
    """Work in a fresh interpreter, on standard input and output, until there is no more input."""
    give_back_large_blocks()
    tasks, results = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what is printed is no result
    _work(tasks, results)


def work_as_copy(tasks: int, results: int, others: Iterable[int]) -> None:
    """Work in a process that was forked, until there is no more input; pipes of others are closed."""
    for other in others:
        os.close(other)  # or who waits for their end would wait for ours
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)  # what is printed is no result, and who reads the command's output does not wait for us
    _work(tasks, results)


def _work(tasks: int, results: int) -> None:
    """Do tasks until there are no more."""
    with os.fdopen(tasks, "rb") as given, os.fdopen(results, "wb") as taken:
        while True:
            try:
                work, task = pickle.load(given)
            except EOFError:
                return
            result, refused = None, None
            try:
                result = work(task)
            except DtprofError as error:
                refused = error
            try:
                pickle.dump((result, refused), taken, protocol=pickle.HIGHEST_PROTOCOL)
                taken.flush()
            except BrokenPipeError:
                os._exit(1)  # who asked for it is gone


if __name__ == "__main__":
    main()
