"""Tell the native recorder of batches: operations that a back end joins, and starts at the end of the batch.

Begin and end of a batch are methods of the group, and no operators: the dispatcher hook does not see them.
"""

from typing import Any

from dtprof import fence


@fence.fenced("batches of operations")
def install(recorder: Any) -> None:
    """Hook the methods of all groups."""
    import torch

    group: Any = torch._C._distributed_c10d.ProcessGroup
    start, end = group._start_coalescing, group._end_coalescing
    begin_batch, end_batch = fence.fenced("a batch")(recorder.begin_batch), fence.fenced("a batch")(recorder.end_batch)

    def _start_coalescing(self: Any, *arguments: Any, **options: Any) -> Any:
        begin_batch()
        return start(self, *arguments, **options)

    def _end_coalescing(self: Any, *arguments: Any, **options: Any) -> Any:
        work = end(self, *arguments, **options)
        # The handle that tells of waits, in place of the back end's; nothing where recording failed.
        return end_batch(work) or work

    group._start_coalescing, group._end_coalescing = _start_coalescing, _end_coalescing
