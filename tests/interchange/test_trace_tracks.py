"""Which lane each of overlapping slices is drawn in, and padded varints."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from dtprof.interchange.exporters import protobuf_wire
from dtprof.interchange.exporters.trace_tracks import MAX_LANES, assign_lanes

times = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=60)


@given(times)
def test_slices_of_a_lane_do_not_overlap_and_no_lane_is_needless(pairs: list[tuple[int, int]]) -> None:
    pairs = sorted(pairs)
    begin = np.array([one for one, _ in pairs], np.int64)
    end = begin + np.array([length for _, length in pairs], np.int64)
    lane = assign_lanes(begin, end)
    for number in range(int(lane.max(initial=-1)) + 1):
        own = np.flatnonzero(lane == number)
        assert (begin[own][1:] >= end[own][:-1]).all()
    deepest = max((int(((begin <= t) & (end > t)).sum()) for t in begin.tolist()), default=0)
    assert int(lane.max(initial=0)) < max(1, deepest + 1)


def test_more_than_can_be_distinguished_are_skipped() -> None:
    begin = np.arange(100, dtype=np.int64)
    assert (assign_lanes(begin, begin + 1000) == MAX_LANES).sum() == 100 - MAX_LANES


@given(st.lists(st.integers(-1, 1 << 40), min_size=1, max_size=20))
def test_numbers_that_are_not_known_become_texts_and_others_stay(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    unknown = protobuf_wire.one_number(17, 300)
    size = 1 + protobuf_wire.width_of(values, least=len(unknown) - 1)
    piece = protobuf_wire.KnownOr(known=4, values=values, otherwise=unknown, size=size)
    shape = protobuf_wire.message(4, [protobuf_wire.one_number(1, 7), piece])
    event = protos.TrackEvent()
    event.ParseFromString(protobuf_wire.write_all(shape, len(numbers)).tobytes())
    read = [row.int_value if row.HasField("int_value") else -row.string_value_iid for row in event.debug_annotations]
    assert read == [number if number >= 0 else -300 for number in numbers]


def test_padded_numbers_are_what_a_single_one_says_at_any_width() -> None:
    for size in range(1, 10):
        numbers = [0, 1, 127, *((1 << 7 * size) - 1 >> less for less in range(3))]
        values = np.array([number for number in numbers if number < 1 << 7 * size], np.int64)
        rows = protobuf_wire.write_all([b"<", protobuf_wire.Varint(values=values, size=size), b">"], len(values))
        expected = [
            b"<" + protobuf_wire.pad_last_varint(protobuf_wire.varint(one), size) + b">" for one in values.tolist()
        ]
        assert [row.tobytes() for row in rows] == expected
