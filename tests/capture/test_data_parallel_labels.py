"""What DDP and FSDP do on the user's behalf carries their label: which bucket, which module, which part of set-up."""

from itertools import pairwise
from pathlib import Path

import pytest

from dtprof.job.api_names import find_apis
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs

BLOCKS, WIDTH = 4, 64
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH + 2 * WIDTH)
HEAD_BYTES = 4 * (WIDTH + 1)
MARK_BYTES = 4
Operation = tuple[str, str, int, str | None]


def sections(tables: RankTables) -> list[list[Operation]]:
    """Return name, label, bytes and axis of all operations, cut where the program calls one of its own."""
    rows = []
    for row in tables.operations:
        site = tables.sites[int(row["site"])]
        label = site.label.text if site.label is not None else ""
        rows.append((tables.ops[row["op"]], label, int(row["nbytes"]), tables.groups[int(row["group"])].axis))
    marks = [i for i, row in enumerate(rows) if row[:3] == ("all_reduce", "", MARK_BYTES)]
    return [rows[begin + 1 : end] for begin, end in pairwise(marks)]


def passes(section: list[Operation]) -> list[list[tuple[int, int]]]:
    """Return index and bytes of the buckets of each backward pass."""
    found: list[list[tuple[int, int]]] = []
    for _, label, nbytes, _ in section:
        if label.startswith("ddp bucket "):
            index = int(label.split()[2].rstrip(","))
            if index == 0:
                found.append([])
            found[-1].append((index, nbytes))
    return found


def test_buckets_and_modules_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    jobs.recorded(run, jobs.forked(4, jobs.PROGRAMS / "data_parallel.py"), env={"PYTHONWARNINGS": "ignore"})
    for tables in open_run(run).load_all():
        assert tables.problems == ()
        assert tables.notes == ()
        plain, unused, static, half, hooked, accumulating, *fsdp = sections(tables)
        unlabelled = [
            row for section in (plain, unused, static, half, accumulating, *fsdp) for row in section if not row[1]
        ]
        assert {row[0] for row in unlabelled} == {"barrier"}
        check_ddp(plain, unused, static, half, hooked, accumulating)
        check_fsdp(*fsdp)
        apis = find_apis(tables, tables.operations)
        by_api = {apis.names[i] for i in apis.of_operation}
        assert by_api == {"ddp", "fsdp", "barrier", "all_reduce"}


def check_ddp(
    plain: list[Operation],
    unused: list[Operation],
    static: list[Operation],
    half: list[Operation],
    hooked: list[Operation],
    accumulating: list[Operation],
) -> None:
    # The hook that only reduces knows its bucket from torch: what the reader works out must be the same.
    assert passes(plain) == passes(hooked)
    assert passes(accumulating) == passes(plain)  # four backward passes of 16 communicate
    first, *rebuilt = passes(plain)
    assert len(rebuilt) == 3
    assert first != rebuilt[0]
    assert rebuilt.count(rebuilt[0]) == 3
    for section in (plain, unused, static):
        for buckets in passes(section):
            assert [index for index, _ in buckets] == list(range(len(buckets)))
            expected = BLOCKS * BLOCK_BYTES + HEAD_BYTES * (2 if section is unused else 1)
            assert sum(nbytes for _, nbytes in buckets) == expected
    assert [[(i, 2 * nbytes) for i, nbytes in buckets] for buckets in passes(half)] == passes(plain)
    assert {len(buckets) for buckets in passes(unused)} == {3}
    maps = [row for row in unused if row[1] == "ddp map of used parameters"]
    assert len(maps) == 4
    assert {row[1] for row in plain if row[0] == "broadcast"} == {
        "ddp set-up",
        "ddp broadcast of parameters and buffers",
        "ddp broadcast of buffers",
        "ddp rebuild of buckets",
    }
    assert {row[3] for row in plain} == {"dp"}


def check_fsdp(
    second: list[Operation],
    second_hybrid: list[Operation],
    first: list[Operation],
    first_hybrid: list[Operation],
    first_replicated: list[Operation],
) -> None:
    layers = [f"layers.{i}" for i in range(BLOCKS)]
    units = ["the root module", *layers]
    assert {row[:2] for row in second if row[0] != "barrier"} == {
        *(("all_gather", f"fsdp all-gather of {unit}") for unit in units),
        *(("reduce_scatter", f"fsdp reduce-scatter of {unit}") for unit in units),
    }
    gathered = [row[1].removeprefix("fsdp all-gather of ") for row in second if row[0] == "all_gather"]
    assert gathered == 2 * [*units, *reversed(layers)]
    shares = {(row[1], row[2]) for row in second}
    assert all((f"fsdp all-gather of {layer}", BLOCK_BYTES // 2) in shares for layer in layers)  # two shards
    hybrid = [row for row in second_hybrid if row[0] != "barrier"]
    assert {(op, axis) for op, _, _, axis in hybrid} == {
        ("all_gather", "dp_shard"),
        ("reduce_scatter", "dp_shard"),
        ("all_reduce", "dp_replicate"),
    }
    for op, label, _, _ in hybrid:
        assert label.startswith(f"fsdp {op.replace('_', '-')} of ")
    for section in (first, first_hybrid, first_replicated):
        found = [row for row in section if row[0] != "barrier" and row[1] != "fsdp norm of gradients"]
        assert {row[1].partition(" of ")[2] for row in found} == {"layers.0", "the root module"}
        assert all(label.startswith(f"fsdp {op.replace('_', '-')} of ") for op, label, _, _ in found)
    names = {"all_gather", "reduce_scatter", "all_reduce", "barrier"}
    assert {row[0] for row in first_hybrid} == names
    assert {row[0] for row in first_replicated} == {"all_reduce", "barrier"}
    assert [row[1] for row in first].count("fsdp norm of gradients") == 1
