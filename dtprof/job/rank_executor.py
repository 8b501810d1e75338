"""Executors of work on ranks: the interface, the one in this process, and how ranks are divided.

Ranks are mapped part by part, and results are taken in order. What is found of a rank, and of all of them, does not
depend on what the parts are: every executor gives the same bits.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

MOST_RANKS_A_PART = 32
PARTS = 64
"""Into how many parts ranks are shared out, where that makes parts of no more than so many."""

Task = TypeVar("Task")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """Work that was handed over; a concurrent.futures.Future is one."""

    def result(self) -> Result_co:
        """Wait for the work; return its result, or raise its exception."""


class Executor(Protocol):
    """Does work here or elsewhere; functions, tasks and results are picklable."""

    @property
    def at_once(self) -> int:
        """The number of tasks to submit before waiting for the first result."""

    def submit(self, work: Callable[[Task], Result], task: Task) -> Pending[Result]:
        """Hand over one task."""


class _Done(Pending[Result]):
    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result


class ThisProcess:
    """Does every task at once, in this process."""

    at_once = 1

    def submit(self, work: Callable[[Task], Result], task: Task) -> Pending[Result]:
        """Do the task."""
        return _Done(work(task))


THIS_PROCESS = ThisProcess()


def map_tasks(executor: Executor, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
    """Yield the result of each task, in order; tasks are made as they are handed over, a few ahead."""
    pending: deque[Pending[Result]] = deque()
    for task in tasks:
        if len(pending) >= executor.at_once:
            yield pending.popleft().result()
        pending.append(executor.submit(work, task))
    while pending:
        yield pending.popleft().result()


def share_out(ranks: Sequence[int], executor: Executor) -> list[Sequence[int]]:
    """Return the ranks in parts, in order: large ones for an executor that does one at a time, which costs least."""
    size = MOST_RANKS_A_PART if executor.at_once == 1 else min(MOST_RANKS_A_PART, -(-len(ranks) // PARTS))
    return [ranks[i : i + size] for i in range(0, len(ranks), max(1, size))]
