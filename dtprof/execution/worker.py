"""A worker process: does the tasks that it is given on its standard input, one after the other.

Errors of dtprof are sent back like results. Any other is printed and ends the worker; so does the end of its input.
"""

import os
import pickle

from dtprof.errors import DtprofError
from dtprof.execution.memory_pools import give_back_large_blocks


def main() -> None:
    """Work until there is no more input."""
    give_back_large_blocks()
    with os.fdopen(os.dup(0), "rb") as tasks, os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what is printed is no result
        while True:
            try:
                work, task = pickle.load(tasks)
            except EOFError:
                return
            result, refused = None, None
            try:
                result = work(task)
            except DtprofError as error:
                refused = error
            try:
                pickle.dump((result, refused), results, protocol=pickle.HIGHEST_PROTOCOL)
                results.flush()
            except BrokenPipeError:
                os._exit(1)  # who asked for it is gone


if __name__ == "__main__":
    main()
