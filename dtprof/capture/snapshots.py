"""Write what memory is held for at one moment into a file: on a GPU torch's own snapshot, on the host its live tensors.

Looking at tensors changes none and keeps none alive: what is kept of them is their size, type and name.
"""

import gc
import gzip
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtprof import fence
from dtprof.capture.memory_categories import FAKE
from dtprof.capture.memory_sampler import Memory
from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry

MOST_TENSORS = 1_000
"""The largest, that are written one by one; the rest is summed up."""
OTHER = "other"


class Snapshots:
    """The snapshots of one log."""

    def __init__(self, memory: Memory, recorder: Recorder, folder: Path) -> None:
        """Write into the folder of the rank."""
        self._memory = memory
        self._recorder = recorder
        self._folder = folder
        self._count = 0

    def take(self, why: str, step: int, *, limit_bytes: int, request: str = "") -> int:
        """Take one; return the size of its file, 0 where there is none."""
        self._count += 1
        fields: dict[str, Any] = {"why": why, "step": step, **({"request": request} if request else {})}
        fields["t_ns"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        try:
            fields["held_bytes"] = self._held()
            device, name, write = self._what()
            fields["device"] = device
            size = _write(self._folder / name, write, limit_bytes)
        except Exception as error:
            self._recorder.write_entry(
                entry("snapshot", state="failed", reason=f"{type(error).__name__}: {error}", **fields)
            )
            raise
        self._recorder.write_entry(entry("snapshot", state="written", file=name, bytes=size, **fields))
        return size

    def _held(self) -> dict[str, int]:
        held: dict[str, int] = self._memory.categories.held()
        live = self._memory.live_bytes()
        if live is not None:
            held[OTHER] = max(0, live - sum(held.values()))
        return held

    def _what(self) -> tuple[str, str, Callable[[Path], None]]:
        """Return the device, the name of the file, and what writes it."""
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return f"cuda:{torch.cuda.current_device()}", f"memory-{self._count}.pickle", _write_device
        return "cpu", f"memory-{self._count}.json.gz", self._write_host

    def _write_host(self, file: Path) -> None:
        with gzip.open(file, "wt", compresslevel=3, encoding="utf-8") as stream:
            json.dump(describe_tensors(_live_tensors(), self._memory.categories.names()), stream)


def _write_device(file: Path) -> None:
    """Write what torch.cuda.memory._dump_snapshot writes, for pytorch.org/memory_viz."""
    import torch

    with file.open("wb") as stream:
        pickle.dump(torch.cuda.memory._snapshot(), stream)


def _write(file: Path, write: Callable[[Path], None], limit_bytes: int) -> int:
    """Write a file by way of a draft; one that takes more than the limit is not kept.

    Raises:
        OSError: it cannot be written, or takes more than the limit.
    """
    draft = file.with_name(f".{file.name}")
    try:
        write(draft)
        size = draft.stat().st_size
        if size > limit_bytes:
            raise OSError(f"it takes {size >> 20} MiB, and {max(0, limit_bytes) >> 20} MiB are left of --max-trace-mb")
        os.replace(draft, file)  # noqa: PTH105
    finally:
        draft.unlink(missing_ok=True)
    return size


def _live_tensors() -> Iterator[Any]:
    """Return the tensors that Python holds; those that only autograd keeps have no object to be found by."""
    import torch

    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):  # isinstance would ask objects that pretend to be others
            yield found


def describe_tensors(tensors: Iterator[Any], names: dict[int, tuple[str, str]]) -> dict[str, Any]:
    """Return the memory below some tensors, each piece once: the largest one by one, and sums.

    `names` gives category and name of what is known, by the address of the memory.
    """
    import torch

    seen: dict[int, dict[str, Any]] = {}
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            described = _describe(tensor, names)
            if described is not None:
                address, row = described
                known = seen.get(address)
                seen[address] = row | {"tensors": known["tensors"] + 1 if known else 1}
    by_size = sorted(seen.values(), key=lambda row: -row["bytes"])
    sums: Counter[str] = Counter()
    for row in by_size:
        sums[row["category"]] += row["bytes"]
    return {
        "schema": 1,
        "total_bytes": sum(sums.values()),
        "by_category": dict(sums.most_common()),
        "count": len(by_size),
        "largest": by_size[:MOST_TENSORS],
    }


@fence.fenced("a tensor", "is left out of a memory snapshot")
def _describe(tensor: Any, names: dict[int, tuple[str, str]]) -> tuple[int, dict[str, Any]] | None:
    import torch

    part = getattr(tensor, "_local_tensor", tensor)
    if part.layout is not torch.strided or (storage := part.untyped_storage()).device.type == FAKE:
        return None
    address = storage.data_ptr()
    if not address:
        return None
    category, name = names.get(address, (OTHER, ""))
    return address, {
        "bytes": storage.nbytes(),
        "category": category,
        "name": name,
        "shape": list(part.shape),
        "dtype": str(part.dtype).removeprefix("torch."),
        "device": str(part.device),
    }
