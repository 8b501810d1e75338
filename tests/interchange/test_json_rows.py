"""JSON objects of one shape, many at once: the text that a template gives for each."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtprof.interchange.exporters import protobuf_wire
from dtprof.interchange.exporters.json_rows import Choice, Whole, join_rows, microseconds
from dtprof.interchange.exporters.protobuf_wire import Piece

TEXTS = (b'"a"', b"", b'"caf\\u00e9 % {}"')
LARGEST = 10**15 - 1  # 11 days in ns, which floats in us tell apart


@given(
    rows=st.lists(
        st.tuples(st.integers(0, LARGEST), st.integers(-1, 2**63 - 1) | st.integers(-1, 10_000), st.integers(0, 2)),
        max_size=20,
    ),
    at_once=st.integers(1, 500),
)
def test_objects_are_those_of_a_template(rows: list[tuple[int, int, int]], at_once: int) -> None:
    times, numbers, places = (np.array(column, np.int64) for column in (zip(*rows, strict=True) if rows else [()] * 3))
    pieces: list[Piece | bytes] = [
        b'{"ts": ',
        microseconds(times),
        b', "bytes": ',
        Whole(values=numbers),
        b', "name": ',
        Choice(position=places, texts=TEXTS),
        b"}\n",
    ]
    expected = b"".join(
        b'{"ts": %.3f, "bytes": %s, "name": %s}\n'
        % (ns / 1000, b"%d" % number if number >= 0 else b"null", TEXTS[place])
        for ns, number, place in rows
    )
    before, protobuf_wire.BYTES_AT_ONCE = protobuf_wire.BYTES_AT_ONCE, at_once
    try:
        assert b"".join(join_rows(pieces, len(rows))) == expected
    finally:
        protobuf_wire.BYTES_AT_ONCE = before


def test_times_before_the_first_event_are_negative() -> None:
    times = np.array([-1, -1_234_567, 0, 999], np.int64)
    assert b"".join(join_rows([microseconds(times), b" "], 4)) == b"-0.001 -1234.567 0.000 0.999 "
