"""At the end of the interpreter the Python hook completes what has completed, and nothing else."""

import mmap
from dataclasses import dataclass

from dtprof.capture.python_hook import work_waits
from dtprof.records import schema


@dataclass(frozen=True, kw_only=True)
class Future:
    """Of a work: complete or not."""

    is_done: bool

    def done(self) -> bool:
        """Say whether it is complete."""
        return self.is_done


@dataclass(frozen=True, kw_only=True)
class Work:
    """A handle as torch gives it; gloo's receive and reduce_scatter have no future."""

    completed: bool
    future: Future | None = None

    def is_completed(self) -> bool:
        """Say whether it is complete."""
        return self.completed

    def get_future(self) -> Future:
        """Return its future."""
        if self.future is None:
            raise RuntimeError("Work::getFuture not implemented.")
        return self.future


def states_after(works: list[Work]) -> list[int]:
    """Return the states of their records after the end."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    for i, work in enumerate(works):
        memory[i * schema.RECORD_SIZE] = schema.STATE["returned"]
        work_waits.watch(work, memory, i * schema.RECORD_SIZE, issued=0)
    work_waits.settle()
    return [memory[i * schema.RECORD_SIZE] for i in range(len(works))]


def test_operation_whose_future_is_complete_before_its_work_is_done() -> None:
    assert states_after([Work(completed=False, future=Future(is_done=True))]) == [schema.STATE["done"]]


def test_operation_in_flight_stays_returned_and_keeps_none_behind_it_from_being_seen() -> None:
    done, returned = schema.STATE["done"], schema.STATE["returned"]
    in_flight = Work(completed=False, future=Future(is_done=False))
    works = [in_flight, *[Work(completed=True) for _ in range(6)], Work(completed=False)]
    assert states_after(works) == [returned, *[done] * 6, returned]
    assert not work_waits._in_flight
