"""Profiles of XLA as protobuf: one that JAX wrote, and messages by hand."""

import json
import lzma
import struct
from pathlib import Path

import pytest

from dtprof.errors import NotATraceError
from dtprof.interchange.importers.wire_format import fields, numbers, real, signed
from dtprof.interchange.importers.xplane_files import is_xplane, read_events
from tests.interchange.test_other_formats import imported, subjects, xla

PROFILE = Path(__file__).parent / "profiles" / "jax-0.10.2-4-devices.xplane.pb.xz"
"""6 steps of `tests/clients/programs/jax_spmd.py`: jax 0.10.2 on 4 devices of the host, a mesh of 2 x 2."""
US = 1000
PS = 1_000_000  # of a us


def message(*parts: tuple[int, int | float | str | bytes]) -> bytes:
    """Return a message with these fields."""
    written = b""
    for number, value in parts:
        if isinstance(value, float):
            written += varint(number << 3 | 1) + struct.pack("<d", value)
        elif isinstance(value, int):
            written += varint(number << 3) + varint(value % (1 << 64))
        else:
            data = value.encode() if isinstance(value, str) else value
            written += varint(number << 3 | 2) + varint(len(data)) + data
    return written


def varint(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


STATS = ("hlo_op", "program_id", "device_ordinal", "step_num", "Hlo Proto")


def plane(name: str, names: list[str], lines: list[bytes], *more: tuple[int, bytes]) -> bytes:
    """Return a plane whose events have these names, by number from 1."""
    events = [(4, message((1, i), (2, message((1, i), (2, name))))) for i, name in enumerate(names, 1)]
    stats = [(5, message((1, i), (2, message((1, i), (2, name))))) for i, name in enumerate(STATS, 1)]
    return message((1, 3), (2, name), *((3, line) for line in lines), *events, *stats, *more)


def event(name: int, begin_us: int, us: int, **stats: int | str) -> bytes:
    told = [
        (4, message((1, STATS.index(key) + 1), (5 if isinstance(value, str) else 4, value)))
        for key, value in stats.items()
    ]
    return message((1, name), (2, begin_us * PS), (3, us * PS), *told)


def line(name: str, events: list[bytes], *, begin_ns: int = 10**18) -> bytes:
    return message((1, 1), (2, name), (3, begin_ns), *((4, event) for event in events))


def instruction(name: str, *more: tuple[int, bytes], dimensions: tuple[int, ...] = (64, 4)) -> bytes:
    shape = message((2, 11), (3, b"".join(map(varint, dimensions))))  # f32
    return message((1, name), (2, "all-reduce"), (3, shape), *more)


GROUPS = {
    "listed": (49, message((1, b"\0\1"))),
    "list of devices": (87, message((1, message((1, b"\0\1"))))),
    "rows": (87, message((2, message((1, 1), (2, 2), (3, b"\2"))))),
    "mesh": (93, message((1, message((1, message((1, "x"), (2, 2))))), (2, message()))),
}


def space(*groups: tuple[int, bytes]) -> bytes:
    """Return one step of two devices: 500 us of a fusion, an all-reduce from 400 (device 1: 450) to 700 us."""
    lines = []
    for device, late in ((0, 0), (1, 50)):
        told: dict[str, int | str] = {"program_id": 7, "device_ordinal": device}
        events = [
            event(1, 0, 500, hlo_op="fusion.1", **told),
            event(2, 400 + late, 300 - late, hlo_op="all-reduce.1", **told),
        ]
        lines.append(line(f"queue {device}", events))
    lines.append(line("python", [event(3, 0, 1000, step_num=4)]))
    program = message((1, message((3, message((2, instruction("all-reduce.1", *groups)))))))
    described = message((1, 1), (2, "jit_step(7)"), (5, message((1, 2), (4, 7))), (5, message((1, 5), (6, program))))
    return message(
        (1, plane("/host:metadata", [], [], (4, message((1, 1), (2, described))))),
        (1, plane("/host:CPU", ["fusion.1", "all-reduce.1", "train"], lines)),
    )


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_members_and_size_of_a_collective_are_those_of_the_program(tmp_path: Path, groups: tuple[int, bytes]) -> None:
    summary = imported(tmp_path, write(tmp_path / "t", space(groups)))
    (row,) = summary.collectives
    assert (summary.world_size, row.op, row.group, row.bytes) == (2, "all_reduce", "0,1", 64 * 4 * 4)
    assert (row.wait_ns, row.transfer_ns, row.exposed_ns) == (25 * US, 250 * US, 200 * US)
    parts = summary.ranks[0].partition_ns
    assert parts is not None
    assert (parts["compute"], parts["exposed_transfer"], parts["idle"]) == (500 * US, 200 * US, 300 * US)


def test_collective_whose_program_does_not_tell_has_no_waits(tmp_path: Path) -> None:
    summary = imported(tmp_path, write(tmp_path / "t", space()))
    (row,) = summary.collectives
    assert (row.wait_ns, row.transfer_ns) == (None, None)
    assert "wait_ns" in subjects(summary)


def test_operations_of_an_accelerator_are_events_of_its_line_and_steps_those_of_another(tmp_path: Path) -> None:
    text = "%all-reduce.1 = (f32[4]{0:T(8,128)}, f32[12]{0}) all-reduce(%a, %b), replica_groups=[1,2]<=[2]"

    def device(number: int) -> bytes:
        late = 10 * number
        operations = line("XLA Ops", [event(1, 0, 100), event(2, 100 + late, 60 - late)])
        steps = line("Steps", [event(3, 0, 200)])
        return plane(f"/device:TPU:{number}", ["%fusion.1 = f32[] fusion(%x)", text, "5"], [operations, steps])

    summary = imported(tmp_path, write(tmp_path / "t", message((1, device(0)), (1, device(1)))))
    (row,) = summary.collectives
    assert (summary.world_size, row.op, row.group, row.bytes) == (2, "all_reduce", "0,1", 16 * 4)
    assert (row.wait_ns, row.transfer_ns) == (5 * US, 50 * US)
    parts = summary.ranks[0].partition_ns
    assert parts is not None
    assert (parts["compute"], parts["idle"]) == (100 * US, 40 * US)


def test_profile_of_jax_has_its_steps_its_groups_and_their_sizes(tmp_path: Path) -> None:
    data = lzma.decompress(PROFILE.read_bytes())
    summary = imported(tmp_path, write(tmp_path / "t.xplane.pb", data))
    assert summary.world_size == 4
    # Devices 0 to 3 in a mesh of data x model: the output of the second layer, 16 x 64 floats, is summed over model;
    # the loss and both gradients, 1 + 2 x 64 x 64 floats, over data.
    found = {(row.op, row.group, row.bytes) for row in summary.collectives}
    over_model, over_data = 16 * 64 * 4, (1 + 2 * 64 * 64) * 4
    assert found == {
        ("all_reduce", group, size)
        for size, groups in ((over_model, ("0,1", "2,3")), (over_data, ("0,2", "1,3")))
        for group in groups
    }
    used = summary.steps.used
    assert used is not None
    assert {row.count for row in summary.collectives} == {used[1] - used[0] + 1}
    for rank in summary.ranks:
        parts = rank.partition_ns
        assert parts is not None
        assert rank.step_ns is not None
        assert abs(sum(part or 0 for part in parts.values()) - rank.step_ns) <= len(parts)
    assert not subjects(summary) & {"wait_ns", "bytes", "steps"}


def test_json_of_a_profile_that_is_there_as_protobuf_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "host.xplane.pb", space(GROUPS["listed"]))
    write(tmp_path / "host.trace.json.gz", json.dumps(xla(told=False)).encode())
    summary = imported(tmp_path, tmp_path)
    assert (summary.world_size, [row.group for row in summary.collectives]) == (2, ["0,1"])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (space()[:-3], "a field of"),
        (message((1, plane("/host:CPU", [], [b"\x0b"]))), "a field of kind 3"),
        (message((1, plane("/host:CPU", [], [b"\x08\xff"]))), "a number breaks off"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path: Path, data: bytes, found: str) -> None:
    path = write(tmp_path / "cut.xplane.pb", data)
    assert is_xplane(data)
    with pytest.raises(NotATraceError, match=found) as raised:
        list(read_events(path))
    assert str(path) in str(raised.value)


def test_numbers_of_the_wire_format() -> None:
    data = memoryview(message((1, 300), (2, -5), (3, b"\x01\xac\x02"), (4, 0.5)))
    values = dict(fields(data))
    assert (values[1], signed(int(values[2]))) == (300, -5)  # type: ignore[arg-type]
    assert (numbers(values[3]), real(values[4])) == ([1, 300], 0.5)
