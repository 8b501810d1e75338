"""Segment files of the Python hook, mapped into memory, and the records in them."""

import itertools
import mmap
import os
import struct
from pathlib import Path
from time import monotonic_ns

from dtprof.records import schema

AT = schema.OFFSET
STATE = schema.STATE
pack_f32 = struct.Struct("<f").pack_into
pack_two_f32 = struct.Struct("<ff").pack_into
unpack_f32 = struct.Struct("<f").unpack_from
pack_u16 = struct.Struct("<H").pack_into
pack_u64 = struct.Struct("<Q").pack_into
unpack_u64 = struct.Struct("<Q").unpack_from
pack_u32 = struct.Struct("<I").pack_into
unpack_u32 = struct.Struct("<I").unpack_from


class Segment:
    """One mapped segment file and the next free record in it."""

    def __init__(self, path: Path, header: bytes, number: int) -> None:
        """Allocate and map the file.

        Raises:
            OSError: the disk is full or cannot be written to.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Allocated, not sparse: a full disk must be an error here and not a SIGBUS in the job.
            os.posix_fallocate(descriptor, 0, schema.SEGMENT_SIZE)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.memory = mmap.mmap(descriptor, schema.SEGMENT_SIZE, flags)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.number = number
        self.path = path
        self.memory[: len(header)] = header
        self.claim = itertools.count().__next__

    def mark(self, bits: int) -> None:
        """Set bits of the header's marks."""
        at = schema.HEADER_OFFSET["marks"]
        pack_u32(self.memory, at, unpack_u32(self.memory, at)[0] | bits)

    def add(self, field: str, amount: int) -> None:
        """Add to a 64-bit counter of the header."""
        at = schema.HEADER_OFFSET[field]
        pack_u64(self.memory, at, unpack_u64(self.memory, at)[0] + amount)


def complete(memory: mmap.mmap, at: int, issued: int, state: int) -> None:
    """Move a record to done or failed once; whoever comes first decides."""
    if memory[at] in (STATE["issued"], STATE["returned"]):
        pack_f32(memory, at + AT["done_after"], monotonic_ns() - issued)
        memory[at] = state
