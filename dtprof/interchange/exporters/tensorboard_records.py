"""TFRecord, the framing of TensorBoard's event files: length, checksum, content, checksum.

The checksum is CRC-32C, which the standard library has not; of many records of one size it is taken at once, by numpy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtprof.interchange.exporters.protobuf_wire import Bytes

POLYNOMIAL = 0x82F63B78  # CRC-32C, lowest bit first
MASK_SHIFT, MASK_ADDED = 15, 0xA282EAD8
ALL_ONES = 0xFFFFFFFF

Checksums = npt.NDArray[np.uint32]


def _table() -> Checksums:
    """Return the effect of each byte on a checksum."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(POLYNOMIAL), values >> 1)
    return values


TABLE = _table()
STEPS: Sequence[int] = TABLE.tolist()


def frame(content: bytes) -> bytes:
    """Return one record."""
    length = len(content).to_bytes(8, "little")
    return length + _masked(_crc32c(length)) + content + _masked(_crc32c(content))


def frame_all(contents: Bytes) -> Bytes:
    """Return a record of each row."""
    count, size = contents.shape
    head = np.frombuffer(frame(bytes(size))[:12], np.uint8)
    framed = np.empty((count, len(head) + size + 4), np.uint8)
    framed[:, : len(head)] = head
    framed[:, len(head) : -4] = contents
    checksums = np.full(count, ALL_ONES, np.uint32)
    for column in np.ascontiguousarray(contents.T):
        checksums = TABLE[(checksums ^ column) & 0xFF] ^ (checksums >> np.uint32(8))
    checksums = ~checksums
    mixed = (checksums >> np.uint32(MASK_SHIFT)) | (checksums << np.uint32(32 - MASK_SHIFT))
    framed[:, -4:] = (mixed + np.uint32(MASK_ADDED)).astype("<u4").view(np.uint8).reshape(-1, 4)
    return framed


def _crc32c(content: bytes) -> int:
    checksum = ALL_ONES
    for byte in content:
        checksum = STEPS[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    return checksum ^ ALL_ONES


def _masked(checksum: int) -> bytes:
    """Return a checksum as stored: masked, since checksums may be checksummed themselves."""
    mixed = (checksum >> MASK_SHIFT | checksum << (32 - MASK_SHIFT)) & ALL_ONES
    return ((mixed + MASK_ADDED) & ALL_ONES).to_bytes(4, "little")
