"""Files of parts that are compressed apart."""

import gzip
import zlib
from pathlib import Path

import pytest

from dtprof.interchange.exporters.gzip_parts import join_checksums, pack, write_parts

TEXTS = [b"", b"a", b'{"ph": "X"},\n' * 5000, b"", bytes(range(256)) * 300]


def test_parts_are_one_member_that_holds_one_after_the_other(tmp_path: Path) -> None:
    write_parts([pack([text[:7], text[7:]]) for text in TEXTS], tmp_path / "parts.gz")
    written = (tmp_path / "parts.gz").read_bytes()
    assert gzip.decompress(written) == b"".join(TEXTS)
    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
    assert stream.decompress(written) == b"".join(TEXTS)
    assert stream.eof
    assert stream.unused_data == b""


def test_a_file_of_no_parts_is_empty(tmp_path: Path) -> None:
    write_parts([], tmp_path / "none.gz")
    assert gzip.decompress((tmp_path / "none.gz").read_bytes()) == b""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("before", TEXTS)
def test_checksum_of_two_texts_follows_from_theirs(before: bytes, text: bytes) -> None:
    assert join_checksums(zlib.crc32(before), zlib.crc32(text), len(text)) == zlib.crc32(before + text)
