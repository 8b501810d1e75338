"""The format as declared: no gap, no overlap, and the same numbers for the C++ that is compiled against it."""

import re

import pytest

from dtprof.records import schema, tables
from dtprof.records.rank_log import strings


@pytest.mark.parametrize(("fields", "size"), [(schema.RECORD, 64), (schema.HEADER, schema.HEADER_STRUCT.size)])
def test_fields_lie_one_after_the_other(fields: tuple[schema.Field, ...], size: int) -> None:
    assert [field.offset for field in fields] == [sum(f.size for f in fields[:i]) for i in range(len(fields))]
    assert sum(field.size for field in fields) == size
    assert len({field.name for field in fields}) == len(fields)
    assert all(field.meaning for field in fields)


def test_eight_byte_fields_are_aligned_so_that_they_can_be_written_atomically() -> None:
    for field in (*schema.RECORD, *schema.HEADER):
        if field.code in "QI":
            assert field.offset % field.size == 0, field.name


def test_header_fits_before_the_first_record() -> None:
    assert schema.HEADER_STRUCT.size <= schema.HEADER_SIZE
    assert schema.HEADER_SIZE + schema.SEGMENT_CAPACITY * schema.RECORD_SIZE <= schema.SEGMENT_SIZE


@pytest.mark.parametrize("codes", [schema.STATE, schema.KIND, schema.FLAG, schema.DEVICE_FLAG, schema.MARK])
def test_codes_are_distinct_and_fit_a_byte(codes: dict[str, int]) -> None:
    codes = {name: code for name, code in codes.items() if name != "followed"}  # the bit that spans use for skipped
    assert len(set(codes.values())) == len(codes)
    assert all(0 <= code < 256 for code in codes.values())


def test_flags_and_marks_are_single_bits() -> None:
    for code in (*schema.FLAG.values(), *schema.MARK.values()):
        assert code & (code - 1) == 0


def test_element_types_have_the_size_that_torch_gives_them() -> None:
    torch = pytest.importorskip("torch")
    known = [(name, size) for name, size in schema.DTYPES if hasattr(torch, name) and name[0] != "q"]
    assert len(known) >= 20
    for name, size in known:
        assert getattr(torch, name).itemsize == size, name


def test_reductions_are_numbered_as_torch_numbers_them() -> None:
    distributed = pytest.importorskip("torch.distributed")
    for code, name in enumerate(schema.REDUCE_OPS[:-1]):
        assert int(getattr(distributed.ReduceOp, name.upper())) == code


def test_a_new_field_is_one_line() -> None:
    # C++ has its place, the tables of readers its column, exported tables its meaning.
    rows = [("state", "B", "code", "how far"), ("colour", "I", "count", "as stored", "what exports say")]
    fields = schema.lay_out(rows)
    assert "constexpr uint64_t AT_COLOUR = 1;" in schema.cpp_header(fields)
    state, colour = tables.columns_of(fields)
    assert (colour.name, colour.code, colour.field, colour.exported) == ("colour", "i8", "colour", "what exports say")
    assert (state.code, state.exported) == ("u1", "")
    assert tables.dtype_of((state, colour)).names == ("state", "colour")


def test_tables_hold_every_field_of_the_record_as_it_is_or_counted_from_the_issue() -> None:
    held = {column.field for column in tables.OPERATIONS if column.field}
    assert {field.name for field in schema.RECORD} - held == {
        "returned_after",
        "waited_from",
        "waited_for",
        "done_after",
    }


def test_cpp_header_carries_every_offset_and_code() -> None:
    numbers = dict(re.findall(r"constexpr uint\d+_t (\w+) = (\d+)(?:ull)?;", schema.cpp_header()))
    for field in schema.RECORD:
        assert int(numbers[f"AT_{field.name.upper()}"]) == field.offset
    for field in schema.HEADER:
        assert int(numbers[f"HEAD_AT_{field.name.upper()}"]) == field.offset
    assert int(numbers["STATE_FAILED"]) == 4
    assert int(numbers["FORMAT_VERSION"]) == schema.FORMAT_VERSION


def test_every_kind_of_entry_is_documented_and_read() -> None:
    assert set(strings.READERS) == set(schema.STRING_ENTRIES)
