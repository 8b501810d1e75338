"""A run is read back as it was written; what holds no run, or a newer one, is refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtprof.capture.group_descriptions import members_of
from dtprof.errors import NewerFormatError, NotARunError
from dtprof.records import paths, schema
from dtprof.records.rank_log.segments import OperationRows
from dtprof.records.reader import open_run
from dtprof.records.sites import Site
from dtprof.records.tables import UNKNOWN_NS
from tests.builders import RankBuilder, write_run
from tests.records.segments import fill_up, record, write_rank

OPERATION_KINDS = (schema.KIND["collective"], schema.KIND["p2p"])
RANGES = {"B": (0, 2**8 - 1), "H": (0, 2**16 - 1), "I": (0, 2**32 - 1), "i": (-(2**31), 2**31 - 1), "Q": (0, 2**62)}


def any_value(field: schema.Field) -> st.SearchStrategy[Any]:
    if field.code == "f":
        return st.floats(0, 2.0**60, width=32)
    return st.integers(*RANGES[field.code])


RECORDS = st.lists(
    st.fixed_dictionaries(
        {field.name: any_value(field) for field in schema.RECORD}
        | {"state": st.integers(1, 4), "kind": st.sampled_from(OPERATION_KINDS), "numel": st.integers(0, 2**50)}
    ),
    max_size=6,
)


@given(RECORDS)
def test_every_field_of_every_operation_is_read_back(tmp_path: Path, written: list[dict[str, Any]]) -> None:
    segment = write_rank(tmp_path, [record(**values) for values in written])
    fill_up(segment)
    tables = open_run(tmp_path).load(0)
    assert tables.problems == ()
    assert tables.operations["issued_ns"].tolist() == sorted(values["issued_ns"] for values in written)
    in_order = sorted(written, key=lambda values: values["issued_ns"])
    for row, values in zip(tables.operations, in_order, strict=True):
        issued = values["issued_ns"]

        def after(name: str, known: bool, values: dict[str, Any] = values, issued: int = issued) -> int:
            return issued + int(values[name]) if known else UNKNOWN_NS

        for name in ("op", "kind", "state", "flags", "waits", "dtype", "reduce_op", "thread", "group", "seq", "peer"):
            assert row[name] == values[name], name
        for name in ("tag", "site", "step", "numel"):
            assert row[name] == values[name], name
        sizes = dict(enumerate(size for _, size in schema.DTYPES))
        assert row["nbytes"] == values["numel"] * sizes.get(values["dtype"], 0)
        assert row["returned_ns"] == after("returned_after", values["state"] >= 2)
        assert row["wait_begin_ns"] == after("waited_from", values["waits"] > 0)
        assert row["done_ns"] == after("done_after", values["state"] >= 3)
        assert row["wait_ns"] == int(values["waited_for"])


def test_a_run_with_everything_in_it_is_read_back(tmp_path: Path) -> None:
    rank = RankBuilder(1, world_size=2, attempt=3, dropped_events=7, truncated=True)
    pair = rank.group("5", (1, 0), "pair")
    rank.threads = {1: "MainThread", 2: "autograd"}
    rank.sizes = {1: ((1, 3), (2, 2))}
    rank.span("forward", 5, 30)
    rank.span("backward", 40)
    rank.op("all_reduce", 50, 80, nbytes=64, dtype="float32", reduce_op="sum", site=rank.site("DDP", line=9))
    rank.op("send", 90, 95, group=pair, peer=0, tag=4, nbytes=16, is_async=True, waits=(92, 95))
    rank.op("all_gather", 100, group=pair)
    rank.span("optimizer", 110, 120)
    rank.sample("rss_bytes", 121, 1 << 33)
    rank.exception(130, "ValueError", 'no "such" thing', line=12)
    run = open_run(write_run(tmp_path / "run", [RankBuilder(0, world_size=2), rank], exit_status=1))
    assert run.ranks == [0, 1]
    assert run.manifest.command == ("torchrun", "train.py")
    assert run.manifest.exit_status == 1
    read, expected = run.load(1), rank.tables()
    for name in ("operations", "spans", "samples"):
        np.testing.assert_array_equal(getattr(read, name), getattr(expected, name))
    for name in ("rank", "attempt", "world_size", "local_rank", "pid", "host", "boot_id", "hook", "torch_version"):
        assert getattr(read, name) == getattr(expected, name), name
    for name in ("ops", "raw_ops", "sites", "groups", "threads", "sizes", "features", "exceptions", "python_version"):
        assert getattr(read, name) == getattr(expected, name), name
    for name in (
        "first_ns",
        "last_ns",
        "ended_ns",
        "monotonic_to_realtime_ns",
        "dropped_events",
        "truncated",
        "closed",
    ):
        assert getattr(read, name) == getattr(expected, name), name
    assert read.problems == ()
    assert read.num_events == 7


def test_events_of_several_segments_come_in_one_table_by_time(tmp_path: Path) -> None:
    for number, times in enumerate([(30, 10), (50, 20), (40,)]):
        fill_up(write_rank(tmp_path, [record(issued_ns=t) for t in times], segment=number, capture_ns=5, errors=1))
    tables = open_run(tmp_path).load(0)
    assert tables.operations["issued_ns"].tolist() == [10, 20, 30, 40, 50]
    assert (tables.capture_ns, tables.errors) == (15, 3)


def test_more_operations_than_were_expected_follow_the_others() -> None:
    rows = OperationRows(expected=3)
    for numbers in ((1, 2), (3, 4), (5,)):  # the second pair no longer fits
        rows.add(len(numbers))["issued_ns"] = numbers
    assert [part["issued_ns"].tolist() for part in rows.parts()] == [[1, 2], [3, 4], [5]]


def test_last_attempt_of_a_rank_is_read_unless_another_is_named(tmp_path: Path) -> None:
    for attempt in (0, 2, 10):
        fill_up(write_rank(tmp_path, [record(issued_ns=attempt)], attempt=attempt))
    run = open_run(tmp_path)
    assert run.load(0).attempt == 10
    assert run.load(0, 2).operations["issued_ns"].tolist() == [2]
    assert [tables.attempt for tables in run.load_all()] == [10]


def test_operation_unknown_to_this_dtprof_keeps_its_own_name(tmp_path: Path) -> None:
    segment = write_rank(tmp_path, [record(op=0)])
    fill_up(segment)
    segment.with_name(paths.STRINGS).write_text('{"k":"op","id":0,"name":"_all_shuffle_"}\n{"k":"new kind"}\n')
    tables = open_run(tmp_path).load(0)
    assert tables.ops == ("all_shuffle",)
    assert tables.problems == ()


def test_later_entry_of_a_group_adds_to_the_first(tmp_path: Path) -> None:
    segment = write_rank(tmp_path, [])
    fill_up(segment)
    lines = ['{"k":"group","id":1,"name":"3","description":"tp","size":2,"rank":0}']
    lines += ['{"k":"group","id":1,"name":"3","ranks":[2,5],"backend":"gloo","timeout_s":null}']
    segment.with_name(paths.STRINGS).write_text("\n".join(lines) + "\n")
    group = open_run(tmp_path).load(0).groups[1]
    assert (group.description, group.size, group.ranks, group.backend) == ("tp", 2, (2, 5), "gloo")


@pytest.mark.parametrize("version", [3, 77])
def test_newer_segment_is_refused_naming_both_versions(tmp_path: Path, version: int) -> None:
    fill_up(write_rank(tmp_path, [record()], format_version=version))
    with pytest.raises(NewerFormatError, match=rf"events\.00000 is of format {version}; .* up to 2: .* newer"):
        open_run(tmp_path).load(0)


def test_newer_manifest_is_refused_naming_both_versions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    (run / paths.MANIFEST).write_text(json.dumps({"format_version": 3, "ranks": "in the cloud"}))
    with pytest.raises(NewerFormatError, match=r"run\.json is of format 3; this dtprof reads formats up to 2"):
        open_run(run)


def test_missing_path_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="does not exist; expected the run directory that `dtprof run` printed"):
        open_run(tmp_path / "gone")


def test_file_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.touch()
    with pytest.raises(NotARunError, match="is a file; expected a run directory"):
        open_run(file)


def test_name_that_cannot_exist_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match="cannot be read"):
        open_run(tmp_path / ("x" * 300))


@pytest.mark.parametrize("content", [None, "train.py", "rank-00000.0", "node-a/"])
def test_directory_without_a_run_says_how_to_start_one(tmp_path: Path, content: str | None) -> None:
    if content and content.endswith("/"):
        (tmp_path / content).mkdir()
    elif content:  # a file, even where it has the name of a rank's folder
        (tmp_path / content).touch()
    with pytest.raises(NotARunError, match=r"holds no run: .* start one with `dtprof run -o DIR -- COMMAND`"):
        open_run(tmp_path)


def test_run_whose_ranks_have_not_started_opens(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", []))
    assert run.ranks == []
    assert list(run.load_all()) == []
    assert run.problems == ()


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", '"x"', "\x00", "{} {}", '{"command": {"a": 1}, "settings": 3}']
)
def test_unreadable_manifest_leaves_the_ranks(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    (run / paths.MANIFEST).write_text(content)
    opened = open_run(run)
    assert opened.manifest.command == ()
    assert opened.load(0).problems == ()
    assert len(opened.problems) == (not content.startswith('{"command'))


def test_missing_manifest_is_said(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", [RankBuilder(0, world_size=1)], command=None))
    assert run.problems == ("run.json is missing: the command, the start and the exit status are not known",)


def test_missing_rank_leaves_the_others(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", [RankBuilder(rank, world_size=3) for rank in (0, 2)]))
    assert run.ranks == [0, 2]
    assert {tables.world_size for tables in run.load_all()} == {3}


def test_missing_segment_in_the_middle_is_said_unless_the_log_dropped_it(tmp_path: Path) -> None:
    for number in (0, 1, 4):
        fill_up(write_rank(tmp_path, [record(issued_ns=number)], segment=number))
    tables = open_run(tmp_path).load(0)
    assert tables.operations["issued_ns"].tolist() == [0, 1, 4]
    assert tables.problems == ("rank-00000.0 lacks 2 segment files between the first and the last",)
    fill_up(write_rank(tmp_path, [record(issued_ns=4)], segment=4, dropped=2 * schema.SEGMENT_CAPACITY))
    tables = open_run(tmp_path).load(0)
    assert tables.problems == ()
    assert tables.dropped_events == 2 * schema.SEGMENT_CAPACITY


def test_empty_rank_folder_says_that_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.0").mkdir()
    tables = open_run(tmp_path).load(0)
    assert tables.num_events == 0
    assert tables.problems == (
        "rank-00000.0 has no readable segment: nothing this rank did is known",
        "rank-00000.0/strings.jsonl is missing: operations, lines and groups have no names",
    )


@pytest.mark.parametrize("head", [0, 1, schema.SEGMENT_CAPACITY + 5, 2**64 - 1])
def test_records_count_whatever_the_head_says(tmp_path: Path, head: int) -> None:
    """Claims pass the capacity, and threads write the head in any order: the state of a record decides."""
    fill_up(write_rank(tmp_path, [record(issued_ns=1), record(state=0), record(issued_ns=3)], head=head))
    tables = open_run(tmp_path).load(0)
    assert tables.operations["issued_ns"].tolist() == [1, 3]
    assert tables.problems == ()


def test_full_segment_is_read_to_its_last_record(tmp_path: Path) -> None:
    records = [record(seq=i, issued_ns=i) for i in range(schema.SEGMENT_CAPACITY)]
    fill_up(write_rank(tmp_path, records))
    assert open_run(tmp_path).load(0).operations["seq"].tolist() == list(range(schema.SEGMENT_CAPACITY))


@pytest.mark.parametrize(("field", "value"), [("byte_order", 0x04030201), ("record_size", 72)])
def test_segment_of_another_layout_is_skipped_with_both_values(tmp_path: Path, field: str, value: int) -> None:
    fill_up(write_rank(tmp_path, [record()], **{field: value}))
    tables = open_run(tmp_path).load(0)
    assert tables.num_events == 0
    assert "expected 0x1020304 and 64" in tables.problems[0]


def test_exit_statuses_and_processes_are_read_from_every_node(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    for host, pid, status in (("a", 11, -9), ("b", 12, 3)):
        node = run / paths.node_folder_name(host)
        node.mkdir()
        exit_row = {"pid": pid, "status": status, "t_ns": 5}
        lines = [json.dumps(exit_row), '{"pid": "x"}', "[1]", "garbage", '{"pid": 7, "stat']
        (node / paths.EXITS).write_text("\n".join(lines))
        (node / paths.PROCESSES).write_text(json.dumps({"pid": pid}) + "\n")
    opened = open_run(run)
    ended = [opened.exit_of("a", 11), opened.exit_of("b", 12)]
    assert [end.status if end else None for end in ended] == [-9, 3]
    assert opened.exit_of("b", 11) is None
    assert [row["pid"] for row in opened.processes] == [11, 12]
    assert opened.problems == tuple(f"node-{host}/exits.jsonl holds 2 damaged lines, left out" for host in "ab")


def test_user_frame_of_an_exception_may_be_unknown(tmp_path: Path) -> None:
    segment = write_rank(tmp_path, [])
    fill_up(segment)
    lines = [
        '{"k":"exception","t_ns":5,"type":"E","message":"m","traceback":"t","frame":null}',
        '{"k":"exception","t_ns":6,"type":"F","frame":{"file":"a.py","line":null,"function":"f"}}',
    ]
    segment.with_name(paths.STRINGS).write_text("\n".join(lines) + "\n")
    first, second = open_run(tmp_path).load(0).exceptions
    assert first.frame is None
    assert second.frame == Site(file="a.py", line=0, function="f")


def test_members_of_a_large_group_are_a_range(tmp_path: Path) -> None:
    ranks = range(3, 3 + 4 * 32, 4)
    folder = tmp_path / "run" / "rank-00003.0"
    folder.mkdir(parents=True)
    entry = {"k": "group", "id": 0, "name": "dp0", "description": "mesh_dp", "size": 32, **members_of(ranks)}
    (folder / "strings.jsonl").write_text(json.dumps(entry) + "\n")
    assert entry["range"] == [3, 32, 4]
    assert open_run(tmp_path / "run").load(3).groups[0].ranks == tuple(ranks)
    assert members_of([*range(20), 30]) == {"ranks": [*range(20), 30]}
    assert members_of([0, 1]) == {"ranks": [0, 1]}


def test_code_of_torch_compile_is_said_to_call_a_compiled_graph(tmp_path: Path) -> None:
    rank = RankBuilder(0, world_size=1)
    rank.op("all_reduce", 0, 1, site=rank.site("DisableContext.__call__.<locals>._fn", line=3))
    rank.op("all_reduce", 2, 3, site=rank.site("all_reduce", line=4))
    sites = open_run(write_run(tmp_path / "run", [rank])).load(0).sites
    assert [(site.line, site.api) for site in sites.values()] == [(3, "compiled graph"), (4, "all_reduce")]
