"""Record the memory by category when a program ran out of it and exited."""

from typing import Any

from dtprof import fence
from dtprof.capture.memory_sampler import Memory
from dtprof.capture.string_entries import timed_entry

CPU_ALLOCATOR = ("can't allocate memory", "not enough memory")
"""Messages of torch's host allocators in a RuntimeError: they have no exception class of their own."""
MOST_ALLOCATIONS = 10
MOST_FRAMES = 8
LONGEST_MESSAGE = 2_000


@fence.fenced("what held the memory that ran out")
def out_of_memory_entry(error: BaseException, memory: Memory) -> str | None:
    """Return the entry for an exception that ends the program; None where memory did not run out."""
    import torch

    on_device = isinstance(error, torch.OutOfMemoryError)
    text = str(error)
    in_allocator = isinstance(error, RuntimeError) and any(words in text for words in CPU_ALLOCATOR)
    if not (on_device or in_allocator or isinstance(error, MemoryError)):
        return None
    held = memory.held_bytes()
    return timed_entry(
        "out_of_memory",
        device=f"cuda:{torch.cuda.current_device()}" if on_device and torch.cuda.is_initialized() else "cpu",  # type: ignore[no-untyped-call]
        message=text[:LONGEST_MESSAGE],
        live_bytes=memory.live_bytes(),
        held_bytes=held,
        largest=max(held, key=held.__getitem__, default=None),
        allocations=_largest_allocations() if on_device else [],
    )


def _largest_allocations() -> list[dict[str, Any]]:
    """Return the largest blocks in use and where they were allocated, where the program has torch record stacks."""
    import torch

    blocks = [
        block
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block.get("frames")
    ]
    blocks.sort(key=lambda block: -block["size"])
    return [
        {
            "bytes": block["size"],
            "frames": [f"{f['filename']}:{f['line']} in {f['name']}" for f in block["frames"][:MOST_FRAMES]],
        }
        for block in blocks[:MOST_ALLOCATIONS]
    ]
