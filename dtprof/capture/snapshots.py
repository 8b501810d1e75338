"""Write a snapshot of memory into a file: on a GPU torch's own snapshot, on the host a list of live tensors.

A snapshot changes no tensor and keeps none alive: it holds their sizes, types and names.
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
from dtprof.capture.memory_sampler import OTHER, Memory
from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import entry

MOST_TENSORS = 1_000
"""The largest tensors have rows of their own; of the rest the file has sums."""


class Snapshots:
    """The snapshots of one log."""

    def __init__(self, memory: Memory, recorder: Recorder, folder: Path) -> None:
        """Write into the folder of the rank."""
        self._memory = memory
        self._recorder = recorder
        self._folder = folder
        self._count = 0

    def take(self, why: str, step: int, *, limit_bytes: int, request: str = "") -> int:
        """Write a snapshot; return the size of its file in bytes."""
        self._count += 1
        fields: dict[str, Any] = {"why": why, "step": step, **({"request": request} if request else {})}
        fields["t_ns"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        try:
            fields["held_bytes"] = self._memory.held_bytes()
            device, name, write = self._writer()
            fields["device"] = device
            size = _write(self._folder / name, write, limit_bytes)
        except Exception as error:
            self._recorder.write_entry(
                entry("snapshot", state="failed", reason=f"{type(error).__name__}: {error}", **fields)
            )
            raise
        self._recorder.write_entry(entry("snapshot", state="written", file=name, bytes=size, **fields))
        return size

    def _writer(self) -> tuple[str, str, Callable[[Path], None]]:
        """Return the device, the name of the file, and the function that writes it."""
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return f"cuda:{torch.cuda.current_device()}", f"memory-{self._count}.pickle", _write_device
        return "cpu", f"memory-{self._count}.json.gz", self._write_host

    def _write_host(self, file: Path) -> None:
        with gzip.open(file, "wt", compresslevel=3, encoding="utf-8") as stream:
            json.dump(describe_tensors(_live_tensors(), self._memory.categories.names()), stream)


def _write_device(file: Path) -> None:
    """Write the format of torch.cuda.memory._dump_snapshot, for pytorch.org/memory_viz."""
    import torch

    with file.open("wb") as stream:
        pickle.dump(torch.cuda.memory._snapshot(), stream)


def _write(file: Path, write: Callable[[Path], None], limit_bytes: int) -> int:
    """Write a file by way of a draft; discard it where it exceeds the limit.

    Raises:
        OSError: it cannot be written, or exceeds the limit.
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
    """Yield the tensors that Python holds; those that only autograd keeps have no Python object."""
    import torch

    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):  # isinstance would run code of proxies that set __class__
            yield value


def describe_tensors(tensors: Iterator[Any], names: dict[int, tuple[str, str]]) -> dict[str, Any]:
    """Return the storages of some tensors, each once: rows of the largest, and sums by category.

    `names` gives category and name of known storages by address.
    """
    import torch

    rows: dict[int, dict[str, Any]] = {}
    with torch._C.DisableTorchFunction():
        for tensor in tensors:
            described = _describe(tensor, names)
            if described is not None:
                address, row = described
                known = rows.get(address)
                rows[address] = row | {"tensors": known["tensors"] + 1 if known else 1}
    by_size = sorted(rows.values(), key=lambda row: -row["bytes"])
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


@fence.fenced("a tensor", "is missing from a memory snapshot")
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
